"""A few seconds of `python -m tests.soak`, and that it sees what grows or is wrong."""

import time

import pytest
import torch

import fusedattn as fa
from fusedattn.dispatch import replay

from . import soak

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _quiet(one_thread):
    """Of each thread of the soak alone."""


@pytest.mark.matrix
def test_a_few_seconds():
    """What grows slowly is seen by the script."""
    found = soak.Soak(threads=3, seed=1)
    grown = found.run(6.0, rounds=4)
    assert not found.wrong and all(count > 0 for count in found.counts.values()), grown


def _grows(job, seconds=0.6):
    """What a soak of one kind of call says is wrong."""
    with pytest.raises(soak.Wrong) as raised:
        soak.Soak(threads=2, seed=1, jobs={job: 1}).run(seconds, rounds=3)
    return str(raised.value)


@pytest.mark.matrix
def test_what_grows_is_seen():
    kept = []

    def memory(dice):
        kept.append(torch.ones(2**21))
        time.sleep(0.03)

    def files(dice):
        kept.append(open(__file__))
        time.sleep(0.05)

    for job, what in ((memory, "mib"), (files, "files")):
        said = _grows(job)
        assert f"'{what}'" in said.partition("more than")[0], said
    for x in kept:
        getattr(x, "close", lambda: None)()


def test_a_result_that_is_far_off_is_seen(monkeypatch):
    attention = fa.attention

    def sometimes_anothers(query, *rest, **more):
        found = attention(query, *rest, **more)
        return tuple(x.flip(1) for x in found) if query.shape[1] > 1 else found

    monkeypatch.setattr(fa, "attention", sometimes_anothers)
    assert "numbers are far off" in _grows(soak.dense, 10.0)


def test_more_recordings_than_there_may_be_are_seen(monkeypatch):
    monkeypatch.setattr(replay, "forget", lambda: None)

    def piles_up(dice):
        replay._known[len(replay._known)] = None

    monkeypatch.setattr(replay, "_known", {})
    monkeypatch.setattr(replay, "MAX_KEPT", 3)
    assert "recordings, of at most 3" in _grows(piles_up)
