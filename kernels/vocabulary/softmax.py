"""The running softmax of a block of rows. Its lse is a natural logarithm; its internal exponents have base 2.

Scores are multiplied by `scale`, a positive number; None is 1. A row's largest score is subtracted before scaling,
because the difference of two close scores is exact, and a product is not. So scores may have any size.
Source: Online normalizer calculation for softmax, arXiv:1805.02867, section 3.
"""

from typing import NamedTuple

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


class State(NamedTuple):
    """Running maximum of a row's scores, and the sum of the weights exp(scale * (score - maximum))."""

    row_max: tl.tensor
    row_sum: tl.tensor


class Row(NamedTuple):
    """Final softmax of a row: the row max, which is subtracted from scores, and -log2(row sum), added to exponents."""

    pivot: tl.tensor
    neg_log2_sum: tl.tensor


@triton.jit
def start(sink, ROWS: tl.constexpr, dtype: tl.constexpr):
    """Return the State of rows before the first key. sink: a result of `scores.sink`, or None."""
    if sink is None:
        return State(tl.full([ROWS], float("-inf"), dtype), tl.zeros([ROWS], dtype))
    else:
        row_max = tl.zeros([ROWS], dtype) + sink
        return State(row_max, tl.where(row_max == float("-inf"), 0.0, tl.full([ROWS], 1.0, dtype)))


@triton.jit
def _pivot(row_max):
    """Return the row max, or 0 for a row without a visible key, because -inf - -inf is NaN."""
    return tl.where(row_max == float("-inf"), 0.0, row_max)


@triton.jit
def _log2(difference, scale):
    return difference * (LOG2E if scale is None else scale * LOG2E)


@triton.jit
def relative(s, row_max, before, scale):
    """Return (weights relative to row_max, factor that rescales sums from the earlier maximum `before`)."""
    pivot = _pivot(row_max)
    return tl.math.exp2(_log2(s - pivot[:, None], scale)), tl.math.exp2(_log2(before - pivot, scale))


@triton.jit
def step(state, s, largest, scale):
    """Return (weights of a tile, factor that rescales earlier sums, new State); `largest` is the tile's row max."""
    row_max = tl.maximum(state.row_max, largest)
    p, decay = relative(s, row_max, state.row_max, scale)
    return p, decay, State(row_max, state.row_sum * decay + tl.sum(p, 1))


@triton.jit
def share(state, whole, scale):
    """Return the factor that rescales the sums of one State to the row max of a merged State, `whole`."""
    return tl.math.exp2(_log2(state.row_max - _pivot(whole.row_max), scale))


@triton.jit
def join(states, scale):
    """Merge the States of splits of the keys, stacked along the first axis, into one State for each row."""
    row_max = tl.max(states.row_max, 0)
    sums = states.row_sum * share(states, State(row_max, row_max), scale)
    return State(row_max, tl.sum(sums + 0.0, 0))  # + 0.0 as in `row_sums.total`


@triton.jit
def finish(out, state, scale):
    """Return (normalised output, lse, log2 of row_sum), or (0, -inf, +inf) for a row that sees no key or sink."""
    seen = state.row_sum != 0  # true for NaN too
    log2_sum = tl.math.log2(tl.where(seen, state.row_sum, 1.0))
    row_max = state.row_max if scale is None else state.row_max * scale
    out = tl.where(seen[:, None], out * (1 / state.row_sum)[:, None], 0.0)
    return out, tl.where(seen, row_max + log2_sum * LN2, float("-inf")), tl.where(seen, log2_sum, float("inf"))


@triton.jit
def row(row_max, log2_sum):
    """Return the Row (pivot, -log2 of the row sum) from row_max and the log2_sum of `finish`."""
    # They stay two numbers: if row_max is large, their float32 sum would lose the logarithm, and each of n equal keys
    # would weigh 1 instead of 1 / n.
    return Row(_pivot(row_max), -log2_sum)


@triton.jit
def down(row):
    """Return a Row with tensors of shape [rows, 1], to broadcast over a tile [rows, keys]."""
    return Row(row.pivot[:, None], row.neg_log2_sum[:, None])


@triton.jit
def weights(s, row, scale):
    """Return weights from scores and their broadcast Row; 0 in a row without a visible key."""
    return tl.math.exp2(_log2(s - row.pivot, scale) + row.neg_log2_sum)


@triton.jit
def powers(s, scale):
    """Return weights exp(scale * s). s: scores minus the row's pivot and minus log(row sum) / scale."""
    return tl.math.exp2(_log2(s, scale))
