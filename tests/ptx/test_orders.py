"""Tests that the order in which programs and their warps run changes no bits, except where programs add to one sum.

Only programs of Hopper's deterministic backward wait for other programs, which began earlier. So every order ends.
"""

import functools
import re

import pytest
import torch

pytest.importorskip("triton", reason="kernels need Triton")

from ..sample import product
from . import calls
from .cases import ENTRIES
from .test_planted import planted

pytestmark = pytest.mark.matrix
ORDERS = (0,)  # seeds of random orders
# One program at a time: programs that run together would add in nearly the same order each time.
execute = functools.partial(calls.execute, max_lanes=1)


def differ(outcome, others):
    """Return the names of results whose bits differ between an Outcome and any of the others."""
    bits = [{name: x.contiguous().view(torch.uint8) for name, x in each.results.items()} for each in (outcome, *others)]
    return {name for other in bits[1:] for name, x in other.items() if not torch.equal(x, bits[0][name])}


def executed(name, capability):
    """Return the Outcomes of a call, checked for errors, in the order of program numbers and in ORDERS."""
    outcomes = [execute(ENTRIES[name], capability, order=order) for order in (None, *ORDERS)]
    assert not any(outcome.wrong() for outcome in outcomes), [outcome.wrong() for outcome in outcomes]
    return outcomes


def test_sums_of_dq_by_atomics_round_otherwise():
    """Another order of programs changes bits of dq if atomics add it; two key blocks would not show it."""
    numbered, *others = executed("plain D64 fp32 ieee", 80)
    assert differ(numbered, others) == {"query"}


def test_sums_of_dq_by_the_copy_engine_may_round_otherwise():
    """Another order of programs changes at most dq if TMA sums it in float32; its 16 bits may stay equal."""
    numbered, *others = executed("long, no tails", 90)
    assert differ(numbered, others) <= {"query"}


ON_80 = "decode: new keys", "decode: new keys in pages", "plain D64, two passes", "bias of rows"
ON_90 = (
    *("decode: cache, split and merged", "hopper one row", "hopper window, two passes"),
    *("hopper packed D64, two passes", "hopper mask, packed causal, two passes", "hopper causal D128, two passes"),
    *("hopper window D136 Dv32 fp16, two passes", "hopper D512 causal"),
    *("hopper key mask D256 fp16", "hopper bias, key mask D256, heads 4:2"),
)


@pytest.mark.parametrize("name, capability", product(ON_80, [80]) + product(ON_90, [90]))
def test_results_of_one_program_have_the_same_bits(name, capability):
    numbered, *others = executed(name, capability)
    assert not differ(numbered, others)


def one_by_one_and_all_at_once(name):
    """Return the names of results that differ if programs of Hopper's backward run in another order or all at once."""
    numbered, *others = executed(name, 90)
    others.append(calls.execute(ENTRIES[name], 90))
    assert not others[-1].wrong()
    return differ(numbered, others)


TURNS, TURNS_OF_A_MASK = "hopper long, two passes", "hopper mask, key mask D128, two passes"


def test_sums_of_programs_that_take_turns_have_the_same_bits():
    assert not execute(ENTRIES["hopper window"], 90, order=ORDERS[0]).wrong(), "without turns"
    assert not one_by_one_and_all_at_once(TURNS)
    assert not one_by_one_and_all_at_once(TURNS_OF_A_MASK)


@pytest.mark.parametrize(
    "file, text, becomes",
    [
        pytest.param("hopper/backward.py", "            turns.wait(counter, turn)\n", "", id="no_turns"),
        pytest.param(
            "hopper/turns.py",
            "cp.async.bulk.wait_group 0",
            "cp.async.bulk.wait_group.read 0",
            id="read_alone",
            marks=pytest.mark.planted,
        ),
    ],
)
def test_a_turn_that_is_not_waited_for_is_seen_in_bits(file, text, becomes):
    with planted(file, text, becomes):
        assert one_by_one_and_all_at_once(TURNS) == {"query"}


def test_fences_around_a_turn_are_in_order():
    """The PTX of the deterministic backward has its fences in order; the emulator cannot show a missing fence."""
    ptx = [x.kernel.asm["ptx"] for x in calls.execute(ENTRIES["hopper D64, two passes"], 90).device.launches]
    (ordered,) = (text for text in ptx if "ld.volatile.global" in text and "cp.reduce.async.bulk" in text)
    waits = "ld.volatile.global", "fence.acq_rel.gpu", "fence.proxy.async.global", "cp.reduce.async.bulk"
    ends = "cp.async.bulk.wait_group ", "fence.proxy.async.global", "bar.warp.sync", ".release.add.u32"
    found = re.findall("|".join(re.escape(x) for x in dict.fromkeys((*waits, *ends))), ordered)
    found = [x for x, before in zip(found, ["", *found], strict=False) if x != before]  # a box is several additions
    for turn in (waits[1:], ends):
        places = [i for i in range(len(found)) if tuple(found[i : i + len(turn)]) == turn]
        assert len(places) == 2, f"each of two warps: {turn}"
