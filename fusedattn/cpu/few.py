"""Attention of few keys by the formula: the fused kernel's exponentials are too coarse for gradients of these."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..call.form import Call
from .centre import INFINITE, in_groups
from .parts import Rectangle, additive, is_nothing

FEW = 64  # keys of float32 whose gradients are computed by the formula
ROWS = 128  # that are summed at a time


def is_few(call: Call) -> bool:
    """Whether a call's keys are so few that gradients are computed by the formula."""
    return call.query.dtype == torch.float32 and call.key.shape[2] <= FEW


def product(weights: Tensor, keys: Tensor) -> Tensor:
    """(B, Hq, S, K) @ (B, Hkv, K, D)."""
    return (in_groups(weights, keys.shape[1]) @ keys).view(*weights.shape[:3], keys.shape[3])


def over_rows(a: Tensor, b: Tensor) -> Tensor:
    """Return a.mT @ b, a sum over rows, as a sum of sums: MKL's own order, another on each CPU, may lose digits."""
    rows = a.shape[-2]
    if rows < 2 * ROWS:
        return a.mT @ b
    whole = rows - rows % ROWS
    first, second = (x[..., :whole, :].unflatten(-2, (-1, ROWS)) for x in (a, b))
    return (first.mT @ second).sum(-3) + a[..., whole:, :].mT @ b[..., whole:, :]


def weighed(rows: Tensor, keys: Tensor, scale: float, added: Tensor | None) -> tuple[Tensor, Tensor]:
    """(weights, NaN of a row that sees nothing, and lse) by the formula."""
    scores = product(rows, keys.mT).mul_(scale)
    if added is not None:
        scores += added
    weights, largest = scores.softmax(-1), scores.amax(-1)
    # logsumexp takes as long as all the rest does.
    return weights, torch.where(largest.isinf(), largest, largest - weights.amax(-1).log_())


def added_to_few(call: Call, where: Rectangle, less: float | Tensor) -> Tensor | None:
    """What the formula adds to the scores of a rectangle; None if that is nothing."""
    return additive(call, where, less) if where.masked or where.causal or not is_nothing(less) else None


def weights_of(call: Call, where: Rectangle, less: float | Tensor, rows: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """(weights, lse less an offset) of a rectangle by the formula, as if its rows saw nothing else."""
    weights, lse = weighed(rows, keys, call.scale, added_to_few(call, where, less))
    return weights.masked_fill_((lse == -INFINITE)[..., None], 0.0) if where.masked else weights, lse


def attend_to_few(tensors: Sequence[Tensor], scale: float, added: Tensor | None) -> tuple[Tensor, Tensor]:
    """(output, lse) by the formula, of rows that all see something."""
    query, key, value = tensors
    weights, lse = weighed(query, key, scale, added)
    return product(weights, value), lse


def differentiate_few(
    tensors: Sequence[Tensor], scale: float, added: Tensor | None, grad_out: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value of `attend_to_few`."""
    query, key, value = tensors
    return by_weights(weighed(query, key, scale, added)[0], scale, tensors, grad_out, None)


def by_weights(
    weights: Tensor, scale: float, tensors: Sequence[Tensor], grad_out: Tensor, out: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value from the weights; out: None where these are all that their rows have."""
    query, key, value = tensors
    of_scores = product(grad_out, value.mT)
    if out is None:  # rounded as it is here, this mean makes gradients of scores that add up to 0
        of_scores -= (of_scores * weights).sum(-1, keepdim=True)
    else:
        of_scores -= (grad_out * out).sum(-1, keepdim=True)
    of_scores *= weights.mul(scale)
    heads = key.shape[1]
    of_key, of_value = (
        over_rows(in_groups(a, heads), in_groups(b, heads)) for a, b in ((of_scores, query), (weights, grad_out))
    )
    return product(of_scores, key), of_key, of_value
