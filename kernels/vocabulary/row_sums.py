"""Sums by row in the backward: for the gradients of options that all keys of a row share."""

from typing import NamedTuple

import triton
import triton.language as tl

from . import memory, scores, softmax


class ByRow(NamedTuple):
    """Outputs by row, tables (B, Hq, Sq, 1), by the name of the option; None if not wanted."""

    bias: tl.tensor
    alibi_slopes: tl.tensor
    sinks: tl.tensor


class Sums(NamedTuple):
    """Sums over the keys of a row: of weights p and gradients of scores ds, and of both times the distance."""

    p: tl.tensor
    ds: tl.tensor
    p_far: tl.tensor
    ds_far: tl.tensor


@triton.jit
def wanted(by_row):
    """Return if any gradient by row is asked for. Triton 3.6 cannot compare a tuple that holds a None with None."""
    return (by_row.bias is not None) or (by_row.alibi_slopes is not None) or (by_row.sinks is not None)


@triton.jit
def total(x):
    """Sum along axis 1, to the same number in all lanes that hold it.

    An unrounded product would be fused with the first addition of two lanes, differently in each, and their sums would
    differ. LLVM makes one rounding instruction of x * y + 0.
    """
    return tl.sum(x + 0.0, 1)


@triton.jit
def add(sums, p, ds, far):
    return Sums(
        sums.p + tl.sum(p, 1),  # p comes from exp2, so there is no product to fuse
        sums.ds + total(ds),
        sums.p_far + total(p * far),
        sums.ds_far + total(ds * far),
    )


@triton.jit
def _mend(sums, delta, dlse):
    """Return (sums, delta) with delta corrected by this pass's products; `preprocess` used the rounded output.

    That error is common to a row. Spread by its weights it is small; summed over them, by distance, it is not.
    """
    error = tl.where(sums.p == 0, 0.0, sums.ds + (sums.p - 1) * delta - dlse)
    return Sums(sums.p, sums.ds - error * sums.p, sums.p_far, sums.ds_far - error * sums.p_far), delta + error


@triton.jit
def store(by_row, sums, row, score, plane, rows, n, PARTIAL: tl.constexpr):
    """Store the gradients of a block of rows. PARTIAL: the rows see more keys than these."""
    delta = row.delta
    if not PARTIAL:
        sums, delta = _mend(sums, row.delta, row.dlse)
    if by_row.bias is not None:
        _store(by_row.bias, plane, rows, n, sums.ds)
    if by_row.alibi_slopes is not None:
        _store(by_row.alibi_slopes, plane, rows, n, -sums.ds_far)
    if by_row.sinks is not None:
        p = softmax.weights(scores.sink(score, plane, delta.dtype), row.softmax, score.softmax_scale)
        _store(by_row.sinks, plane, rows, n, -p * delta)


@triton.jit
def _store(Table, plane, rows, n, x):
    memory.store_column(memory.table(Table, plane, n, 1), rows, n, 0, x)
