"""First calls from several threads at the same time."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

pytest.importorskip("triton", reason="kernels need Triton")

import fusedattn as fa

from ..inside import compiled, draw, leaves
from ..offline import absent

AT_ONCE = 8


def at_once(function):
    """What a function returns in threads that call it at the same time."""
    ready = threading.Barrier(AT_ONCE)

    def wait_and_call(_):
        ready.wait()
        return function()

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(wait_and_call, range(AT_ONCE)))


@pytest.fixture
def small_tiles(tiles):
    """Tiles that compile soonest."""
    tiles.choose(lambda found: tuple(x._replace(rows=16, keys=x.keys and 16, stages=1) for x in found[-1:]))


def step_of(inputs):
    """Forward and backward, the first time, recorded, and replayed."""
    each = leaves(*inputs)
    for _ in range(3):
        fa.attention(*each, causal=True, backend="triton").sum().backward()


@compiled
@pytest.mark.matrix
def test_threads_launch_the_same_kernels(small_tiles, record_after):
    """Compiled for a GPU that is not there."""
    record_after(2)
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
