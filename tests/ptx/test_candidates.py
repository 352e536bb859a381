"""Tests candidate tiles by the kernels' PTX; calls use such tiles only after `fusedattn tune` found them faster."""

import pytest

pytest.importorskip("triton", reason="kernels need Triton")

from fusedattn.launch import tile_table, tuned
from fusedattn.launch.tuned import Row, choose

from . import calls
from .cases import dense

STEPS = dict(Sq=260, Sk=400, Hq=1)  # at least as many blocks of rows and of keys as stages
CANDIDATES = [(place, tile, causal) for place, some in tuned.CANDIDATES.items() for tile in some for causal in (0, 1)]
FIRST = list({place[0]: (place, some[0], 1) for place, some in tuned.CANDIDATES.items()}.values())


def pytest_generate_tests(metafunc):
    """Run one candidate of each kernel, or all with --everything. `fusedattn tune` checks each before calls use it."""
    if "place" in metafunc.fixturenames:
        some = CANDIDATES if metafunc.config.getoption("--everything", False) else FIRST
        ids = [f"{'-'.join(map(str, place))}-{number}" for number, (place, *_) in enumerate(some)]
        metafunc.parametrize("place, tile, causal", some, ids=ids)


@pytest.mark.matrix
def test_a_call_by_a_candidate(place, tile, causal):
    kernel, _, _, width = place
    fields = STEPS | dict(D=width, causal=bool(causal), two_passes=kernel in ("dq", "dkdv"))
    (entry,), form = dense(("candidate", fields)), tile_table.same(tile)
    tuned.use(choose([Row(kernel, "bfloat16", width, "plain", form)]))
    try:
        taken = {x.kernel: x.tile for x in calls.taken(entry, 90)}
        assert tile_table.same(taken[kernel]) == form
        outcome = calls.execute(entry, 90)
    finally:
        tuned.forget()
    assert not outcome.wrong(), "\n".join(outcome.wrong())
