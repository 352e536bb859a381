"""Tests candidate tiles by the kernels' PTX; calls use such tiles only after `fusedattn tune` found them faster."""

import pytest

pytest.importorskip("triton", reason="kernels need Triton")

from fusedattn.launch import tile_table, tuned
from fusedattn.launch.tuned import Row, choose

from . import calls
from .cases import _TOGETHER, dense

STEPS = dict(Sq=260, Sk=400, Hq=1)  # at least as many blocks of rows and of keys as stages
CANDIDATES = [(place, tile, causal) for place, some in tuned.CANDIDATES.items() for tile in some for causal in (0, 1)]
FIRST = list({place[0]: (place, some[0], 1) for place, some in tuned.CANDIDATES.items()}.values())
BACKWARD = Row("dq", "bfloat16", 64, "plain", tuned.CANDIDATES["dq", 90, 2, 64][0])
FORWARD = Row("forward", "bfloat16", 128, "plain", tuned.CANDIDATES["forward", 90, 2, 128][0])
# Cases of loads by TMA: sequences that end inside a tile, heads narrower than a tile, grouped heads, and replays
# with new descriptors.
LOADED = {
    "packed, forward": (FORWARD, _TOGETHER | dict(causal=True, D=128)),
    "narrow heads, forward": (FORWARD, dict(D=80)),
    "packed, backward": (BACKWARD, _TOGETHER | dict(two_passes=True)),
    "heads 4:1, repeated, backward": (BACKWARD, dict(Hq=4, Hkv=1, times=3, two_passes=True)),
}


def pytest_generate_tests(metafunc):
    """Run one candidate of each kernel, or all with --everything. `fusedattn tune` checks each before calls use it."""
    if "place" in metafunc.fixturenames:
        some = CANDIDATES if metafunc.config.getoption("--everything", False) else FIRST
        ids = [f"{'-'.join(map(str, place))}-{number}" for number, (place, *_) in enumerate(some)]
        metafunc.parametrize("place, tile, causal", some, ids=ids)


def executed(candidate, entry, capability=90):
    """Run an Entry with a candidate tile in place of the tile table's, and return its Outcome."""
    form = tile_table.same(candidate.form)
    tuned.use(choose([candidate._replace(form=form)]))
    try:
        taken = {x.kernel: x.tile for x in calls.taken(entry, capability)}
        assert tile_table.same(taken[candidate.kernel]) == form
        return calls.execute(entry, capability)
    finally:
        tuned.forget()


def loads(outcome):
    """Return {kernel: True if it loads tiles by TMA} of the launched kernels."""
    copy = "cp.async.bulk.tensor.4d.shared::cta.global"
    return {x.name: copy in x.kernel.asm["ptx"] for x in outcome.device.launches}


@pytest.mark.matrix
def test_a_call_by_a_candidate(place, tile, causal):
    kernel, _, _, width = place
    fields = STEPS | dict(D=width, causal=bool(causal), two_passes=kernel in ("dq", "dkdv"))
    outcome = executed(Row(kernel, "bfloat16", width, "plain", tile), *dense(("candidate", fields)))
    assert not outcome.wrong(), "\n".join(outcome.wrong())
    assert loads(outcome)["dkdv" if kernel == "one_pass" else kernel] == tile.tma


@pytest.mark.matrix
@pytest.mark.parametrize("candidate, fields", LOADED.values(), ids=LOADED)
def test_a_call_that_is_loaded_by_the_copy_engine(candidate, fields):
    outcome = executed(candidate, *dense(("loaded", fields)))
    assert not outcome.wrong(), "\n".join(outcome.wrong())
    assert loads(outcome)[candidate.kernel]
