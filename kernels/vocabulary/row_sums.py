"""Sums over the keys of a row in the backward, for gradients of ALiBi slopes, sinks and row biases."""

from typing import NamedTuple

import triton
import triton.language as tl

from . import memory, scores, softmax


class ByRow(NamedTuple):
    """Buffers for gradients that have one number per row, contiguous (B, Hq, Sq, 1); None for an unwanted gradient."""

    bias: tl.tensor
    alibi_slopes: tl.tensor
    sinks: tl.tensor


class Sums(NamedTuple):
    """Sums over each row's keys of p (weights), ds (score gradients), p * ALiBi distance and ds * ALiBi distance."""

    p: tl.tensor
    ds: tl.tensor
    p_far: tl.tensor
    ds_far: tl.tensor


@triton.jit
def wanted(by_row):
    """Return True if a ByRow has any buffer."""
    return (by_row.bias is not None) or (by_row.alibi_slopes is not None) or (by_row.sinks is not None)


@triton.jit
def total(x):
    """Return sums along axis 1 that have the same bits in all lanes of a warp."""
    # If x is a product, the compiler would fuse it with the first addition, differently in each lane, so sums of lanes
    # would differ. Adding 0 makes LLVM round x in a separate instruction.
    return tl.sum(x + 0.0, 1)


@triton.jit
def add(sums, p, ds, far):
    # `total` is not needed for p, which comes from exp2, not from a product that could be fused.
    return Sums(sums.p + tl.sum(p, 1), sums.ds + total(ds), sums.p_far + total(p * far), sums.ds_far + total(ds * far))


@triton.jit
def _mend(sums, delta, dlse):
    """Return sums and delta without the error of delta, which `preprocess` computed from a rounded output."""
    # All keys of a row share the error of delta. It is small in one gradient, but not in a sum weighted by distances.
    error = tl.where(sums.p == 0, 0.0, sums.ds + (sums.p - 1) * delta - dlse)
    return Sums(sums.p, sums.ds - error * sums.p, sums.p_far, sums.ds_far - error * sums.p_far), delta + error


@triton.jit
def store(by_row, sums, row, score, plane, rows, n, PARTIAL: tl.constexpr):
    """Store wanted gradients of a block of rows. Unless PARTIAL, sums cover all keys of a row, and correct delta."""
    delta = row.delta
    if not PARTIAL:
        sums, delta = _mend(sums, row.delta, row.dlse)
    if by_row.bias is not None:
        _store(by_row.bias, plane, rows, n, sums.ds)
    if by_row.alibi_slopes is not None:
        _store(by_row.alibi_slopes, plane, rows, n, -sums.ds_far)
    if by_row.sinks is not None:
        _store(by_row.sinks, plane, rows, n, -_of_sink(row, score, plane) * delta)


@triton.jit
def _of_sink(row, score, plane):
    return softmax.weights(scores.sink(score, plane, row.delta.dtype), row.softmax, score.softmax_scale)


@triton.jit
def known_ds(row, score, plane):
    """Return each row's sum of ds over its keys, from row statistics. The call must have all keys that its rows see.

    The weights of keys and sink add up to 1, so the gradients of scores and sink add up to dlse.
    """
    ds = tl.where(row.softmax.neg_log2_sum == float("-inf"), 0.0, row.dlse)  # a hidden row's dlse may be NaN
    return ds if score.sinks is None else ds + _of_sink(row, score, plane) * row.delta


@triton.jit
def _store(Table, plane, rows, n, x):
    memory.store_column(memory.table(Table, plane, n, 1), rows, n, 0, x)
