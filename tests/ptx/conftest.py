"""Selects the calls and tiles that `make ptx` executes; ARGS=--everything: each tile on each GPU."""

import itertools
import zlib

import pytest

from .cases import ALSO, ENTRIES, FEW, HOPPER

CAPABILITIES = 80, HOPPER  # whose instructions differ; of the others 86 and 120 share those of 80
OTHERS = 86, 120
TILES = 4  # the most that a row of a table has


def pytest_addoption(parser):
    parser.addoption(
        "--everything", action="store_true", help="all calls, tiles and GPUs, not each call once: an hour or two"
    )


def pytest_generate_tests(metafunc):
    """A test that takes `entry`, `capability` and `tile` executes calls."""
    if "entry" not in metafunc.fixturenames:
        return
    rows = (
        _everything() if metafunc.config.getoption("--everything", False) else itertools.starmap(_marked, each_once())
    )
    metafunc.parametrize("entry, capability, tile", list(rows))


def _row(entry, capability, tile=0, marks=()):
    name = f"{entry.name}-sm_{capability}" + (f"-tile {tile}" if tile else "")
    return pytest.param(entry, capability, tile, id=name.replace(" ", "_"), marks=marks)


def each_once():
    """(Entry, capability): each named call on one GPU, which its name decides; those of FEW on both, of ALSO there."""
    for entry in ENTRIES.values():
        for capability in filter(entry.runs_on, CAPABILITIES):
            if capability == _first(entry) or entry.name in (*FEW, *ALSO[capability]):
                yield entry, capability


def _first(entry):
    on = [*filter(entry.runs_on, CAPABILITIES)]
    return on[zlib.crc32(entry.name.encode()) % len(on)]


def _marked(entry, capability):
    """`make test` executes each call of FEW once."""
    few = entry.name in FEW and capability == _first(entry)
    return _row(entry, capability, marks=() if few else pytest.mark.matrix)


def _everything():
    from . import calls  # which needs Triton

    for entry, capability in itertools.product(ENTRIES.values(), (*CAPABILITIES, *OTHERS)):
        before = set()
        for tile in range(TILES if entry.runs_on(capability) else 0):
            taken = calls.taken(entry, capability, tile)
            if taken - before:
                yield _row(entry, capability, tile)
            before |= taken
