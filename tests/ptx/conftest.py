"""What `make ptx` executes: by default each named call once, with ARGS=--everything all of them on each GPU."""

import itertools

import pytest

from .cases import ENTRIES, FEW, HOPPER, small

CAPABILITIES = 80, HOPPER  # whose instructions differ; of the others 86 and 120 share those of 80
OTHERS = 86, 120
TILES = 3  # the most that a row of the table has, and more than the pipelines of a width


def pytest_addoption(parser):
    parser.addoption("--everything", action="store_true", help="all calls, tiles and GPUs, not each call once: an hour")


def pytest_generate_tests(metafunc):
    """A test that takes `entry`, `capability` and `tile` executes calls."""
    if "entry" not in metafunc.fixturenames:
        return
    rows = list(_everything() if metafunc.config.getoption("--everything", False) else _each_once())
    metafunc.parametrize("entry, capability, tile", rows)


def _row(entry, capability, tile=0, marks=()):
    name = f"{entry.name}-sm_{capability}" + (f"-tile {tile}" if tile else "")
    return pytest.param(entry, capability, tile, id=name.replace(" ", "_"), marks=marks)


def _each_once():
    """Each named call on one GPU, in turn, those of FEW on both."""
    for entry, turn in zip(ENTRIES.values(), itertools.cycle(CAPABILITIES), strict=False):
        few = entry.name in FEW
        for capability in CAPABILITIES:
            if entry.runs_on(capability) and (few or capability == turn or not entry.runs_on(turn)):
                yield _row(entry, capability, marks=() if few else pytest.mark.matrix)


def _everything():
    for entry, capability, tile in itertools.product(ENTRIES.values(), CAPABILITIES, range(TILES)):
        if entry.runs_on(capability):
            yield _row(entry, capability, tile)
    for entry, capability in itertools.product(ENTRIES.values(), OTHERS):
        if entry.runs_on(capability):
            yield _row(entry, capability)
    for entry in small():
        yield _row(entry._replace(case=entry.case._replace(name=f"small {entry.name}")), HOPPER)
