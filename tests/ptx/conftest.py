"""Selects the calls and tiles that `make ptx` executes; with ARGS=--everything each tile on each GPU."""

import itertools
import zlib

import pytest

from .cases import ALSO, ENTRIES, FEW, HOPPER

CAPABILITIES = 80, HOPPER  # --everything also runs OTHERS
OTHERS = 86, 120
TILES = 4  # maximum number of tiles in a row of a table


def pytest_addoption(parser):
    parser.addoption(
        "--everything", action="store_true", help="all calls, tiles and GPUs instead of each call once: an hour or two"
    )


def pytest_generate_tests(metafunc):
    if "entry" not in metafunc.fixturenames:
        return
    everything = metafunc.config.getoption("--everything", False)
    rows = _everything() if everything else itertools.starmap(_marked, each_once())
    metafunc.parametrize("entry, capability, tile", list(rows))


def _row(entry, capability, tile=0, marks=()):
    name = f"{entry.name}-sm_{capability}" + (f"-tile {tile}" if tile else "")
    return pytest.param(entry, capability, tile, id=name.replace(" ", "_"), marks=marks)


def each_once():
    """Yield (Entry, capability): each call on one GPU, chosen by its name; calls in FEW and ALSO on the other, too."""
    for entry in ENTRIES.values():
        for capability in filter(entry.runs_on, CAPABILITIES):
            if capability == _first(entry) or entry.name in (*FEW, *ALSO[capability]):
                yield entry, capability


def _first(entry):
    on = [*filter(entry.runs_on, CAPABILITIES)]
    return on[zlib.crc32(entry.name.encode()) % len(on)]


def _marked(entry, capability):
    """Return the test parameters of a call, marked for `make test-all`, except for one run of each call in FEW."""
    few = entry.name in FEW and capability == _first(entry)
    return _row(entry, capability, marks=() if few else pytest.mark.matrix)


def _everything():
    from . import calls  # imports Triton

    for entry, capability in itertools.product(ENTRIES.values(), (*CAPABILITIES, *OTHERS)):
        before = set()
        for tile in range(TILES if entry.runs_on(capability) else 0):
            taken = calls.taken(entry, capability, tile)
            if taken - before:
                yield _row(entry, capability, tile)
            before |= taken
