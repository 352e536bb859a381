"""The backward of a tile: its recomputed weights, and the gradient of its scores."""

from typing import NamedTuple

import triton
import triton.language as tl

from . import dropout as dropping, masks as masking, memory, row_sums, scores, softmax


class Row(NamedTuple):
    """Row statistics: the final softmax, delta = sum(out * grad_out) - dlse, and dlse, the gradient of lse."""

    softmax: softmax.Row
    delta: tl.tensor
    dlse: tl.tensor


class Grads(NamedTuple):
    """Gradients that a kernel writes, each None if not wanted. The gradient of q is a separate argument of the kernels.

    k, v and bias are Views (pointer and strides). bias (B, Hq, Sq, Sk) gets the gradient of the scores. key_sums
    (B, Hq, Sk, 3) gets its sum over rows, as three parts. partial: 1 if rows see keys outside this call, or None.
    """

    k: memory.View
    v: memory.View
    bias: memory.View
    key_sums: tl.tensor
    rows: row_sums.ByRow
    partial: tl.tensor


class Incoming(NamedTuple):
    """Incoming gradients: Views for the output and the weights (or None). rows: row statistics from `preprocess`."""

    grad_out: memory.View
    grad_weights: memory.View
    rows: tl.tensor


@triton.jit
def load(Rows, plane, rows, n):
    pivot, neg_log2_sum, delta, dlse = memory.load_quad(memory.table(Rows, plane, n, 4), rows, n)
    return Row(softmax.Row(pivot, neg_log2_sum), delta, dlse)


@triton.jit
def down(row):
    return Row(softmax.down(row.softmax), row.delta[:, None], row.dlse[:, None])


@triton.jit
def across(row):
    s = row.softmax
    return Row(softmax.Row(s.pivot[None, :], s.neg_log2_sum[None, :]), row.delta[None, :], row.dlse[None, :])


@triton.jit
def weights(x, shown, bias, row, r, c, band, rules, plane, CHECK: tl.constexpr):
    """Return (weights, derivative of the softcap) from products x = q @ k.T. Dropped weights are negative."""
    s, dcap = scores.apply(rules.score, x, bias, band, plane, r, c)
    p = softmax.weights(s, row.softmax, rules.score.softmax_scale)
    if CHECK:
        seen = masking.visible(rules.masks, shown, band, plane, r, c)
        if rules.score.slopes is not None:
            seen &= r < band.rows  # hide rows past the end: their q is 0, but not their ALiBi distance
        p = tl.where(seen, p, 0.0)
    return memory.opaque(dropping.sign_dropped(rules.dropout, p, plane, r, c)), dcap


@triton.jit
def of_scores(signed, dp, row, r, c, band, rules, plane, GradWeights):
    """Return the gradient of a tile's scores, from the result of `weights` and dp = dout @ v.T."""
    if GradWeights is not None:
        # Incoming gradients of hidden rows and keys may be NaN.
        exists = masking.real_rows(rules.masks, plane, r, band.rows)
        exists &= masking.real_keys(rules.masks, plane, c, band.keys)
        dp += tl.load(memory.pointers(memory.of_rows(GradWeights, plane), r, c), mask=exists, other=0.0)
    return of_weights(rules.dropout, signed, dp, row.delta)


@triton.jit
def of_weights(dropout, signed, dp, delta):
    """Return the gradient of scores from the result of `weights`, dp (gradient of weights after dropout) and delta."""
    return dropping.before(dropout, signed) * (dropping.grad(dropout, signed, dp) - delta)
