"""A kernel runs with the first of its tiles that fits, and what does not fit or run is remembered."""

import threading

import pytest
import torch

pytest.importorskip("triton", reason="kernels need Triton")

from triton.runtime.errors import OutOfResources

from fusedattn.launch import failures, run, tile_table as table

from ..inside import fields

TILES = tuple(table.Tile(rows, 16, 4, 1) for rows in (64, 32, 16))


def call(sq=100, dtype=torch.float32, dim=16, dv=16, **options):
    query, key = torch.empty(1, 2, sq, dim, dtype=dtype), torch.empty(1, 1, 200, dim, dtype=dtype)
    return fields(query, key, torch.empty(1, 1, 200, dv, dtype=dtype), **options)


@pytest.fixture(autouse=True)
def three_tiles(monkeypatch):
    monkeypatch.setattr(table, "tiles_for", lambda *key, **more: TILES)
    monkeypatch.setattr(table, "fitting", {})


@pytest.fixture
def launched(monkeypatch):
    """(kernel, programs, rows of its tile, whether it is the last) of each try; `launched.fitting` rows fit."""

    class Launched(list):
        fitting = 64

    tries = Launched()

    def run_kernel(name, programs, arguments, device, kind=None, last=True, **options):
        tries.append((name, programs, arguments["BLOCK_M"], last))
        if arguments["BLOCK_M"] > tries.fitting:
            raise OutOfResources(300000, 101376, "shared memory")

    monkeypatch.setattr(run, "run_kernel", run_kernel)
    return tries


def run_tiled(call, name="forward"):
    run.run_tiled(name, call, lambda tile: 100 // tile.rows, dict(x=1), lambda tile: dict(y=tile.keys))


def test_the_first_tile_that_fits_runs(launched):
    run_tiled(call())
    assert launched == [("forward", 1, 64, False)] and set(table.fitting.values()) == {TILES}


def test_what_did_not_fit_is_not_tried_again_by_calls_of_its_kind_alone(launched):
    launched.fitting = 32
    run_tiled(call())
    assert launched == [("forward", 1, 64, False), ("forward", 3, 32, False)]
    assert run.candidates("forward", call()) == TILES[1:]
    launched.clear()
    run_tiled(call())
    assert [rows for _, _, rows, _ in launched] == [32]
    for other in (call(dtype=torch.float16), call(dim=64), call(softcap=1.0)):
        assert run.candidates("forward", other) == TILES
    assert run.candidates("dq", call()) == TILES


def test_the_last_tile_raises_what_it_raised_and_is_tried_again(launched):
    launched.fitting = 0
    for tried in ([64, 32, 16], [16]):
        with pytest.raises(OutOfResources):
            run_tiled(call())
        assert [rows for _, _, rows, _ in launched] == tried and launched[-1][3]
        launched.clear()


class Recorder:
    device = torch.device("cuda", 3)

    def __init__(self):
        self.kept = []

    def add(self, kernel, compiled, programs, arguments, options):
        self.kept.append((kernel, programs, arguments, options))

    def position(self):
        return len(self.kept)

    def back(self, position):
        del self.kept[position:]


def test_what_is_recorded_is_not_run_and_is_of_this_thread():
    recorder, elsewhere = Recorder(), []
    with run.recording(recorder):
        run.run_kernel("append", 7, dict(a=1), torch.device("cpu"), num_warps=4)
        assert run.device_of(torch.empty(1)) == recorder.device
        thread = threading.Thread(target=lambda: elsewhere.append(run.current_recorder()))
        thread.start(), thread.join()
    ((kernel, programs, arguments, options),) = recorder.kept
    assert kernel is run.KERNELS["append"] and (programs, arguments) == (7, dict(a=1)) and options["num_warps"] == 4
    assert elsewhere == [None] and run.current_recorder() is None and run.device_of(torch.empty(1)).type == "cpu"


def test_a_tile_that_does_not_fit_takes_back_what_was_recorded_for_it(monkeypatch):
    recorder = Recorder()
    recorder.kept.append("before")

    def more(tile):  # the lists of this tile
        recorder.kept.append(f"lists of {tile.rows}")
        return {}

    def run_kernel(name, programs, arguments, *_, **options):
        if arguments["BLOCK_M"] == 64:
            raise OutOfResources(300000, 101376, "shared memory")
        recorder.kept.append("launch")

    monkeypatch.setattr(run, "run_kernel", run_kernel)
    monkeypatch.setattr(run, "capability", lambda device: None)
    with run.recording(recorder):
        monkeypatch.setattr(run, "surroundings", lambda device: run.contextlib.nullcontext())
        run.run_tiled("forward", call(), lambda tile: 1, {}, more)
    assert recorder.kept == ["before", "lists of 32", "launch"]


@pytest.mark.parametrize(
    "name, options, load, narrow",
    [
        ("forward", {}, "plain", False),
        ("forward", dict(mask=torch.ones(1, 1, 100, 200, dtype=torch.bool)), "masked", False),
        ("forward", dict(bias=torch.ones(1, 1, 100, 200)), "rich", False),
        ("forward", dict(alibi_slopes=torch.ones(1, 2)), "rich", False),
        ("forward", dict(softcap=1.0, mask=torch.ones(1, 1, 1, 200, dtype=torch.bool)), "rich", False),
        ("forward", dict(seed=torch.ones(1).long(), dropout_p=0.1), "rich", False),
        ("forward", dict(left=100, right=0), "plain", True),
        ("dkdv", dict(left=100, right=0), "plain", True),
        ("forward", dict(right=0), "plain", False),
        ("forward", dict(sq=64), "plain", True),
        ("dkdv", dict(sq=64), "plain", False),  # its tiles are of keys
    ],
)
def test_what_calls_share_that_take_the_same_tiles(name, options, load, narrow):
    device = torch.device("cpu")
    assert run.kind_of(name, call(**options)) == (name, device, torch.float32, 16, load, narrow)


def test_the_wider_of_the_heads_counts():
    assert [run.widest(call(dim=d, dv=dv)) for d, dv in ((16, 40), (130, 8), (64, 64))] == [64, 256, 64]


def test_a_kernel_that_is_known_not_to_run_is_found_with_those_before_it():
    plain, masked = call(), call(key_mask=torch.ones(1, 200, dtype=torch.bool))
    packed = call(cu_seqlens_q=torch.zeros(2, dtype=torch.int32), cu_seqlens_k=torch.zeros(2, dtype=torch.int32))

    def known(name, error, kind=None):
        failures.remember(kind or (name, torch.device("cpu")), RuntimeError(error))

    def why(call, *names):
        return str(run.failed(call, names) or "")

    assert not why(masked, "forward")
    known("tile_lists", "no lists")
    assert "no lists" in why(masked, "forward") and not why(plain, "forward")
    known("fill_slots", "no turns")
    assert "no turns" in why(packed, "forward") and not why(plain, "forward")
    known("dq", "no dq", run.kind_of("dq", plain))
    assert "no dq" in why(plain, "forward", "dq") and not why(plain, "forward")


def test_what_a_call_would_launch():
    found = run.tiles(call(), need_weights=True, on_hopper=False, backward=["preprocess", "dq"])
    assert found == dict.fromkeys(["forward", "weights", "preprocess", "dq"], TILES[0])
    on_hopper = run.tiles(call(), need_weights=False, on_hopper=True, backward=[])
    assert list(on_hopper) == ["hopper"]
