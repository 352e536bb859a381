"""A kernel of each kind compiles for GPUs that are not here within its budget, and one that does not is seen."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="kernels need Triton")

from fusedattn.bench import compiled as compiling

from fusedattn import configs

from . import offline_compile as offline

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
compiled = pytest.mark.skipif(INTERPRETED, reason="runs in a process of its own, without TRITON_INTERPRET")


@pytest.mark.skipif(not INTERPRETED, reason="only where the rest of this file cannot run in this process")
def test_this_file_without_the_interpreter():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


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
        assert report.loop is None if kernel in ("weights", "dbias") else report.loop > 100


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


GOOD = compiling.Report(
    registers=200,
    spills=0,
    shared=98304,
    serialized=False,
    counts=dict.fromkeys(compiling.INSTRUCTIONS, 0) | dict(wgmma=36),
    loop=500,
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


def test_the_main_loop_is_the_shortest_that_multiplies():
    def block(start, length, text, back=None):
        lines = [f"        /*{start + 16 * i:04x}*/      {text} ;" for i in range(length)]
        return "\n".join([*lines, f"        /*{start + 16 * length:04x}*/  @P0 BRA {back:#x} ;"])

    masked, plain, copy = block(0, 40, "HGMMA", 0), block(0x400, 20, "HGMMA", 0x400), block(0x800, 5, "LDG.E", 0x800)
    assert compiling.main_loop("\n".join([masked, plain, copy])) == 21
    assert compiling.main_loop("        /*0000*/   EXIT ;") is None
