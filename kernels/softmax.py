"""The running softmax of a block of rows. Natural log outside, base 2 inside.

A score is worth `unit`, a positive number; None is 1 and makes no assumption about the size of scores.
Source: Online normalizer calculation for softmax, arXiv:1805.02867, section 3.
"""

from typing import NamedTuple

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


class State(NamedTuple):
    """What is kept of a row: its largest score as it came, the same in base 2, the sum of weights relative to that.

    With a unit, top counts in steps of four powers of two: a score of 3e38 is more than float32 can hold in base 2.
    """

    largest: tl.tensor
    top: tl.tensor
    total: tl.tensor


class Row(NamedTuple):
    """What gives the weights of a row back, from `row`: what is added to a score, and what is taken from its power."""

    shift: tl.tensor
    rest: tl.tensor
    unit: tl.tensor


@triton.jit
def start(sink, ROWS: tl.constexpr, dtype: tl.constexpr):
    """Rows that have seen nothing, or nothing but a sink: a score, where unit is None."""
    if sink is None:
        lowest = tl.full([ROWS], float("-inf"), dtype)
        return State(lowest, lowest, tl.zeros([ROWS], dtype))
    else:
        lowest = tl.zeros([ROWS], dtype) + sink
        return State(lowest, lowest, tl.where(lowest == float("-inf"), 0.0, tl.full([ROWS], 1.0, dtype)))


@triton.jit
def _pivot(top):
    """What to subtract: 0 for a row that has seen no key, for -inf - -inf is NaN."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def _steps(pivot):
    """Powers of two in a step of top: 4 while |pivot| < 2**19, beyond it what keeps |pivot| * _steps below 2**21.

    A multiply-add sets an exact product against a rounded pivot, and past 2**30 what rounding left is an exponent that
    overflows. Such rows are computed softer by this much; float32 products of that size know no better.
    """
    if pivot.dtype == tl.float64:
        return tl.full(pivot.shape, 4.0, tl.float64)
    else:
        exponent = tl.maximum((pivot.to(tl.int32, bitcast=True) >> 23) & 255, 145)
        return ((274 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def step(state, s, unit):
    """Weights of one tile of scores, the factor that rescales what was summed before, and the new State.

    The compiler fuses a * b - c, so a product has no place in a difference that must be exactly 0: where the largest
    score stays the same, so must everything summed before.
    """
    highest = tl.max(s, 1)
    largest = tl.maximum(state.largest, highest)
    if unit is None:
        top = largest
        pivot = _pivot(top)
        # The difference comes first: a bias of finfo.min times LOG2E is -inf, and its row would look empty.
        p = tl.math.exp2((s - pivot[:, None]) * LOG2E)
        decay = tl.math.exp2((state.top - pivot) * LOG2E)
    else:
        # One multiply-add an element. What rounding top leaves in the exponent is common to the row and cancels.
        top = tl.maximum(state.top, highest * (unit * (LOG2E / 4)))
        pivot = _pivot(top)
        steps = _steps(pivot)
        p = tl.math.exp2(tl.fma(s, (steps * (unit * (LOG2E / 4)))[:, None], -(pivot * steps)[:, None]))
        decay = tl.math.exp2((state.top - pivot) * steps)
    return p, decay, State(largest, top, state.total * decay + tl.sum(p, 1))


@triton.jit
def share(state, whole, unit):
    """What the sums of a State are worth in those of another, whose keys are its own and more."""
    pivot = _pivot(whole.top)
    if unit is None:
        return tl.math.exp2((state.top - pivot) * LOG2E)
    else:
        return tl.math.exp2((state.top - pivot) * _steps(pivot))


@triton.jit
def join(states, unit):
    """The State of rows of whose keys there are several, one after the other along the first axis."""
    largest, top = tl.max(states.largest, 0), tl.max(states.top, 0)
    total = tl.sum(states.total * share(states, State(largest, top, largest), unit), 0)
    return State(largest, top, total)


@triton.jit
def finish(out, state, unit):
    """(normalised output, lse, rest): `row` needs top and rest. A row that saw nothing has 0, -inf and rest +inf."""
    seen = state.total != 0  # of what is not a number, too
    rest = tl.math.log2(tl.where(seen, state.total, 1.0))
    if unit is None:
        lse = state.largest + rest * LN2
    else:
        # From the score as it came: in base 2 it was rounded, and at 1e6 that alone is an error of 0.1.
        steps = _steps(state.top)
        rounded = tl.fma(state.largest, steps * (unit * (LOG2E / 4)), -(state.top * steps))
        lse = state.largest * unit + (rest - rounded) * LN2
    out = tl.where(seen[:, None], out * (1 / state.total)[:, None], 0.0)
    return out, tl.where(seen, lse, float("-inf")), tl.where(seen, rest, float("inf"))


@triton.jit
def row(top, rest, unit):
    """The Row of what `finish` left, ready to use: the other pass needs it in every tile.

    The log of the sum stays apart from the largest score: where that is large their float32 sum would lose it, and each
    of n equal keys would weigh 1, not 1 / n.
    """
    pivot = _pivot(top)
    if unit is None:
        return Row(-pivot, rest, pivot)
    else:
        steps = _steps(pivot)
        return Row(-pivot * steps, rest, steps * (unit * (LOG2E / 4)))


@triton.jit
def weights(s, row, unit):
    """The weights again, from scores and their rows, which come already broadcast. Rows that saw nothing weigh 0."""
    if unit is None:
        return tl.math.exp2(tl.fma(s + row.shift, tl.full([], LOG2E, s.dtype), -row.rest))
    else:
        return tl.math.exp2(tl.fma(s, row.unit, row.shift) - row.rest)
