"""A kernel of each kind compiles for GPUs that are not here within its budget, and one that does not is seen."""

import pytest

pytest.importorskip("triton", reason="kernels need Triton")

from fusedattn.bench import bounds, sass, tune
from fusedattn.bench import compiled as compiling
from fusedattn.bench import report as kernels

from fusedattn import configs

from . import offline_compile as offline
from .inside import compiled, only_interpreted, passes_compiled


@only_interpreted
def test_this_file_without_the_interpreter():
    passes_compiled(__file__)


def first(kernel, capability, variant="full"):
    """The row of the tile that a call in bfloat16 with D = 64 tries first."""
    tiles = configs.tiles(kernel, capability, 2, 64)
    return compiling.Row(kernel, capability, "bf16", 64, variant, tiles[0], (0, len(tiles)))


@compiled
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("kernel", configs.INTERPRETED)
def test_a_kernel_of_each_kind_is_within_its_budget(kernel, capability):
    row = first(kernel, capability, "biased" if kernel == "dbias" else "full")
    report = compiling.compile_row(row)
    assert list(offline.faults(row, report)) == []
    if row.tile.keys is not None:
        assert report.counts["wgmma" if capability == 90 else "mma"] > 0
        assert report.loop is None if kernel in ("weights", "dbias") else len(report.loop) > 100


@compiled
def test_options_are_what_is_compiled():
    plain = compiling.compile_row(first("forward", 90)).asm["ptx"]
    masked = compiling.compile_row(first("forward", 90, "everything")).asm["ptx"]
    assert "ld.global.b8" in masked and "ld.global.b8" not in plain


@compiled
def test_a_row_over_its_budget_is_named_and_fails(monkeypatch, capsys):
    tiles = configs.Tile(rows=128, keys=128, warps=4, stages=1), configs.Tile(64, 32, 4, 2)
    monkeypatch.setitem(configs.TABLE, ("dq", 80, 2, 64), tiles)
    assert offline.main(["--capability", "80", "--filter", "dq          sm_80   bf16  d64  full"]) == 1
    assert "128x128 w4 s1" in capsys.readouterr().out.splitlines()[-1]


@compiled
def test_tiles_are_compiled_to_be_ranked_and_one_that_cannot_be_is_no_error():
    row = first("dq", 90)
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
    assert kernels.names(offline.TABLE.read_text()) == rows
    forward = [line for line in rows if line.startswith("forward     sm_90   bf16  d128 full")]
    assert len(forward) == len(configs.TABLE["forward", 90, 2, 128])


@pytest.mark.parametrize("choice", [["--filter", "dq"], ["--capability", "90"]])
def test_a_report_is_of_the_whole_table(choice, capsys):
    with pytest.raises(SystemExit):
        offline.main(["--report", *choice])
    assert "--report" in capsys.readouterr().err


def code(start, *instructions, back=None):
    """As cuobjdump prints it; the last line jumps back."""
    lines = [*instructions, *([] if back is None else [f"@P0 BRA {back:#x}"])]
    return "\n".join(f"        /*{start + 16 * i:04x}*/      {text} ;" for i, text in enumerate(lines))


def test_the_main_loop_is_the_shortest_that_multiplies():
    masked = code(0, *["HGMMA.64x64x16.F32"] * 40, back=0)
    plain = code(0x400, *["HGMMA.64x64x16.F32"] * 20, back=0x400)
    copy = code(0x800, *["LDG.E R2, desc[UR4][R8.64]"] * 5, back=0x800)
    assert len(sass.main_loop("\n".join([masked, plain, copy]))) == 21
    assert sass.main_loop(code(0, "EXIT")) is None


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
