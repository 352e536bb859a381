"""Gradients by the softmax formula for few keys or rows, where the fused kernel's errors do not average out."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..call.options import Call
from ..call.private import softmax_backward
from ..naive.formula import grouped
from .tiling import Rectangle, additive, is_nothing
from .value_mean import INFINITE

FEW = 64  # the formula computes float32 gradients of at most this many keys
FEW_ROWS = 64  # and of calls with fewer rows: the kernel misses the tolerance in 4 to 27 % of those with an lse of 10
LARGE_SCALE = 2.0**60  # and of calls with a larger scale: the kernel's backward multiplies keys by it and may overflow
ROWS = 128  # rows of a partial sum


def is_few(call: Call) -> bool:
    """Return whether to use the softmax formula for gradients: float32, and few keys, few rows or a large scale."""
    few = call.key.shape[2] <= FEW or call.query.shape[2] < FEW_ROWS
    return call.query.dtype == torch.float32 and (few or abs(call.scale) > LARGE_SCALE)


def product(a: Tensor, b: Tensor, scale: float, out: Tensor | None = None) -> Tensor:
    """Return scale * (a @ b) of batches of matrices, in `out` or new memory."""
    # baddbmm could also scale, but multiplies `b` first: that rounds the terms of a score, and may overflow.
    return torch.bmm(a, b, out=out).mul_(scale)


def over_rows(a: Tensor, b: Tensor, scale: float = 1.0) -> Tensor:
    """Return scale * a.mT @ b as a sum of partial sums: MKL may lose digits when it sums many rows."""
    rows = a.shape[1]
    if rows < 2 * ROWS:
        return product(a.mT, b, scale)
    whole = rows - rows % ROWS
    first, second = (x[:, :whole].unflatten(1, (-1, ROWS)) for x in (a, b))
    return (first.mT @ second).sum(1).add_(a[:, whole:].mT @ b[:, whole:]).mul_(scale)


def scores_of(call: Call, where: Rectangle, less: float | Tensor, rows: Tensor, keys: Tensor) -> Tensor:
    """Return a rectangle's scores minus the offset `less`, -inf where hidden. rows, keys: its part of query and key."""
    heads, scores = keys.shape[1], rows.new_empty(*rows.shape[:3], keys.shape[2])  # no view: forward-mode AD refuses it
    product(grouped(rows, heads), keys.flatten(0, 1).mT, call.scale, grouped(scores, heads))
    if where.causal and not where.masked and is_nothing(less):
        return scores.add_(scores.new_full(scores.shape[-2:], -INFINITE).triu_(1))
    if where.masked or where.causal or not is_nothing(less):
        scores.add_(added := additive(call, where, less))
        if where.masked and has_nan(scores.sum(-1, keepdim=True)):
            scores.masked_fill_(added == -INFINITE, -INFINITE)
    return scores


def weights_of(scores: Tensor, masked: bool) -> Tensor:
    """Return the softmax of scores, with zeros for fully masked rows. masked: such rows may exist."""
    weights = scores.softmax(-1)
    if masked and has_nan(weights):
        weights.masked_fill_(scores.amax(-1, keepdim=True) == -INFINITE, 0.0)
    return weights


def has_nan(x: Tensor) -> bool:
    """Return whether a softmax has rows of NaN. A row is NaN in every column or in none, so one column is read."""
    return bool(x[..., 0].isnan().any())


def lse_of(scores: Tensor, weights: Tensor) -> Tensor:
    """Return the log-sum-exp of scores, computed from their softmax because torch.logsumexp is slow."""
    largest = scores.amax(-1)
    return torch.where(largest.isinf(), largest, largest - weights.amax(-1).log_())


def by_weights(
    weights: Tensor, scale: float, tensors: Sequence[Tensor], grad_out: Tensor, out: Tensor | None,
    of_bias: Tensor | None = None, grad_lse: Tensor | None = None, grad_weights: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return gradients of query, key and value from the softmax weights; add the gradient of scores to of_bias."""
    # out: the output over all keys of the rows; None if `weights` has all of them. With grad_lse or grad_weights: None.
    query, key, value = tensors
    size, heads = weights.shape, key.shape[1]
    rows, weights, grad_out = (grouped(x, heads) for x in (query, weights, grad_out))
    keys = key.flatten(0, 1)
    of_value = over_rows(weights, grad_out).view_as(value)
    values = value.flatten(0, 1).mT
    if grad_weights is None:
        of_scores = torch.bmm(grad_out, values)
    else:
        of_scores = torch.baddbmm(grouped(grad_weights, heads), grad_out, values)
    if out is None:  # softmax_backward rounds so that the gradients of a row's scores add up to 0
        of_scores = softmax_backward(of_scores, weights, -1, weights.dtype, grad_input=of_scores)
        if grad_lse is not None:
            of_scores.addcmul_(weights, grouped(grad_lse[..., None], heads))
    else:
        of_scores = of_scores.sub_((grad_out * grouped(out, heads)).sum(-1, keepdim=True)).mul_(weights)
    if of_bias is not None:
        terms = of_scores.view(size)
        if of_bias.shape[2:] == (1, 1):  # the sum of a whole head cancels: in float32 it would lose digits
            terms = terms.sum((2, 3), keepdim=True, dtype=torch.float64)
        of_bias += terms.sum_to_size(of_bias.shape)
    return product(of_scores, keys, scale).view_as(query), over_rows(of_scores, rows, scale).view_as(key), of_value
