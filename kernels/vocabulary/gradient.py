"""Recomputes a tile of weights in the backward, and computes the gradient of its scores."""

from typing import NamedTuple

import triton
import triton.language as tl

from . import dropout as dropping, masks as masking, memory, scores, softmax


class Row(NamedTuple):
    """What the backward knows of a row: its softmax; delta, the mean gradient of its weights, less dlse; and dlse."""

    softmax: softmax.Row
    delta: tl.tensor
    dlse: tl.tensor


class Grads(NamedTuple):
    """Where the gradients of a pass go, each None where nobody wants it; that of q is an argument of its own.

    k, v and bias are Views, bias that of the scores (B, Hq, Sq, Sk). The sums are contiguous tables: of the gradient of
    the scores, by row or by key, and by row of those of slopes and sinks. partial, None or 1: rows see more keys than
    there are here.
    """

    k: memory.View
    v: memory.View
    bias: memory.View
    bias_sums: tl.tensor
    slope_sums: tl.tensor
    sink_sums: tl.tensor
    partial: tl.tensor


class Incoming(NamedTuple):
    """Gradients of the output and of the weights, Views (weights' may be None), and the rows of `preprocess`."""

    grad_out: memory.View
    grad_weights: memory.View
    rows: tl.tensor


@triton.jit
def load(Rows, plane, rows, n):
    """The Row of each of some rows, from what `preprocess` wrote."""
    pivot, neg_log2_sum, delta, dlse = memory.load_quad(memory.table(Rows, plane, n, 4), rows, n)
    return Row(softmax.Row(pivot, neg_log2_sum), delta, dlse)


@triton.jit
def down(row):
    """The Row shaped [rows, 1]."""
    s = row.softmax
    return Row(softmax.Row(s.pivot[:, None], s.neg_log2_sum[:, None]), row.delta[:, None], row.dlse[:, None])


@triton.jit
def across(row):
    """The Row shaped [1, rows]."""
    s = row.softmax
    return Row(softmax.Row(s.pivot[None, :], s.neg_log2_sum[None, :]), row.delta[None, :], row.dlse[None, :])


@triton.jit
def weights(x, shown, bias, row, r, c, band, rules, plane, CHECK: tl.constexpr):
    """(weights, negative where dropout drops them; the derivative of the cap) of one tile of products x = q @ k.T.

    row, r and c come already broadcast, either way round.
    """
    s, dcap = scores.apply(rules.score, x, bias, band, plane, r, c)
    p = softmax.weights(s, row.softmax, rules.score.softmax_scale)
    if CHECK:
        seen = masking.visible(rules.masks, shown, band, plane, r, c)
        if rules.score.slopes is not None:
            seen &= r < band.rows  # all else of a row past the end is 0, and gives nothing; its distances are not
        p = tl.where(seen, p, 0.0)
    return memory.opaque(dropping.sign_dropped(rules.dropout, p, plane, r, c)), dcap


@triton.jit
def of_scores(signed, dp, row, r, c, band, rules, plane, GradWeights):
    """Gradient of the scores of one tile, from what `weights` gave and dp = dout @ v.T."""
    if GradWeights is not None:
        # Incoming gradients may be anything where a row or a key is hidden.
        exists = masking.real_rows(rules.masks, plane, r, band.rows) & masking.real_keys(
            rules.masks, plane, c, band.keys
        )
        dp += tl.load(memory.pointers(memory.of_rows(GradWeights, plane), r, c), mask=exists, other=0.0)
    return dropping.before(rules.dropout, signed) * (dropping.grad(rules.dropout, signed, dp) - row.delta)
