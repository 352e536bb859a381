"""The search for tiles: what is tried, how it is timed, and that what it prints is a row of the table."""

import contextlib
import itertools

import pytest
import torch

pytest.importorskip("triton", reason="kernels need Triton")

from fusedattn.bench import engine, providers, rows, timing
from fusedattn.bench.cases import Case
from fusedattn.bench.dev import tune
from triton.runtime.errors import OutOfResources

from fusedattn.launch import run, tiles as tile_table
from fusedattn.launch.tiles import Tile
from fusedattn.replay import cache

pytestmark = pytest.mark.usefixtures("one_thread")
TILES = [Tile(16, 16, 4, stages) for stages in (1, 2, 3, 4)]
SMALL = Case(1, 2, 2, 40, 40, 16, 16, True, "float32")
interpreted = pytest.mark.skipif(not run.interpreting(), reason="kernels run on CPU tensors in the interpreter alone")


def test_what_is_tried_begins_with_the_table_and_goes_on_with_what_is_like_it():
    every = itertools.product(tune.PRODUCTS, (80, 90), (2, 4), tune.DIMS)
    for key in (key for key in every if key[0] != "one_pass" or key[-1] <= tile_table.ONE_PASS):
        tiles, known = tune.candidates(*key), tile_table.tiles(*key)
        assert tuple(tiles[: len(known)]) == known and len({tile[:4] for tile in tiles}) == len(tiles) > len(known) + 5
        for tile in tiles[len(known) :]:
            assert {tile.rows, tile.keys} <= {16, 32, 64, 128, 256} and tile.warps in (4, 8), key
            assert tile.stages in (1, 2, 3, 4) and tile.bulk == known[0].bulk, key
        assert any(sum(x != y for x, y in zip(tiles[len(known)][:4], one[:4], strict=True)) == 1 for one in known), key
    tried = tune.candidates("forward", 90, 2, 128)  # not those whose results fill the registers
    assert Tile(128, 128, 8, 2) in tried and Tile(128, 128, 4, 2) not in tried
    assert Tile(128, 128, 8, 2) not in tune.candidates("dkdv", 90, 2, 128)


def test_an_override_is_of_one_kernel_and_ends(monkeypatch):
    forgotten = []
    monkeypatch.setattr(cache, "forget", lambda: forgotten.append(run.candidates))
    monkeypatch.setattr(run, "candidates", before := lambda name, call: f"tiles of {name}")
    with pytest.raises(ZeroDivisionError), providers.only("dq", TILES[0]):
        assert run.candidates("dq", None) == (TILES[0],) and run.candidates("dkdv", None) == "tiles of dkdv"
        raise ZeroDivisionError
    assert run.candidates is before and len(forgotten) == 2


@interpreted
@pytest.mark.parametrize("kernel", tune.PRODUCTS)
def test_a_kernel_is_held_to_the_rule_and_timed_with_a_tile(kernel, monkeypatch):
    asked = []
    monkeypatch.setattr(tile_table, "tiles", lambda name, *_: asked.append(name) or tile_table.INTERPRETED[name])

    class Scaled(tune.Kernel):
        def setup(self, name):
            call = super().setup(name)
            asked.clear()  # what it takes to see that the kernels take the case
            return call._replace(attend=lambda *inputs: factors[status] * call.attend(*inputs))

    factors = dict(ok=1.0, wrong=1.25)
    for status in factors:
        work = engine.units([SMALL], ["fusedattn:triton"], [kernel])
        prepare = lambda case, device: Scaled(case, device, Tile(16, 16, 4, 1))  # noqa: E731
        ((row, why),) = engine.measure(rows.machine("cpu", "none"), work, "cpu", 1.0, prepare)
        assert kernel not in asked and row.status == status and row.err_max > 0 and bool(why) == (status == "wrong")
        flops = 2 * 1 * 2 * 40 * 40 * 16 * tune.PRODUCTS[kernel] / 2
        assert row.tflops == pytest.approx(flops / row.ms_p50 / 1e9) and row.gbps == ""


@pytest.mark.parametrize("arguments", [["--kernel", "preprocess"], ["--dim", "96"], ["--dtype", "int8"]])
def test_what_there_is_not_is_refused(arguments, capsys):
    with pytest.raises(SystemExit):
        tune.main(arguments)
    assert arguments[0] in capsys.readouterr().err.splitlines()[-1]


def test_without_a_gpu_it_says_in_a_line_that_it_needs_one(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert tune.main([]) == 2
    shown = capsys.readouterr()
    assert "needs an NVIDIA GPU" in shown.err and shown.err.count("\n") == 1 and not shown.out


@pytest.fixture
def gpu(monkeypatch):
    """What `tune` asks of a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(run, "interpreting", lambda: False)
    monkeypatch.setattr(run, "capability", lambda device: 90)
    machine = rows.machine("cpu", "none") | dict(gpu="NVIDIA H200")
    monkeypatch.setattr(rows, "machine", lambda device, commit: machine)


def test_the_time_is_shared_out(gpu, monkeypatch, capsys):
    tasks = []
    monkeypatch.setattr(tune, "tune", lambda *task: tasks.append(task) or ["#"])
    monkeypatch.setattr(tune.time, "monotonic", lambda: 1000.0)
    tune.main(["--dim", "64", "--seconds", "60"])
    assert [(task[0], task[-1]) for task in tasks] == [
        *(("forward", 1015.0), ("dq", 1020.0), ("dkdv", 1030.0), ("one_pass", 1060.0))
    ]


def test_with_a_gpu_it_times_each_case_and_prints_a_row_of_the_table(gpu, monkeypatch, tmp_path, capsys):
    class Timed(tune.Kernel):
        """A tile of n stages takes n milliseconds; with three it does not fit, with four it is wrong."""

        def __init__(self, case, device, tile):
            assert (case.D, case.Dv, case.Sq, case.dtype) == (128, 128, 2048, "float16")
            self.case, self.device, self.tile, self.tensors = case, device, tile, None

        def setup(self, name):
            if self.tile.stages == 3:
                raise OutOfResources(300000, 232448, "shared memory")

        def step(self, mode, call):
            return contextlib.nullcontext()

        def judge(self, mode, call, result):
            return 1.0, 1.0, "query: 3 times too far" if self.tile.stages == 4 else ""

    def measure(step, device, budget_ms):
        return timing.Times(*[float(last[-1].stages)] * 3)

    last = []
    monkeypatch.setattr(tune, "Kernel", lambda case, device, tile: last.append(tile) or Timed(case, device, tile))
    monkeypatch.setattr(timing, "peak", lambda step, device: (None, ""))
    monkeypatch.setattr(timing, "measure", measure)
    monkeypatch.setattr(timing, "ceilings", lambda *_: dict(matmul_tflops=1.0, copy_gbps=1.0))
    monkeypatch.setattr(tune, "candidates", lambda *_: TILES)
    path = tmp_path / "tune.csv"
    assert tune.main(["--kernel", "dq", "--dim", "128", "--dtype", "float16", "--csv", str(path)]) == 0
    shown = capsys.readouterr()
    table = eval("{" + shown.out + "}", {"Tile": Tile})
    assert table == {("dq", 90, 2, 128): (TILES[0], tile_table.TABLE["dq", 90, 2, 128][-1])}
    assert shown.out.index("Tile(16, 16, 4, 1)") < shown.out.index("Tile(16, 16, 4, 2)")  # the best first
    assert "# NVIDIA H200, torch" in shown.out and "Tile(16, 16, 4, 3)" not in shown.out
    assert "shared memory" in shown.err and "query: 3 times too far" in shown.err
    written = rows.read(path)
    assert [row.status.split(":")[0] for row in written] == ["ok"] * 4 + ["unsupported", "wrong"]
    assert {row.gpu for row in written} == {"NVIDIA H200"} and {row.causal for row in written[:4]} == {0, 1}
    assert {(row.mode, row.provider) for row in written} == {("dq", "fusedattn:triton")}
    assert [row.options for row in written[:4:2]] == ["tile=16x16w4s1", "tile=16x16w4s2"]
    assert tune.main(["--kernel", "dq", "--dim", "128", "--seconds", "0"]) == 0
    shown = capsys.readouterr()
    assert "4 of 4 tiles were not tried" in shown.err and eval("{" + shown.out + "}") == {}
