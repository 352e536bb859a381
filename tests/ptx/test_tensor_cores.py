"""Tests of sums truncated as in tensor cores: by hand, in single instructions, and in whole calls."""

import math

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="kernels need Triton")

from . import calls, test_hopper, test_machine
from .cases import ENTRIES, FEW, HOPPER
from .ops import F32
from .tensor_cores import MEASURED

A100, H100 = MEASURED[80], MEASURED[HOPPER]
INF, NAN = math.inf, math.nan


def _sum(tensor_core, start, factors, kind="bf16"):
    """Return a tensor core's sum of start and 16 products, given as {place: (a, b)}; the others are 0 * 0."""
    left, right = np.zeros((2, 1, 1, 16), F32)
    for place, (a, b) in factors.items():
        left[..., place], right[..., place] = a, b
    with np.errstate(all="ignore"):
        return float(tensor_core.plus(np.full((1, 1, 1), start, F32), left, right, kind)[0, 0, 0])


def _times(n, a, b):
    return dict.fromkeys(range(n), (a, b))


LAST = 2.0**-23  # the last bit of 1
BY_HAND = {  # (start, factors, on an A100, on an H100)
    "a bit below the last is kept": (1, _times(2, LAST / 2, 1), 1 + LAST, 1 + LAST),
    "two bits below": (1, _times(4, LAST / 4, 1), 1, 1 + LAST),
    "three bits below": (1, _times(8, LAST / 8, 1), 1, 1),
    "a truncated result": (1, _times(3, LAST / 2, 1), 1 + LAST, 1 + LAST),
    "towards 0": (-1, _times(3, -LAST / 2, 1), -1 - LAST, -1 - LAST),
    "truncated before it is subtracted": (1, _times(1, -LAST / 4, 1), 1, 1 - LAST / 2),
    "each number by itself": (1, {0: (LAST / 4, 1), 1: (LAST / 2, 1), 2: (LAST / 4, 1)}, 1, 1 + LAST),
    "a group of 8 after another": (0, {0: (2.0**24, 1), 1: (1.5, 1), 15: (-(2.0**24), 1)}, 0, 1.5),
    "products count as their factors do": (0, {0: (1.5, 1.5), 1: (-1.5, 1.5), 2: (LAST / 4, 1)}, 0, LAST / 4),
    "the start is aligned as well": (2.0**24, {0: (-(2.0**12), 2.0**12), 1: (0.5, 1)}, 0, 0.5),
    "0 aligns nobody": (1, {0: (2.0**100, 0)}, 1, 1),
    "nothing": (0, {}, 0, 0),
    "the largest float32": (float(np.finfo(F32).max), {0: (2.0**60, 2.0**43)}, *[float(np.finfo(F32).max)] * 2),
    "past the largest": (float(np.finfo(F32).max), {0: (2.0**60, 2.0**45)}, INF, INF),
    "infinity": (1, {0: (-INF, 1)}, -INF, -INF),
    "infinities": (INF, {0: (-INF, 1)}, NAN, NAN),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_a_sum_by_hand(name):
    start, factors, *wanted = BY_HAND[name]
    np.testing.assert_equal([_sum(A100, start, factors), _sum(H100, start, factors)], wanted)


def test_groups_of_tf32_are_half_as_long():
    factors = {0: (2.0**24, 1), 1: (1.5, 1), 7: (-(2.0**24), 1)}
    assert (_sum(A100, 0, factors, "bf16"), _sum(A100, 0, factors, "tf32")) == (1, 0)
    factors = {0: (2.0**24, 1), 1: (1.5, 1), 15: (-(2.0**24), 1)}
    assert (_sum(H100, 0, factors, "bf16"), _sum(H100, 0, factors, "tf32")) == (1.5, 0)


def _three(rows, k):
    """Return a matrix (rows, k) whose product with its transpose has only elements of 1.5 times the last bit of 1."""
    return torch.tensor([2.0**-12] * 3 + [0.0] * (k - 3)).expand(rows, k)


@pytest.mark.parametrize("tensor_core", [None, A100, H100], ids=["rounded", "A100", "H100"])
def test_instructions_use_the_tensor_core(tensor_core):
    wanted = 1 + (2 if tensor_core is None else 1) * LAST
    for kind, (dtype, k, _) in test_machine.KINDS.items():
        a, b = (_three(rows, k).to(dtype) for rows in (16, 8))
        out = test_machine.product_of_a_warp(kind, a, b, torch.ones(16, 8), tensor_core=tensor_core)
        assert (out == wanted).all()
    _, out, _ = test_hopper.product(draw=_three, tensor_core=tensor_core)
    assert (out == wanted).all()


CALLS = [
    (name, max(MEASURED) if i % 2 or not ENTRIES[name].runs_on(80) else 80)
    for i, name in enumerate((*FEW[::2], FEW[-1], "tf32 D128 causal"))
]


@pytest.mark.matrix
@pytest.mark.parametrize("name, capability", CALLS)
def test_a_call_with_truncated_sums(name, capability):
    outcome = calls.execute(ENTRIES[name], capability, tensor_core=MEASURED[capability])
    assert not outcome.wrong(), "\n".join(outcome.wrong())
