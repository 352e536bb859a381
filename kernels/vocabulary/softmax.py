"""The running softmax of a block of rows. Natural log outside, base 2 inside.

A score is worth `scale`, a positive number; None is 1. Nothing is assumed about the size of scores, for a row's largest
is subtracted before anything is scaled: the difference of two scores is exact where it matters, a product is not.
Source: Online normalizer calculation for softmax, arXiv:1805.02867, section 3.
"""

from typing import NamedTuple

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


class State(NamedTuple):
    """A row's running largest score, and the sum of its weights relative to that."""

    row_max: tl.tensor
    row_sum: tl.tensor


class Row(NamedTuple):
    """What gives the weights of a row back: a pivot to subtract from a score, and what to add to its exponent."""

    pivot: tl.tensor
    neg_log2_sum: tl.tensor


@triton.jit
def start(sink, ROWS: tl.constexpr, dtype: tl.constexpr):
    """Rows that have seen nothing, or nothing but a sink: a score, where scale is None."""
    if sink is None:
        return State(tl.full([ROWS], float("-inf"), dtype), tl.zeros([ROWS], dtype))
    else:
        row_max = tl.zeros([ROWS], dtype) + sink
        return State(row_max, tl.where(row_max == float("-inf"), 0.0, tl.full([ROWS], 1.0, dtype)))


@triton.jit
def _pivot(row_max):
    """What to subtract: 0 for a row that has seen no key, for -inf - -inf is NaN."""
    return tl.where(row_max == float("-inf"), 0.0, row_max)


@triton.jit
def _log2(difference, scale):
    """A score difference as an exponent of base 2."""
    return difference * (LOG2E if scale is None else scale * LOG2E)


@triton.jit
def relative(s, row_max, before, scale):
    """(weights of scores relative to the largest of their rows, the factor for sums relative to `before`)."""
    pivot = _pivot(row_max)
    return tl.math.exp2(_log2(s - pivot[:, None], scale)), tl.math.exp2(_log2(before - pivot, scale))


@triton.jit
def absorb(state, s, largest, scale):
    """`step`, where the largest score of each row of the tile is known."""
    row_max = tl.maximum(state.row_max, largest)
    p, decay = relative(s, row_max, state.row_max, scale)
    return p, decay, State(row_max, state.row_sum * decay + tl.sum(p, 1))


@triton.jit
def step(state, s, scale):
    """Weights of one tile of scores, the factor that rescales what was summed before, and the new State."""
    return absorb(state, s, tl.max(s, 1), scale)


@triton.jit
def share(state, whole, scale):
    """The factor that rescales sums of a State to `whole`, a State of its keys and more."""
    return tl.math.exp2(_log2(state.row_max - _pivot(whole.row_max), scale))


@triton.jit
def join(states, scale):
    """Merge the States of splits of the keys, along the first axis, into one State for each row."""
    row_max = tl.max(states.row_max, 0)
    return State(row_max, tl.sum(states.row_sum * share(states, State(row_max, row_max), scale), 0))


@triton.jit
def finish(out, state, scale):
    """(normalised output, lse, log2_sum, which `row` needs). A row that saw nothing has 0, -inf and log2_sum +inf."""
    seen = state.row_sum != 0  # of what is not a number, too
    log2_sum = tl.math.log2(tl.where(seen, state.row_sum, 1.0))
    row_max = state.row_max if scale is None else state.row_max * scale
    out = tl.where(seen[:, None], out * (1 / state.row_sum)[:, None], 0.0)
    return out, tl.where(seen, row_max + log2_sum * LN2, float("-inf")), tl.where(seen, log2_sum, float("inf"))


@triton.jit
def row(row_max, log2_sum):
    """The Row of what `finish` left.

    The log of the sum stays apart from the largest score: where that is large their float32 sum would lose it, and each
    of n equal keys would weigh 1, not 1 / n.
    """
    return Row(_pivot(row_max), -log2_sum)


@triton.jit
def weights(s, row, scale):
    """The weights again, from scores and their rows, which come already broadcast. Rows that saw nothing weigh 0."""
    return tl.math.exp2(_log2(s - row.pivot, scale) + row.neg_log2_sum)


@triton.jit
def powers(s, scale):
    """The weights again, from scores less the pivots of their rows that hold the logarithm of the sum as well."""
    return tl.math.exp2(_log2(s, scale))
