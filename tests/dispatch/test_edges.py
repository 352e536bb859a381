"""What is remembered of calls at its limits: the last that fits stays, one more makes room, threads do no harm."""

import sys
import threading

import pytest
import torch

import fusedattn as fa
from fusedattn.dispatch import replay
from fusedattn.launch import tile_table
from fusedattn.operators import namespace

from ..close import assert_like


def attend(length, backend="triton", **options):
    x = torch.randn(1, 1, length, 8, generator=torch.Generator().manual_seed(length))
    found = fa.attention(x, x + 0.5, x - 0.5, backend=backend, **options)
    assert_like(found, lambda: fa.reference.eager(x, x + 0.5, x - 0.5, **options))


@pytest.fixture
def found(monkeypatch):
    """Whether each call was like an earlier one; each is recorded at once."""
    monkeypatch.setattr(replay, "RECORD_AFTER", 1)
    answers, find = [], replay.find
    monkeypatch.setattr(replay, "find", lambda *call: (answers.append(find(*call)), answers[-1])[1])
    return answers


def test_the_last_signature_that_fits_stays_and_one_more_forgets_all(found, monkeypatch):
    monkeypatch.setattr(replay, "MAX_KEPT", 4)
    for length in (1, 2, 3, 4):
        attend(length)
    assert len(replay._known) == 4
    for length in (1, 2, 3, 4):
        attend(length)
    assert [x is not None for x in found] == [False] * 4 + [True] * 4
    attend(5)
    assert len(replay._known) == 1 and len(replay._recent) == 1
    attend(5), attend(1)
    assert [x is not None for x in found[8:]] == [False, True, False] and len(replay._known) == 2


def test_signatures_that_are_met_once_are_as_many_at_most(monkeypatch, device):
    if device == "cuda":
        pytest.skip("these calls are of CPU tensors")
    monkeypatch.setattr(replay, "MAX_KEPT", 3)
    monkeypatch.setattr(replay, "RECORD_AFTER", 2)
    for length in (1, 2, 3):
        attend(length, "triton")
    assert len(replay._met) == 3 and not replay._known
    attend(4, "triton")
    assert len(replay._met) == 1
    attend(4, "triton")
    assert len(replay._known) == 1 and not replay._met


def test_the_oldest_guard_makes_room_and_its_call_is_still_known(found):
    for length in range(1, replay.RECENT + 2):
        attend(length)
    ((_, kept),) = replay._recent.items()
    assert len(kept) == replay.RECENT and len(replay._known) == replay.RECENT + 1
    attend(1)  # by its signature, and its guard comes back
    assert found[-1] is not None and len(replay._known) == replay.RECENT + 1
    ((_, kept),) = replay._recent.items()
    assert len(kept) == replay.RECENT and kept[0][1] is found[-1]


def test_facts_that_were_checked_are_forgotten_when_there_are_too_many(monkeypatch):
    monkeypatch.setattr(namespace, "MOST", 2)
    checked = []
    check = namespace._once(checked.append)
    for x in (1, 2, 1, 2, 3, 3, 1):
        check(x)
    assert checked == [1, 2, 3, 1]


def test_shares_of_keys_are_not_remembered_for_ever():
    assert tile_table.splits.cache_info().maxsize == 1024


def test_threads_that_forget_at_once(monkeypatch, one_thread):
    """Each call of another length than the one before, with room for two: all of them forget all the time."""
    monkeypatch.setattr(replay, "MAX_KEPT", 2)
    monkeypatch.setattr(replay, "RECORD_AFTER", 1)
    interval, wrong, most, threads = sys.getswitchinterval(), [], [], 4

    def work(number):
        try:
            for again in range(60):
                attend(1 + (number + again) % 7, causal=again % 2 == 0)
                most.append((len(replay._known), len(replay._recent)))
        except BaseException as error:
            wrong.append(error)

    working = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in working:
            thread.start()
        for thread in working:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong and max(max(each) for each in most) <= 2 + threads
