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
from .blocks import Block, Part, block, parts, spans, uncut
from .formula import BUDGET, by_part, by_sequence, most, scored, scores_of, sums_of
from .inputs import cast, prepared
from .varlen import part_of

LN2 = math.log(2)
INFINITE = float("inf")


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """Return (output, stats) of a call without sinks, in float32 (float64).

    stats (B, Hq, Sq, 2): the largest score, and log2(sum of exp(score - largest)). An empty row has -inf and inf.
    """
    wide = wide_dtype(call)

    def of_block(part: Part, where: Block) -> tuple[Tensor, Tensor, None]:
        scores = _scores(part, where)
        row_max = scores.amax(-1) if where.end > where.begin else scores.new_full(scores.shape[:3], -INFINITE)
        pivot = row_max.masked_fill(row_max == -INFINITE, 0.0)
        weights = (scores - pivot[..., None]).exp()
        total = weights.sum(-1)
        largest = row_max.to(wide)  # rounded, so the sum is relative to the rounded number
        log2_sum = (total.log2() + (pivot - largest) / LN2).masked_fill(total == 0, INFINITE)
        out = _sums(part, where, weights) / total.masked_fill(total == 0, 1.0)[..., None]
        return out.to(wide), torch.stack([largest, log2_sum.to(wide)], -1), None

    def of_batch(batch: Call) -> tuple:
        exact = prepared(prepared(batch, wide), torch.float64)  # the lowest float64 bias becomes the lowest float32
        return by_part(of_block, parts(exact, most(exact)))

    out, stats, _ = by_sequence(of_batch, call)
    return out, stats


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
    row_max, log2_sum = stats.double().unbind(-1)
    empty = log2_sum == INFINITE
    row_max = row_max.masked_fill(empty, 0.0)
    grad_out = grad_out.double().masked_fill(empty[..., None], 0.0)
    delta = (grad_out * out).sum(-1)
    delta = delta if grad_lse is None else delta - grad_lse.masked_fill(empty, 0.0)
    wide = wide_dtype(call)
    present = [(name, x, wanted) for name, x, wanted in zip(INPUTS, inputs(call), need, strict=True) if x is not None]
    exact = [(name, cast(x.detach(), wide).double(), wanted) for name, x, wanted in present]
    leaves: dict[str, Any] = {name: x.requires_grad_(wanted) for name, x, wanted in exact}
    wanted_leaves = [x for x in leaves.values() if x.requires_grad]
    with torch.enable_grad():
        for one, rows in _sequences(call._replace(**leaves)):
            batch, heads, length, _ = one.query.shape
            row_bytes = 32 * batch * heads * max(1, one.key.shape[2])
            for first, last in spans(length, BUDGET // max(1, row_bytes)):
                incoming = [x[:, :, rows][:, :, first:last] for x in (row_max, log2_sum, grad_out, delta)]
                torch.autograd.backward(_weighed(one, first, last, *incoming), inputs=wanted_leaves)
    grads: dict[str, Any] = {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in leaves.items()}
    return [grads[name].to(wide) if wanted else None for name, wanted in zip(INPUTS, need, strict=True)]


def _weighed(
    call: Call, first: int, last: int, row_max: Tensor, log2_sum: Tensor, grad_out: Tensor, delta: Tensor
) -> Tensor:
    """Return a number whose gradients are the gradients of `backward` from rows first .. last - 1."""
    part, where = uncut(prepared(call, torch.float64)), block(call, first, last)
    # One after the other: a row max of 1e38 would absorb the log of the sum.
    weights = (_scores(part, where) - row_max[..., None] - (log2_sum * LN2)[..., None]).exp()
    return (_sums(part, where, weights) * grad_out).sum() - (weights.sum(-1) * delta).sum()


def _scores(part: Part, where: Block) -> Tensor:
    """Return the scores of a block; hidden ones are -inf."""
    call = part.call
    query, key = call.query[:, :, where.first : where.last], call.key[:, :, where.begin : where.end]
    products = scores_of(query, key, call.scale)
    scores = scored(products, call.softcap, pairs.added(call, where, products.dtype))
    seen = pairs.visible(call, where)
    return scores if seen is None else scores.masked_fill(~seen, -INFINITE)


def _sums(part: Part, where: Block, weights: Tensor) -> Tensor:
    """Return the sums of the values of a block by weights, after dropout."""
    factor = pairs.factor(part.call, part.planes, where)
    return sums_of(weights if factor is None else weights * factor, part.call.value[:, :, where.begin : where.end])
