"""Tiles that calls take only where a machine has found them faster, by the PTX that Triton makes of the kernels."""

import pytest

pytest.importorskip("triton", reason="kernels need Triton")

from fusedattn.launch import tiles, tuned
from fusedattn.launch.tuned import Candidate, choose

from . import calls
from .cases import dense

CANDIDATES = [(place, tile) for place, some in tiles.CANDIDATES.items() for tile in some]
STEPS = dict(Sq=300, Sk=520)  # more blocks, of either side, than there are stages


def pytest_generate_tests(metafunc):
    """With --everything: no call takes one of these where `fusedattn tune` has not proved it."""
    some = CANDIDATES if metafunc.config.getoption("--everything", False) else []
    metafunc.parametrize("place, tile", some, ids=lambda x: "-".join(map(str, x)))


@pytest.mark.matrix
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_a_call_by_a_candidate(place, tile, causal):
    kernel, capability, _, width = place
    (entry,) = dense(("candidate", STEPS | dict(D=width, causal=causal, two_passes=kernel in ("dq", "dkdv"))))
    tuned.ask(choose([Candidate(kernel, "bfloat16", width, "plain", tiles.same(tile))]))
    try:
        taken = {x.kernel: x.tile for x in calls.taken(entry, capability)}
        assert tiles.same(taken[kernel]) == tiles.same(tile)
        outcome = calls.execute(entry, capability)
    finally:
        tuned.ask(None)
    assert not outcome.wrong(), "\n".join(outcome.wrong())
