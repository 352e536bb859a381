"""The search for tiles: what is tried, how it is timed, and that what it prints is a row of the table."""

import csv
import itertools
import types

import pytest
import torch

pytest.importorskip("triton", reason="kernels need Triton")

from fusedattn.bench import cost, providers, rows
from fusedattn.bench.cases import Case
from fusedattn.bench.dev import tune
from triton.runtime.errors import OutOfResources

from fusedattn.launch import launcher, run, tiles as configs
from fusedattn.launch.tiles import Tile
from fusedattn.replay import cache

KEYS = [
    (kernel, *key)
    for kernel in tune.PRODUCTS
    for key in itertools.product((2, 4), tune.DIMS, (80, 90))
    if kernel != "one_pass" or key[1] <= configs.ONE_PASS
]


def test_what_is_tried_is_sensible():
    for key in KEYS:
        kernel, itemsize, width, capability = key
        most = 232448 if capability == 90 else 166912
        tiles, known = tune.grid(kernel, capability, itemsize, width, most), configs.tiles(kernel, *key[3:], *key[1:3])
        assert tuple(tiles[: len(known)]) == known
        assert len({tile[:4] for tile in tiles}) == len(tiles) > len(known) + 5, key
        for tile in tiles[len(known) :]:
            assert {tile.rows, tile.keys} <= {16, 32, 64, 128, 256} and tile.warps in (4, 8), key
            walked = tile.rows if kernel in ("dkdv", "one_pass") else tile.keys
            assert tile.stages in (1, 2, 3, 4) and tile.bulk == known[0].bulk, key
            assert tile.stages == 1 or tile.stages * walked * 2 * width * itemsize <= most, key
        steps = [min(tune._apart(tile, one) for one in known) for tile in tiles]
        assert steps == sorted(steps) and 0 < steps[len(known)] <= 1, key  # a short sweep looks near what is known


def test_nothing_is_tried_whose_results_fill_the_registers():
    assert Tile(128, 128, 8, 2) in tune.grid("forward", 90, 2, 128, 232448)
    assert Tile(128, 128, 4, 2) not in tune.grid("forward", 90, 2, 128, 232448)
    assert Tile(64, 128, 8, 3) in tune.grid("dkdv", 90, 2, 128, 232448)
    assert Tile(128, 128, 8, 2) not in tune.grid("dkdv", 90, 2, 128, 232448)
    assert Tile(32, 64, 4, 2) not in tune.grid("forward", 90, 2, 64, 232448)  # wgmma multiplies 64 rows


def test_typical_cases_are_those_of_the_benchmark():
    for dim, dtype in itertools.product(tune.DIMS, tune.DTYPES):
        full, causal = tune.typical(dim, dtype)
        assert not full.causal and causal == full._replace(causal=True)
        assert (full.D, full.Dv, full.Sq, full.dtype, full.options) == (dim, dim, 2048, dtype, "")


TILES = [Tile(16, 16, 4, stages) for stages in (1, 2, 3, 4)]


def test_a_sweep_puts_the_best_first_and_keeps_what_failed(capsys):
    results = {1: dict(tflops=100.0), 2: dict(why="spills"), 3: dict(tflops=300.0), 4: dict(tflops=200.0)}
    found = tune.sweep(TILES, lambda tile: tune.Found(tile, **results[tile.stages]), float("inf"))
    assert [one.tile.stages for one in found] == [3, 4, 1, 2]
    assert "[2/4] Tile(16, 16, 4, 2): spills" in capsys.readouterr().err


def test_a_sweep_ends_in_time(capsys):
    now = [0.0]

    def judge(tile):
        now[0] += 10
        return tune.Found(tile, tflops=1.0)

    found = tune.sweep(TILES, judge, 15.0, clock=lambda: now[0])
    assert [one.tile for one in found] == TILES[:2]
    assert "2 of 4 tiles were not tried" in capsys.readouterr().err


def parsed(lines):
    return eval("{" + "\n".join(lines) + "\n}", {"Tile": Tile})


@pytest.mark.parametrize(
    "found, tiles",
    [
        # The first fits no small GPU: the best that does, and serves narrow bands, is the last.
        (
            [(128, 128, 8, 2, 163840), (128, 64, 8, 2, 90000), (64, 64, 4, 3, 120000), (64, 64, 4, 2, 81920)],
            [(128, 128, 8, 2), (64, 64, 4, 2)],
        ),
        ([(64, 64, 4, 2, 81920), (128, 128, 8, 2, 163840)], [(64, 64, 4, 2)]),
        # None does: the one of the table stays.
        ([(128, 128, 8, 2, 163840)], [(128, 128, 8, 2), configs.TABLE["forward", 90, 2, 128][-1][:4]]),
    ],
)
def test_what_is_printed_is_a_row_of_the_table(found, tiles):
    found = [tune.Found(Tile(*each[:4]), each[4], tflops=500.0 - i, ms=1.5) for i, each in enumerate(found)]
    failed = tune.Found(Tile(256, 256, 8, 4), why="spills 4 bytes")
    lines = tune.entry(("forward", 90, 2, 128), [*found, failed], "H200, torch 2, triton 3")
    assert parsed(lines) == {("forward", 90, 2, 128): tuple(Tile(*tile) for tile in tiles)}
    assert lines[-2] == "# H200, torch 2, triton 3: 500.0 TFLOP/s, 1.5 ms"
    assert "256" not in "\n".join(lines) and lines[0].lstrip("# ").startswith("Tile(")


def test_a_budget_for_spills_is_printed_and_no_row_where_nothing_came_through():
    lines = tune.entry(("dq", 80, 2, 64), [tune.Found(Tile(64, 64, 4, 2, spills=16), 1000, 1.0)], "said")
    assert parsed(lines) == {("dq", 80, 2, 64): (Tile(64, 64, 4, 2, spills=16),)}
    assert parsed(tune.entry(("dq", 80, 2, 64), [tune.Found(Tile(64, 64, 4, 2), why="spills")], "said")) == {}


def test_an_override_is_of_one_kernel_and_ends(monkeypatch):
    forgotten = []
    monkeypatch.setattr(cache, "forget", lambda: forgotten.append(run.candidates))
    monkeypatch.setattr(run, "candidates", given := lambda name, call: f"tiles of {name}")
    with pytest.raises(ZeroDivisionError), providers.only("dq", TILES[0]):
        assert run.candidates("dq", None) == (TILES[0],) and run.candidates("dkdv", None) == "tiles of dkdv"
        raise ZeroDivisionError
    assert run.candidates is given and len(forgotten) == 2


CASE = Case(1, 2, 2, 2048, 2048, 64, 64, False, "bfloat16")


class Bench:
    """Of a tile that takes as many milliseconds as it has stages; with four it is wrong, with three it does not fit."""

    def __init__(self, case):
        self.case = case

    def measure(self):
        (tile,) = run.candidates("dq", None)
        if tile.stages == 3:
            raise OutOfResources(300000, 232448, "shared memory")
        flops = cost.flops(self.case, "forward") * 1.5
        measured = dict(ms_p50=float(tile.stages), tflops=flops / tile.stages / 1e9, status="ok")
        return (dict(status="wrong"), "query: 3 times too far") if tile.stages == 4 else (measured, "")


def test_a_tile_is_timed_on_all_cases_and_each_is_a_row(tmp_path):
    path = tmp_path / "tune.csv"
    writer, machine, benches = rows.Writer(path), rows.machine("cpu", "none"), [Bench(CASE), Bench(CASE)]

    def write(case, tile, columns):
        writer.write(tune.csv_row(machine, "dq", case, tile, columns))

    ok, slower, large, wrong = (tune.timed("dq", tile, benches, write) for tile in TILES)
    assert (ok.ms, slower.ms) == (2.0, 4.0) and ok.tflops == pytest.approx(2 * slower.tflops)
    assert ok.tflops == pytest.approx(cost.flops(CASE, "forward") * 1.5 / 1e9)
    assert "shared memory" in large.why and wrong.why == "query: 3 times too far"
    with open(path, newline="") as file:
        written = list(csv.DictReader(file))
    assert [(line["mode"], line["options"]) for line in written[::2]] == [
        ("dq", "tile=16x16w4s1"),
        ("dq", "tile=16x16w4s2"),
        ("dq", "tile=16x16w4s3"),
    ]
    assert [line["status"].split(":")[0] for line in written] == ["ok"] * 4 + ["unsupported", "wrong"]
    assert {line["provider"] for line in written} == {"fusedattn:triton"}
    rows.read(path)


def test_a_tile_that_spills_much_is_left_out_and_one_that_spills_little_says_so(monkeypatch):
    """What a launch loads is asked for its spills and its shared memory; other kernels are not."""

    class Launching(Bench):
        def measure(self):
            for kernel in ("dq", "dkdv"):
                launcher.load(run.KERNELS[kernel], 1, {}, {})
            return super().measure()

    def load(kernel, *_):
        mine = kernel is run.KERNELS["dq"]
        return types.SimpleNamespace(
            n_spills=spills[0] if mine else 999, metadata=types.SimpleNamespace(shared=5000 * mine)
        )

    monkeypatch.setattr(launcher, "load", load)
    for many, why in ((4, ""), (tune.MOST_SPILLS // 4 + 1, f"spills {tune.MOST_SPILLS + 4} bytes")):
        spills = [many]
        found = tune.timed("dq", TILES[0], [Launching(CASE)], lambda *_: None)
        assert found.why == why and (why or (found.tile.spills, found.shared) == (16, 5000))
    assert launcher.load is load


@pytest.mark.skipif(not run.interpreting(), reason="kernels run on CPU tensors in the interpreter alone")
@pytest.mark.parametrize("kernel", tune.PRODUCTS)
def test_a_kernel_is_held_to_the_rule_and_timed_with_a_tile(kernel, monkeypatch):
    bench = tune.Bench(kernel, Case(1, 2, 2, 40, 40, 16, 16, True, "float32"), "cpu")
    asked = []
    monkeypatch.setattr(configs, "tiles", lambda name, *_: asked.append(name) or configs.INTERPRETED[name])
    with providers.only(kernel, Tile(16, 16, 4, 1)):
        columns, wrong = bench.measure(budget_ms=1.0)
    assert kernel not in asked and not wrong and columns["status"] == "ok" and columns["err_max"] > 0
    flops = 2 * 1 * 2 * 40 * 40 * 16 * tune.PRODUCTS[kernel] / 2
    assert columns["tflops"] == pytest.approx(flops / columns["ms_p50"] / 1e9)
    right = bench.call
    bench.call = lambda *inputs: right(*inputs) * 1.25
    columns, wrong = bench.measure(budget_ms=1.0)
    assert wrong and columns["status"] == "wrong" and "ms_p50" not in columns


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
    """What `tune` asks of a GPU, and of Triton."""
    found = types.SimpleNamespace(shared_memory_per_block_optin=232448)
    for name, value in dict(
        is_available=lambda: True, current_device=lambda: 0, get_device_properties=lambda device: found
    ).items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(run, "interpreting", lambda: False)
    monkeypatch.setattr(run, "capability", lambda device: 90)
    machine = rows.machine("cpu", "none") | dict(gpu="NVIDIA H200")
    monkeypatch.setattr(rows, "machine", lambda device, commit: machine)


def test_the_time_is_shared_out(gpu, monkeypatch, capsys):
    given = []
    monkeypatch.setattr(tune, "tune", lambda *task: given.append(task) or ["#"])
    monkeypatch.setattr(tune.time, "monotonic", lambda: 1000.0)
    tune.main(["--dim", "64", "--seconds", "60"])
    assert [(task[0], task[-1]) for task in given] == [
        *(("forward", 1015.0), ("dq", 1020.0), ("dkdv", 1030.0), ("one_pass", 1060.0))
    ]


def test_with_a_gpu_it_times_and_says_which(gpu, monkeypatch, tmp_path, capsys):
    class Timed(Bench):
        def __init__(self, kernel, case, device):
            assert kernel == "dq" and device == torch.device("cuda", 0) and case.Hq == 16
            super().__init__(case)

    monkeypatch.setattr(tune, "Bench", Timed)
    path = tmp_path / "tune.csv"
    assert tune.main(["--kernel", "dq", "--dim", "128", "--csv", str(path)]) == 0
    printed = capsys.readouterr().out
    (tiles,) = parsed(printed.splitlines()).values()
    assert tiles[0].stages == 1 and max(tiles[-1][:2]) <= 64
    assert "NVIDIA H200, torch" in printed and " ms" in printed
    written = rows.read(path)
    assert {row.gpu for row in written} == {"NVIDIA H200"} and {row.causal for row in written} == {0, 1}
