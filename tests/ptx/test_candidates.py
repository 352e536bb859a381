"""Tiles that calls take only where a machine has found them faster, by the PTX that Triton makes of the kernels."""

import pytest

pytest.importorskip("triton", reason="kernels need Triton")

from fusedattn.cli.tune import child as process
from fusedattn.launch import tiles, tuned
from fusedattn.launch.tuned import Candidate, choose

from . import calls, device
from .cases import _TOGETHER, dense

STEPS = dict(Sq=260, Sk=400, Hq=1)  # more blocks, of either side, than there are stages, or as many
CANDIDATES = [(place, tile, causal) for place, some in tiles.CANDIDATES.items() for tile in some for causal in (0, 1)]
FIRST = list({place[0]: (place, some[0], 1) for place, some in tiles.CANDIDATES.items()}.values())
BACKWARD = Candidate("one_pass", "bfloat16", 64, "plain", tiles.CANDIDATES["one_pass", 90, 2, 64][0])
FORWARD = Candidate("forward", "bfloat16", 128, "plain", tiles.CANDIDATES["forward", 90, 2, 128][0])
# What else who loads by the copy engine has to do: sequences that end inside a tile, heads narrower than one, groups,
# and launches that are repeated with other descriptors.
LOADED = {
    "packed, forward": (FORWARD, _TOGETHER | dict(causal=True, D=128)),
    "narrow heads, forward": (FORWARD, dict(D=80)),
    "packed, backward": (BACKWARD, _TOGETHER),
    "heads 4:1, repeated, backward": (BACKWARD, dict(Hq=4, Hkv=1, times=3)),
}


def pytest_generate_tests(metafunc):
    """One of each kernel, with --everything all: no call takes one that `fusedattn tune` has not proved."""
    if "place" in metafunc.fixturenames:
        some = CANDIDATES if metafunc.config.getoption("--everything", False) else FIRST
        ids = [f"{'-'.join(map(str, place))}-{number}" for number, (place, *_) in enumerate(some)]
        metafunc.parametrize("place, tile, causal", some, ids=ids)


def executed(candidate, entry, capability=90):
    """The Outcome of an Entry whose calls take a candidate."""
    form = tiles.same(candidate.form)
    tuned.ask(choose([candidate._replace(form=form)]))
    try:
        taken = {x.kernel: x.tile for x in calls.taken(entry, capability)}
        assert tiles.same(taken[candidate.kernel]) == form
        return calls.execute(entry, capability)
    finally:
        tuned.ask(None)


def loads(outcome):
    """Whether each kernel that was launched loads by the copy engine, by name."""
    return {
        x.name: "cp.async.bulk.tensor.4d.shared::cta.global" in x.kernel.asm["ptx"] for x in outcome.device.launches
    }


@pytest.mark.matrix
def test_a_call_by_a_candidate(place, tile, causal):
    kernel, _, _, width = place
    fields = STEPS | dict(D=width, causal=bool(causal), two_passes=kernel in ("dq", "dkdv"))
    outcome = executed(Candidate(kernel, "bfloat16", width, "plain", tile), *dense(("candidate", fields)))
    assert not outcome.wrong(), "\n".join(outcome.wrong())
    assert loads(outcome)["dkdv" if kernel == "one_pass" else kernel] == tile.tma


@pytest.mark.matrix
@pytest.mark.parametrize("candidate, fields", LOADED.values(), ids=LOADED)
def test_a_call_that_is_loaded_by_the_copy_engine(candidate, fields):
    outcome = executed(candidate, *dense(("loaded", fields)))
    assert not outcome.wrong(), "\n".join(outcome.wrong())
    assert loads(outcome)["forward" if candidate is FORWARD else "dkdv"]


@pytest.mark.matrix
@pytest.mark.parametrize("row", [row for row in tiles.CANDIDATES if row[3] == 64][::2], ids=lambda row: row[0])
def test_tune_proves_what_calls_take(row, monkeypatch):
    """Tiles of the table, and candidates, by compiled code: their calls have rows enough to take them."""
    kernel, capability, itemsize, width = row
    monkeypatch.setattr(process, "CASES", [case for case in process.CASES if case.name in ("plain", "one row")])
    monkeypatch.setattr(process, "TIMES", 4)
    steps = []
    with device.gpu(capability):
        for tile in tiles.candidates(kernel, capability, itemsize, width)[:2]:
            of = Candidate(kernel, "bfloat16", width, "plain", tiles.same(tile), "waiting")
            request = dict(what="prove", device="cpu", known=[], candidate=tuned.entry(of))
            found = process.answer(request, steps.append)
            assert (found.status, found.why) == (tuned.PASSED, ""), found
    assert steps == ["plain", "one row"] * 2


@pytest.mark.matrix
def test_tune_does_not_prove_by_calls_that_take_another_tile(monkeypatch):
    monkeypatch.setattr(process, "CASES", [case for case in process.CASES if case.name == "one row"])
    of = Candidate("forward", "bfloat16", 64, "plain", tiles.same(tiles.TABLE["forward", 90, 2, 64][0]), "waiting")
    with device.gpu(90):
        found = process.answer(dict(what="prove", device="cpu", known=[], candidate=tuned.entry(of)), lambda what: None)
    assert found.status == tuned.UNKNOWN and "none of the named cases" in found.why
