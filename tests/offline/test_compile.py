"""Tests that kernels compile within their budgets of spills and memory, and that broken rules are found."""

import functools
import itertools
import re

import pytest

pytest.importorskip("triton", reason="kernels need Triton")

import triton

from fusedattn.launch import tile_table, tuned

from ..inside import compiled
from . import compile as offline, compiled as compiling, hazards, operands, report as kernels
from .test_hazards import EXP2, LEAVE_NONE, LEAVE_ONE, PV, QK


def first(kernel, variant="full"):
    """Return the Row (kernel and tile) that a call in bfloat16 with D = 64 tries first on sm_90."""
    tiles = tile_table.HOPPER[64] if kernel == "hopper" else tile_table.tiles_for(kernel, 90, 2, 64)
    return compiling.Row(kernel, 90, "bf16", 64, variant, tiles[0], (0, len(tiles)))


@functools.cache
def report(kernel):
    return compiling.compile_row(first(kernel))


# `make compile` compiles all kernels and tiles; these tests show that it would find faults.
@pytest.mark.matrix
@compiled
@pytest.mark.parametrize("kernel", ["forward", "dkdv", "hopper"])
def test_a_kernel_is_within_its_budget(kernel):
    found = report(kernel)
    assert list(offline.faults(first(kernel), found)) == []
    assert found.counts["wgmma"] > 0 and len(found.loop) > 100


HEAVY = "softcap", "alibi_slopes", "biased", "dropout", "masked"
TOGETHER = [
    *(("hopper_bwd", 128, pair) for pair in itertools.combinations(HEAVY, 2)),
    *(("hopper_bwd_deterministic", 128, ("masked", option)) for option in ("softcap", "alibi_slopes", "dropout")),
    *(("hopper_bwd", 128, trio) for trio in itertools.combinations(HEAVY, 3) if not {"biased", "masked"} <= set(trio)),
    *(("hopper_bwd", 64, four) for four in itertools.combinations(HEAVY, 4)),
    *(("hopper_bwd_ds", 256, ("key_mask", option)) for option in ("alibi_slopes", "dropout")),
]


@pytest.mark.matrix
@compiled
@pytest.mark.parametrize("kernel, dim, options", TOGETHER)
def test_no_step_of_several_options_reloads_a_register(kernel, dim, options, monkeypatch):
    variants = compiling.VARIANTS
    monkeypatch.setitem(variants, "several", {name: x for each in options for name, x in variants[each].items()})
    row = compiling.Row(kernel, 90, "bf16", dim, "several", tile_table.BACKWARDS[kernel][dim][0], (0, 1))
    other = f"triton {triton.__version__}:" not in offline.TABLE.read_text()
    said = offline.faults(row, compiling.compile_row(row), other=other)
    # With DQ_AT 0 or 1 exponentials run after the last product. Loads of other tiles may be pending when dq's barrier
    # is signalled, which does not release those tiles. Others spill outside of the loop, or fuse a bias with a slope.
    allowed = re.compile(r"computes|spills|has 4 products|.* gives memory back")
    assert not [fault for fault in said if dim > 128 or not allowed.match(fault)]


@compiled
def test_a_tile_marked_bulk_adds_dq_by_the_copy_engine():
    row = first("one_pass")
    found = compiling.compile_row(row)
    assert row.tile.bulk and list(offline.faults(row, found)) == []
    by_threads = row._replace(tile=row.tile._replace(bulk=False))
    assert [*offline.faults(by_threads, found)] == ["uses the copy engine", "must not add dq by the copy engine"]


@pytest.mark.matrix
@compiled
def test_operands_ordered_for_narrower_loads_are_seen(monkeypatch):
    texts, disordered = [], operands.disordered
    monkeypatch.setattr(operands, "disordered", lambda text: texts.append(text) or disordered(text))
    row = first("dkdv", "everything")._replace(capability=80, tile=tile_table.Tile(64, 64, 8, 2))
    found = compiling.compile_row(row)
    assert found.disordered == ()
    (text,) = texts
    assert disordered(text.replace("kWidth = 2", "kWidth = 8")) == ("bf16 by 8",)
    said = list(offline.faults(row, found._replace(spills=0, disordered=("bf16 by 8",))))
    assert said == ["orders operands of mma.sync for narrower loads: bf16 by 8"]


@compiled
def test_the_kernel_for_hopper_is_read_as_it_is():
    found = report("hopper")
    sass = found.asm["sass"]
    assert [hazards.overlapped(step) for step in found.loops] == [(66, 66)] * 2
    assert found.asked >= {24, 240} and found.copied == {"UTMALDG", "UTMASTG"}
    for step in found.loops:  # each step has no mask, but a wait
        assert sum(text.startswith("FSEL") for text in step) < 10
        assert sum("SYNCS.PHASECHK" in text for text in step) == 2
    planted = re.sub(r"^(\s+/\*[0-9a-f]{4,}\*/\s+)WARPGROUP\.DEPBAR\S* gsb0, 0x0 ;", r"\1NOP ;", sass, flags=re.M)
    assert hazards.overwritten(sass) == () != hazards.overwritten(planted)


@pytest.mark.matrix
@compiled
def test_a_row_over_its_budget_is_named_and_fails(monkeypatch, capsys):
    tiles = tile_table.Tile(rows=128, keys=128, warps=4, stages=1), tile_table.Tile(64, 32, 4, 2)
    monkeypatch.setitem(tile_table.TABLE, ("dq", 80, 2, 64), tiles)
    assert offline.main(["--capability", "80", "--filter", f"{'dq':25}sm_80   bf16  d64  full"]) == 1
    assert "128x128 w4 s1" in capsys.readouterr().out.splitlines()[-1]


COUNTS = dict.fromkeys(compiling.INSTRUCTIONS, 0) | dict(wgmma=36)
FIELDS = dict(registers=200, spills=0, shared=98304, serialized=False, counts=COUNTS, loop=None, seconds=1.0, asm={})
GOOD = compiling.Report(**FIELDS)


@pytest.mark.parametrize(
    "change, said",
    [
        ({}, None),
        (dict(spills=4), "spills 4 bytes"),
        (dict(shared=232449), "232449 bytes of shared memory"),
        (dict(shared=101377), "on small GPUs"),
        (dict(counts=dict.fromkeys(compiling.INSTRUCTIONS, 0)), "tensor cores"),
        (dict(serialized=True), "serialised"),
    ],
)
def test_faults_of_a_universal_kernel(change, said):
    tile = tile_table.Tile(128, 128, 8, 2)
    row = compiling.Row("forward", 90, "bf16", 64, "full", tile, place=(1, 2))
    found = list(offline.faults(row, GOOD._replace(**change)))
    assert found == [] if said is None else any(said in fault for fault in found)


STEP = QK, PV, LEAVE_ONE, *[EXP2] * 34, LEAVE_NONE, "@P0 BRA 0x0"
LONGER = (*STEP, *["NOP"] * 2), (*STEP, *["NOP"] * 3)
ON_HOPPER = GOOD._replace(registers=168, loops=(STEP, STEP), asked=frozenset({24, 120, 240, 256}))
ON_HOPPER = ON_HOPPER._replace(copied=frozenset({"UTMALDG", "UTMASTG"}))


@pytest.mark.parametrize(
    "change, said",
    [
        ({}, None),
        (dict(registers=160), "takes 160 registers a thread, and is launched with 168"),
        (dict(asked=frozenset({24, 120, 232, 256})), "not with 240 and 24"),
        (dict(copied=frozenset({"UTMALDG"})), "no UTMASTG"),
        (dict(loops=(STEP,)), "1 main loops for 2"),
        (dict(loops=(STEP, (QK, PV, LEAVE_ONE, LEAVE_NONE, *STEP[3:]))), "0 of 34 exponentials of loop 1"),
        (dict(loops=((*STEP[:3], EXP2, *STEP[-2:]), STEP)), "6 instructions in loop 0, not within 5% of the"),
        (dict(loops=((*STEP, "NOP"), STEP)), None),  # within 5%
        (dict(loops=LONGER), "41 instructions in loop 0"),
        (dict(loops=((*STEP, *["NOP"] * 5), STEP)), None),  # one of two warpgroups, within 15%
        (dict(loops=((*STEP, *["NOP"] * 6), STEP)), "45 instructions in loop 0, not within 15%"),
        (dict(loops=((*STEP, "LDL.LU R0, [R1+0x8]"), STEP)), "1 reloads of registers in a step of loop 0"),
        (dict(overtaken=("'MOV R152, R2' writes R152",)), "writes R152"),
    ],
)
def test_faults_of_a_hopper_kernel(change, said):
    row = first("hopper")
    found = list(offline.faults(row, ON_HOPPER._replace(**change), {str(row).rstrip(): len(STEP)}))
    assert found == [] if said is None else len(found) == 1 and said in found[0]


@pytest.mark.parametrize("registers, good", [((168, 240, 24), True), ((168, 240, 32), False), ((160, 240, 24), False)])
def test_warpgroups_may_not_ask_for_more_registers_than_a_block_has(registers, good, monkeypatch):
    monkeypatch.setitem(tile_table.REGISTERS, 2, registers)
    found = ON_HOPPER._replace(registers=registers[0], asked=frozenset(registers[1:]))
    faults = list(offline.faults(first("hopper"), found))
    assert faults == [] if good else len(faults) == 1 and faults[0].startswith("asks for")


def test_the_committed_table_has_all_tiles():
    """The committed table of compiled kernels has all tiles. Otherwise run `make compile ARGS=--report`."""
    rows = [str(row).rstrip() for row in offline.table() if offline.reported(row)]
    committed = kernels.loops(offline.TABLE.read_text())
    assert list(committed) == rows
    forward = [line for line in rows if line.split()[:5] == ["forward", "sm_90", "bf16", "d128", "full"]]
    assert len(forward) == len(tuned.candidates("forward", 90, 2, 128))


def test_another_triton_may_spill_more_and_have_longer_loops():
    row, found = first("hopper"), ON_HOPPER._replace(spills=8, loops=LONGER)
    assert len(list(offline.faults(row, found, {str(row).rstrip(): len(STEP)}))) == 2
    assert list(offline.faults(row, found, other=True)) == []
    (said,) = offline.faults(row, found._replace(spills=16384), other=True)
    assert said.startswith("spills 16384 bytes")
