"""The running softmax of a block of rows. Natural log outside, base 2 inside.

A score is worth `unit`, a positive number; None is 1. Nothing is assumed about the size of scores, for a row's largest
is subtracted before anything is scaled: the difference of two scores is exact where it matters, a product is not.
Source: Online normalizer calculation for softmax, arXiv:1805.02867, section 3.
"""

from typing import NamedTuple

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


class State(NamedTuple):
    """What is kept of a row: its largest score, and the sum of weights relative to that."""

    row_max: tl.tensor
    row_sum: tl.tensor


class Row(NamedTuple):
    """What gives the weights of a row back: what is taken from a score, and what is added to its power of two."""

    pivot: tl.tensor
    shift: tl.tensor


@triton.jit
def start(sink, ROWS: tl.constexpr, dtype: tl.constexpr):
    """Rows that have seen nothing, or nothing but a sink: a score, where unit is None."""
    if sink is None:
        return State(tl.full([ROWS], float("-inf"), dtype), tl.zeros([ROWS], dtype))
    else:
        largest = tl.zeros([ROWS], dtype) + sink
        return State(largest, tl.where(largest == float("-inf"), 0.0, tl.full([ROWS], 1.0, dtype)))


@triton.jit
def _pivot(largest):
    """What to subtract: 0 for a row that has seen no key, for -inf - -inf is NaN."""
    return tl.where(largest == float("-inf"), 0.0, largest)


@triton.jit
def _log2(difference, unit):
    """A difference of two scores, as the power of two that it is."""
    return difference * (LOG2E if unit is None else unit * LOG2E)


@triton.jit
def step(state, s, unit):
    """Weights of one tile of scores, the factor that rescales what was summed before, and the new State."""
    largest = tl.maximum(state.row_max, tl.max(s, 1))
    pivot = _pivot(largest)
    p = tl.math.exp2(_log2(s - pivot[:, None], unit))
    decay = tl.math.exp2(_log2(state.row_max - pivot, unit))
    return p, decay, State(largest, state.row_sum * decay + tl.sum(p, 1))


@triton.jit
def share(state, whole, unit):
    """What the sums of a State are worth in those of another, whose keys are its own and more."""
    return tl.math.exp2(_log2(state.row_max - _pivot(whole.row_max), unit))


@triton.jit
def join(states, unit):
    """The State of rows of whose keys there are several, one after the other along the first axis."""
    largest = tl.max(states.row_max, 0)
    return State(largest, tl.sum(states.row_sum * share(states, State(largest, largest), unit), 0))


@triton.jit
def finish(out, state, unit):
    """(normalised output, lse, rest, which `row` needs). A row that saw nothing has 0, -inf and rest +inf."""
    seen = state.row_sum != 0  # of what is not a number, too
    rest = tl.math.log2(tl.where(seen, state.row_sum, 1.0))
    largest = state.row_max if unit is None else state.row_max * unit
    out = tl.where(seen[:, None], out * (1 / state.row_sum)[:, None], 0.0)
    return out, tl.where(seen, largest + rest * LN2, float("-inf")), tl.where(seen, rest, float("inf"))


@triton.jit
def row(largest, rest):
    """The Row of what `finish` left.

    The log of the sum stays apart from the largest score: where that is large their float32 sum would lose it, and each
    of n equal keys would weigh 1, not 1 / n.
    """
    return Row(_pivot(largest), -rest)


@triton.jit
def weights(s, row, unit):
    """The weights again, from scores and their rows, which come already broadcast. Rows that saw nothing weigh 0."""
    return tl.math.exp2(_log2(s - row.pivot, unit) + row.shift)
