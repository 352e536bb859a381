"""Partial calls: attention of rows to some of the keys that they see, in float64.

If a row sees one key, the gradient of its score is a difference of two equal numbers. Eager PyTorch rounds both alike,
so it is 0. Partial calls compute the two in different ways, so float32 is not enough here.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..call.options import INPUTS, Call, Origin, inputs, wide_dtype
from . import pairs
from .blocks import block, spans, uncut
from .formula import BUDGET, run_naive, scored, scores_of, sums_of
from .inputs import prepared
from .varlen import part_of

LN2 = math.log(2)
INFINITE = float("inf")


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """Return (output, stats) of a call without sinks, in float32 (float64).

    stats (B, Hq, Sq, 2): the lse, and its rounding error in this dtype as a log2. An empty row has -inf and inf.
    """
    out, lse, _ = run_naive(prepared(call, torch.float64), True, False)
    wide = wide_dtype(call)
    rounded = lse.to(wide)
    lost = ((lse - rounded) / LN2).to(wide).masked_fill(rounded == -INFINITE, INFINITE)
    return out.to(wide), torch.stack([rounded, lost], -1)


def _sequences(call: Call) -> Iterator[tuple[Call, slice]]:
    """Yield (dense call, slice of its rows) for each packed sequence; without packed sequences, the call itself."""
    if call.cu_seqlens_q is None or call.cu_seqlens_k is None:
        yield call, slice(None)
        return
    rows, keys = call.cu_seqlens_q.tolist(), call.cu_seqlens_k.tolist()
    origin = Origin(heads=call.query.shape[1]) if call.origin is None else Origin(*call.origin)
    for b in range(len(rows) - 1):
        own = origin._replace(plane=origin.plane + b * origin.heads)
        part = part_of(call, rows, keys, b, b + 1)
        yield part._replace(cu_seqlens_q=None, cu_seqlens_k=None, origin=own), slice(rows[b], rows[b + 1])


def backward(
    call: Call, grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, stats: Tensor, need: Sequence[bool]
) -> list[Tensor | None]:
    """Return the gradients of the INPUTS, None if not needed. out, stats: over all keys that the rows see.

    The gradient of a score is weight * (gradient of weight - delta), where delta = grad_out . out - grad_lse. The
    number that `_weighed` returns has this gradient, because its softmax is divided by a constant sum, from `stats`.
    """
    largest, log2_sum = stats.double().unbind(-1)
    empty = log2_sum == INFINITE
    lse = (largest + log2_sum * LN2).masked_fill(empty, INFINITE)
    grad_out = grad_out.double().masked_fill(empty[..., None], 0.0)
    delta = (grad_out * out).sum(-1)
    delta = delta if grad_lse is None else delta - grad_lse.masked_fill(empty, 0.0)
    present = [(name, x, wanted) for name, x, wanted in zip(INPUTS, inputs(call), need, strict=True) if x is not None]
    leaves: dict[str, Any] = {name: x.detach().double().requires_grad_(wanted) for name, x, wanted in present}
    wanted_leaves = [x for x in leaves.values() if x.requires_grad]
    with torch.enable_grad():
        for one, rows in _sequences(call._replace(**leaves)):
            batch, heads, length, _ = one.query.shape
            row_bytes = 32 * batch * heads * max(1, one.key.shape[2])
            for first, last in spans(length, BUDGET // max(1, row_bytes)):
                incoming = [x[:, :, rows][:, :, first:last] for x in (grad_out, delta, lse)]
                torch.autograd.backward(_weighed(one, first, last, *incoming), inputs=wanted_leaves)
    grads: dict[str, Any] = {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in leaves.items()}
    return [grads[name].to(wide_dtype(call)) if wanted else None for name, wanted in zip(INPUTS, need, strict=True)]


def _weighed(call: Call, first: int, last: int, grad_out: Tensor, delta: Tensor, lse: Tensor) -> Tensor:
    """Return a number whose gradients are the gradients of `backward` from rows first .. last - 1."""
    part, where = uncut(prepared(call, torch.float64)), block(call, first, last)
    query, key, value = part.call[:3]
    keys = slice(where.begin, where.end)
    products = scores_of(query[:, :, first:last], key[:, :, keys], call.scale)
    scores = scored(products, call.softcap, pairs.added(part.call, where, products.dtype))
    if (seen := pairs.visible(part.call, where)) is not None:
        scores = scores.masked_fill(~seen, -INFINITE)
    weights = (scores - lse[..., None]).exp()
    factor = pairs.factor(part.call, part.planes, where)
    out = sums_of(weights if factor is None else weights * factor, value[:, :, keys])
    return (out * grad_out).sum() - (weights.sum(-1) * delta).sum()
