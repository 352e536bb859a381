"""First calls from several threads, and from several processes, at the same time."""

import json
import multiprocessing
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

pytest.importorskip("triton", reason="kernels need Triton")

import fusedattn as fa
from fusedattn.dispatch import replay
from fusedattn.launch import tile_table

from ..inside import compiled, draw, leaves, only_interpreted, passes_compiled
from ..offline import absent

AT_ONCE = 8


@pytest.mark.matrix
@only_interpreted
def test_this_file_without_the_interpreter():
    passes_compiled(__file__)


def at_once(function):
    """What a function returns in threads that call it at the same time."""
    ready = threading.Barrier(AT_ONCE)

    def wait_and_call(_):
        ready.wait()
        return function()

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(wait_and_call, range(AT_ONCE)))


@pytest.fixture
def small_tiles(monkeypatch):
    """What kernels compile to is no matter here, so it is what compiles soonest."""
    tiles = tile_table.tiles_for

    def small(*key, **more):
        return tuple(tile._replace(rows=16, keys=tile.keys and 16, stages=1) for tile in tiles(*key, **more)[-1:])

    monkeypatch.setattr(tile_table, "tiles_for", small)


def step_of(inputs):
    """Forward and backward, the first time, recorded, and replayed."""
    each = leaves(*inputs)
    for _ in range(3):
        fa.attention(*each, causal=True, backend="triton").sum().backward()


@compiled
def test_threads_launch_the_same_kernels(small_tiles, monkeypatch):
    """Compiled for a GPU that is not there."""
    monkeypatch.setattr(replay, "RECORD_AFTER", 2)
    launched = threading.local()

    def load(kernel):
        run = absent.Run(lambda *grid_and_all: launched.log.append((kernel.name, grid_and_all[:3])))
        kernel.function, kernel._run = 0, run

    def step():
        launched.log = []
        step_of(inputs)
        return launched.log

    inputs = draw("cpu", dtype=torch.float16)
    with absent.gpu(90, load):
        first, *others = at_once(step)
        assert first and all(other == first for other in others)


def _compile(folder, inputs):
    with absent.gpu(90, folder=folder):
        step_of(inputs)


@compiled
def test_processes_share_an_empty_cache(small_tiles, tmp_path):
    """As ranks of a new machine do: each compiles or finds what another has compiled, and nothing is left half done."""
    torch.set_num_threads(1)
    inputs = draw("cpu", dtype=torch.float16)
    context = multiprocessing.get_context("fork")  # what importing takes is no part of it
    folders = [str(tmp_path / name) for name in ("alone", "shared")]
    processes = [context.Process(target=_compile, args=(folders[0], inputs))]
    processes += [context.Process(target=_compile, args=(folders[1], inputs)) for _ in range(AT_ONCE)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * len(processes)
    alone, shared = (
        {x.relative_to(f) for x in (tmp_path / f).rglob("*")} for f in (tmp_path / "alone", tmp_path / "shared")
    )
    assert alone and shared == alone
    for file in (tmp_path / "shared").rglob("*.json"):
        assert json.loads(file.read_text())
