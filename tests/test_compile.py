"""A kernel of each kind compiles for GPUs that are not here within its budget, and one that does not is seen."""

import functools
import re

import pytest

pytest.importorskip("triton", reason="kernels need Triton")

from fusedattn.bench import bounds, flow, hazards, sass, tune
from fusedattn.bench import compiled as compiling
from fusedattn.bench import report as kernels

from fusedattn import configs

from . import offline_compile as offline
from .inside import compiled, only_interpreted, passes_compiled


@only_interpreted
def test_this_file_without_the_interpreter():
    passes_compiled(__file__)


def first(kernel, variant="full"):
    """The row of what a call in bfloat16 with D = 64 on a GPU of compute capability 9.0 tries first."""
    tiles = configs.HOPPER[64] if kernel == "hopper" else configs.tiles(kernel, 90, 2, 64)
    return compiling.Row(kernel, 90, "bf16", 64, variant, tiles[0], (0, len(tiles)))


@functools.cache
def report(kernel):
    return compiling.compile_row(first(kernel))


# Tier 2 has all of them; these show that it would see what it looks for.
@compiled
@pytest.mark.parametrize("kernel", ["forward", "dkdv", "hopper"])
def test_a_kernel_is_within_its_budget(kernel):
    found = report(kernel)
    assert list(offline.faults(first(kernel), found)) == []
    assert found.counts["wgmma"] > 0 and len(found.loop) > 100


@compiled
def test_options_are_what_is_compiled():
    plain = report("forward").asm["ptx"]
    masked = compiling.compile_row(first("forward", "everything")).asm["ptx"]
    assert "ld.global.b8" in masked and "ld.global.b8" not in plain


@compiled
def test_the_kernel_for_hopper_is_read_as_it_is():
    found = report("hopper")
    sass = found.asm["sass"]
    assert [hazards.overlapped(turn) for turn in found.turns] == [(66, 66)] * 2
    assert found.asked >= {24, 240} and found.copied == {"UTMALDG", "UTMASTG"}
    for turn in found.turns:  # without the mask, with the wait
        assert sum(text.startswith("FSEL") for text in turn) < 10
        assert sum("SYNCS.PHASECHK" in text for text in turn) == 2
    planted = re.sub(r"^(\s+/\*[0-9a-f]{4,}\*/\s+)WARPGROUP\.DEPBAR\S* gsb0, 0x0 ;", r"\1NOP ;", sass, flags=re.M)
    assert hazards.overwritten(sass) == () != hazards.overwritten(planted)


@compiled
def test_a_row_over_its_budget_is_named_and_fails(monkeypatch, capsys):
    tiles = configs.Tile(rows=128, keys=128, warps=4, stages=1), configs.Tile(64, 32, 4, 2)
    monkeypatch.setitem(configs.TABLE, ("dq", 80, 2, 64), tiles)
    assert offline.main(["--capability", "80", "--filter", "dq          sm_80   bf16  d64  full"]) == 1
    assert "128x128 w4 s1" in capsys.readouterr().out.splitlines()[-1]


@compiled
def test_tiles_are_compiled_to_be_ranked_and_one_that_cannot_be_is_no_error():
    row = first("dq")
    found = tune.ranked(row, tune.compile_tile(row, heads=None))
    assert not found.why and 300 < found.tflops < 990
    refused = tune.compile_tile(row._replace(tile=configs.Tile(64, 48, 4, 2)), heads=None)
    assert refused.startswith("does not compile: ") and "\n" not in refused


GOOD = compiling.Report(
    registers=200,
    spills=0,
    shared=98304,
    serialized=False,
    counts=dict.fromkeys(compiling.INSTRUCTIONS, 0) | dict(wgmma=36),
    loop=None,
    seconds=1.0,
    asm={},
)


@pytest.mark.parametrize(
    "change, said",
    [
        ({}, None),
        (dict(spills=4), "spills 4 bytes"),
        (dict(shared=232449), "232449 bytes of shared memory"),
        (dict(shared=101377), "on small GPUs"),
        (dict(counts=dict.fromkeys(compiling.INSTRUCTIONS, 0)), "tensor cores"),
        (dict(serialized=True), "asynchronously"),
    ],
)
def test_what_is_wrong_is_said(change, said):
    tile = configs.Tile(128, 128, 8, 2)
    row = compiling.Row("forward", 90, "bf16", 64, "full", tile, place=(1, 2))
    found = list(offline.faults(row, GOOD._replace(**change)))
    assert found == [] if said is None else any(said in fault for fault in found)


def test_the_committed_table_has_the_tiles_that_there_are():
    """After a change of `configs`: make compile ARGS=--report."""
    rows = [str(row).rstrip() for row in offline.table() if offline.reported(row)]
    committed = kernels.loops(offline.TABLE.read_text())
    assert list(committed) == rows
    forward = [line for line in rows if line.startswith("forward     sm_90   bf16  d128 full")]
    assert len(forward) == len(configs.TABLE["forward", 90, 2, 128])


@pytest.mark.parametrize("choice", [["--filter", "dq"], ["--capability", "90"]])
def test_a_report_is_of_the_whole_table(choice, capsys):
    with pytest.raises(SystemExit):
        offline.main(["--report", *choice])
    assert "--report" in capsys.readouterr().err


def code(*lines):
    """Instructions as cuobjdump prints them; LABEL: before one is what others jump to."""
    labels = {text.partition(": ")[0]: 16 * i for i, text in enumerate(lines) if ": " in text}
    for i, text in enumerate(lines):
        text = text.rpartition(": ")[2]
        target = text.rpartition(" ")[2]
        text = text.removesuffix(target) + f"{labels[target]:#x}" if target in labels else text
        yield f"        /*{16 * i:04x}*/      {text} ;"


def written(*lines):
    return "\n".join(code(*lines))


QK = "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT, gsb0"
PV = "HGMMA.64x64x16.F32.BF16 R88, R152, gdesc[UR8].tnspB, R88, gsb0"
LEAVE_ONE, LEAVE_NONE = "WARPGROUP.DEPBAR.LE gsb0, 0x1", "WARPGROUP.DEPBAR.LE gsb0, 0x0"


def test_a_turn_is_of_the_shortest_loop_that_multiplies():
    masked = ["MASKED: NOP", *[QK] * 40, "@P0 BRA MASKED"]
    plain = ["PLAIN: NOP", *[QK] * 20, "@P0 BRA PLAIN"]
    copy = ["COPY: NOP", *["LDG.E R2, desc[UR4][R8.64]"] * 5, "@P0 BRA COPY"]
    few = ["FEW: NOP", QK, "@P0 BRA FEW"]
    turns = flow.turns(written("OUTER: NOP", *masked, *plain, *copy, *few, "@P1 BRA OUTER", "EXIT"))
    assert sorted(map(len, turns)) == [22, 42]
    assert flow.turns(written("EXIT")) == flow.turns("") == ()


def test_a_turn_goes_around_the_mask_and_through_the_waits():
    wait = "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R2"
    lines = [
        "BRX R4 -0x1a0",  # to where nothing else leads: both warpgroups
        *["LOOP: NOP", "@P3 BRA NEXT", wait, "@!P0 BRA SPIN", "NEXT: NOP", QK, "@P1 BRA P2, PLAIN"],
        *["FSEL R24, R24, -INF, P4"] * 9,
        *["PLAIN: NOP", "@P4 BRA STORED", "STS [R2], R3", "STORED: MUFU.EX2 R24, R24", "@P5 BRA LOOP", "EXIT"],
        *["OTHER: NOP", QK, "BRA OTHER"],
        *["SPIN: NOP", wait, "@!P0 BRA SPIN", "BRA NEXT"],
    ]
    first, other = flow.turns(written(*lines))
    assert [text.partition(" ")[0] for text in first if not text.startswith("@")] == [
        *["NOP", "SYNCS.PHASECHK.TRANS64.TRYWAIT", "NOP", QK.partition(" ")[0], "NOP", "STS", "MUFU.EX2"]
    ]
    assert len(first) == 12 and len(other) == 3


def test_two_functions_are_not_read_as_one():
    with pytest.raises(ValueError, match="more than one function"):
        flow.blocks(written("EXIT") + "\n" + written("EXIT"))


@pytest.mark.parametrize(
    "instruction, expected",
    [
        ("FADD R152, R2, R3", [152]),
        ("@P1 FADD R152, R2, R3", [152]),
        ("@!PT FADD R152, R2, R3", []),
        ("LDS.128 R152, [R2]", [152, 153, 154, 155]),
        ("LDG.E.64 R152, desc[UR4][R8.64]", [152, 153]),
        ("LDSM.16.MT88.2 R152, [R2]", [152, 153]),
        ("IMAD.WIDE.U32 R152, R3, 0x10, R4", [152, 153]),
        ("SHF.R.U64 R152, R3, 0x1, R4", [152]),
        ("CS2R R152, SRZ", [152, 153]),
        ("CS2R.32 R152, SR_CLOCKLO", [152]),
        ("F2F.F64.F32 R152, R3", [152, 153]),
        ("DFMA R152, R2, R4, R6", [152, 153]),
        ("HMMA.16816.F32 R152, R4, R8, R12", [152, 153, 154, 155]),
        ("HGMMA.64x16x16.F32.BF16 R152, R4, gdesc[UR4], R152", list(range(152, 160))),
        ("SHFL.BFLY PT, R152, R3, 0x1, 0x1f", [152]),
        ("LOP3.LUT P0, R152, R3, 0x1, RZ, 0xc0, !PT", [152]),
        ("IADD3 R152, P0, R3, R4, RZ", [152]),
        ("ISETP.GE.AND P0, PT, R152, R3, PT", []),
        ("R2UR UR4, R152", []),
        ("STS.128 [R152], R156", []),
        ("STG.E desc[UR4][R152.64], R3", []),
        ("LDGSTS.E.BYPASS.128 [R152], desc[UR36][R10.64]", []),
        ("SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR7+0x10], RZ", []),
        ("BRX R152 -0x1a0", []),
        ("UIADD3 UR152, UR4, 0x1, URZ", []),
        ("EXIT", []),
    ],
)
def test_what_an_instruction_writes(instruction, expected):
    assert list(hazards.written(instruction)) == expected


WRITE = "F2FP.BF16.F32.PACK_AB R153, R25, R24"


@pytest.mark.parametrize(
    "lines, expected",
    [
        ([PV, WRITE, LEAVE_NONE], 1),
        ([PV, LEAVE_NONE, WRITE], 0),
        ([PV, "STS.128 [R152], R156", "FADD R2, R152, R153", LEAVE_NONE, WRITE], 0),  # reads
        ([PV, "FADD R151, R2, R3", "FADD R156, R2, R3", LEAVE_NONE], 0),
        ([PV, "LDS.128 R149, [R2]", LEAVE_NONE], 1),  # the last of four
        ([PV, "CS2R R150, SRZ", LEAVE_NONE], 0),
        ([PV, "HGMMA.64x128x16.F32.BF16 R90, gdesc[UR8], R90, gsb0", LEAVE_NONE], 2),  # the last of 64
        # The wait leaves the younger group running: which of the two is it?
        ([QK, PV, LEAVE_ONE, WRITE, LEAVE_NONE], 1),
        ([PV, QK, LEAVE_ONE, WRITE, LEAVE_NONE], 0),
        ([PV, QK, QK, "WARPGROUP.DEPBAR.LE gsb0, 0x2", WRITE], 0),
        ([PV, QK, "WARPGROUP.DEPBAR.LE gsb0, 0x2", WRITE], 1),
        ([PV.removesuffix(", gsb0"), LEAVE_NONE, WRITE], 1),  # of a group that is not complete
        ([PV.removesuffix(", gsb0"), QK, LEAVE_NONE, WRITE], 0),
        ([PV, "@P0 " + LEAVE_NONE, WRITE], 1),
        ([PV, "@P0 BRA AFTER", LEAVE_NONE, "AFTER: NOP", WRITE], 1),  # on one of two ways
        ([PV, "@P0 BRA AFTER", LEAVE_NONE, "EXIT", "AFTER: NOP", LEAVE_NONE, WRITE], 0),
        (["LOOP: NOP", WRITE, PV, "@P0 BRA LOOP", LEAVE_NONE], 1),  # in the next turn
        (["LOOP: NOP", WRITE, PV, LEAVE_NONE, "@P0 BRA LOOP"], 0),
        (["LOOP: NOP", QK, PV, LEAVE_ONE, "NOP", LEAVE_NONE, WRITE, "@P0 BRA LOOP", PV, WRITE], 1),  # behind it
        (["LOOP: NOP", PV, "@P0 BRA LOOP", LEAVE_NONE, WRITE], 0),
        ([PV, "CALL.REL.NOINC FUNCTION", LEAVE_NONE, "EXIT", "FUNCTION: NOP", WRITE, "RET.REL.NODEC R2 0x0"], 1),
    ],
)
def test_registers_that_a_product_may_still_read_are_not_written(lines, expected):
    found = hazards.overwritten(written(*lines, "EXIT"))
    assert len(found) == expected
    assert all(f"writes R{each.register}, which 'HGMMA" in str(each) for each in found)
    assert {each.register for each in found} <= set(range(152, 156))


EXP2 = "MUFU.EX2 R24, R24"


@pytest.mark.parametrize(
    "turn, expected",
    [
        ([QK, PV, LEAVE_ONE, EXP2, EXP2, LEAVE_NONE], (2, 2)),
        ([QK, PV, LEAVE_ONE, LEAVE_NONE, EXP2], (0, 1)),
        ([QK, PV, LEAVE_ONE, EXP2, LEAVE_NONE, EXP2], (1, 2)),
        ([QK, LEAVE_NONE, EXP2, PV, LEAVE_NONE], (0, 1)),
        ([EXP2, LEAVE_NONE, "MUFU.RCP R2, R2", QK, PV, LEAVE_ONE], (1, 1)),  # the loop begins in the middle
        ([QK, LEAVE_NONE], (0, 0)),
    ],
)
def test_exponentials_under_a_product_are_counted(turn, expected):
    assert hazards.overlapped(turn) == expected


# A loop of one warpgroup over 64 keys at D = 64, as small as one can be.
LOOP = (
    "LDGSTS.E.BYPASS.128 [R8], desc[UR36][R10.64]",
    "@!PT LDS RZ, [RZ]",
    "WARPGROUP.ARRIVE",
    *["HGMMA.64x64x16.F32.BF16 R24, gdesc[UR20], R24"] * 4,
    "WARPGROUP.DEPBAR.LE gsb0, 0x0",
    "FMNMX R2, R24, R25, !PT",
    "SHFL.BFLY PT, R3, R2, 0x1, 0x1f",
    *["FFMA R24, R24, R5, -R2"] * 3,
    *["MUFU.EX2 R24, R24"] * 2,
    "F2FP.BF16.F32.PACK_AB R24, R25, R24",
    *["@P1 HGMMA.64x64x16.F32.BF16 R88, R24, gdesc[UR16].tnspB, R88, gsb0"] * 4,
    "IMAD.MOV.U32 R2, RZ, RZ, R3",
    "IMAD.WIDE.U32 R2, R3, 0x10, R4",
    "UIADD3 UR4, UR4, 0x1, URZ",
    "ISETP.GE.U32.AND P0, PT, R2, R3, PT",
    "STS.128 [R2], R4",
    "BAR.SYNC.DEFER_BLOCKING 0x0",
    "@P0 BRA 0x0",
)


def test_instructions_are_counted_by_kind():
    expected = dict(tensor=8, exp2=2, fma=3, alu=4, load=1, store=1, barrier=3, other=5)
    assert sass.mix(LOOP) == expected and sum(expected.values()) == len(LOOP)


def test_the_bound_is_the_busiest_part():
    found = bounds.bound(LOOP, 90, warps=4)
    # 64 x 64 x 64 x 2 operations a product; 4096 in a clock
    assert found.clocks["tensor"] == 2 * 2 * 64**3 / 4096
    assert found.clocks["issue"] == len(LOOP)  # four warps, four instructions a clock
    assert found.clocks["exp2"] == 4 * 2 * 2 and found.clocks["fma"] == 4 * (3 + 1) / 4
    assert found.clocks["alu"] == 4 * 3 / 2  # one of the four multiplies, as fma does
    operands = 4 * (64 + 64) * 16 * 2 + 4 * 64 * 16 * 2  # the left one of the second product is in registers
    assert found.clocks["shared"] == (operands + 4 * 2 * 512) / 128
    assert found.clocks["l2"] == pytest.approx(4 * 512 * 132 / 5120)
    assert found.limit == "tensor" and found.overlapped == pytest.approx(4096 * 132 * 1.83 / 1e3)
    assert found.serial == pytest.approx(found.overlapped * 256 / (256 + len(LOOP)))
    assert bounds.bound(LOOP, 90, 4, useful=0.5).overlapped == pytest.approx(found.overlapped / 2)
    copied = bounds.bound(LOOP, 90, warps=4, copied=5120).clocks
    assert copied["l2"] == pytest.approx(found.clocks["l2"] + 132) and copied["shared"] == found.clocks["shared"] + 40
    slow = bounds.bound((*LOOP, *["MUFU.EX2 R24, R24"] * 128), 90, warps=4)
    assert slow.limit == "exp2" and slow.clocks["exp2"] == 130 * 4 * 2 > slow.clocks["tensor"]


def test_the_bound_knows_the_other_products():
    tf32 = bounds.bound(("HMMA.1688.F32.TF32 R4, R8, R12, R4",), 80, warps=8).clocks
    half = bounds.bound(("HMMA.16816.F32 R4, R8, R12, R4",), 80, warps=8).clocks  # fp16 is what has no name
    assert tf32["tensor"] == 8 * 2 * 2048 / 2048 and half["tensor"] == 8 * 4096 / 2048
    wide = bounds.bound(("HGMMA.64x128x8.F32.TF32 R4, gdesc[UR4], R4",), 90, warps=4).clocks
    assert wide["tensor"] == 2 * 2 * 64 * 128 * 8 / 4096 and wide["shared"] == (64 + 128) * 8 * 4 / 128
    with pytest.raises(ValueError, match="no product"):
        bounds.bound(("FFMA R2, R2, R3, R4",), 90, warps=4)


@pytest.mark.parametrize(
    "registers, shared, warps, expected",
    [
        (255, 163840, 8, 1),
        (128, 98304, 8, 2),
        (128, 0, 8, 2),  # 65536 registers are 16 warps of 128
        (100, 0, 4, 4),  # taken by eights, 104: four warps in each quarter
        (129, 0, 1, 12),  # three in each
        (32, 115713, 4, 1),  # two of them and what is reserved are more than 228 KB
        (32, 115712, 4, 2),
        (32, 0, 4, 16),
        (16, 0, 1, 32),
    ],
)
def test_how_many_blocks_a_multiprocessor_holds(registers, shared, warps, expected):
    assert bounds.blocks(bounds.GPUS[90], registers, shared, warps, compiling.SHARED[90]) == expected
