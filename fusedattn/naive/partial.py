"""Partial calls: attention of rows to some of the keys that they see, in float64.

If a row sees one key, the gradient of its score is a difference of two equal numbers. Eager PyTorch rounds both alike,
so that gradient is 0. Partial calls compute the two in different ways, so float32 is not enough here.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..call.options import INPUTS, Call, inputs
from . import pairs
from .blocks import Block, block, parts, spans
from .formula import BUDGET, by_part, by_sequence, most, scored, scores_of, sums_of
from .pairs import prepared
from .varlen import parts_of

LN2 = math.log(2)
INFINITE = float("inf")


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """Return (output, stats) of a float32 or float64 call without sinks."""
    # stats (B, Hq, Sq, 2): the largest score, and log2(sum of exp(score - largest)). An empty row has -inf and inf.

    def of_block(part: Call, where: Block) -> tuple[Tensor, Tensor, None]:
        scores = _scores(part, where)
        row_max = scores.amax(-1) if where.end > where.begin else scores.new_full(scores.shape[:3], -INFINITE)
        largest, empty = row_max.to(call.query.dtype), row_max == -INFINITE
        row_max = row_max.masked_fill(empty, 0.0)
        weights = (scores - row_max[..., None]).exp()
        total = weights.sum(-1).masked_fill(empty, 1.0)
        log2_sum = total.log2() + (row_max - largest) / LN2
        out = _sums(part, where, weights) / total[..., None]
        return out.to(largest.dtype), torch.stack([largest, log2_sum.to(largest.dtype)], -1), None

    exact = prepared(call, torch.float64)
    out, stats, _ = by_sequence(lambda batch: by_part(of_block, parts(batch, most(batch))), exact)
    stats[..., 1].masked_fill_(stats[..., 0] == -INFINITE, INFINITE)  # rows outside all sequences
    return out, stats


def _sequences(call: Call) -> Iterator[tuple[Call, slice]]:
    """Yield (dense call, slice of its rows) for each packed sequence; without packed sequences, the call itself."""
    if call.cu_seqlens_q is None or call.cu_seqlens_k is None:
        yield call, slice(None)
        return
    rows, keys = call.cu_seqlens_q.tolist(), call.cu_seqlens_k.tolist()
    for b, part in enumerate(parts_of(call, rows, keys, list(range(len(rows))))):
        yield part._replace(cu_seqlens_q=None, cu_seqlens_k=None), slice(rows[b], rows[b + 1])


def backward(
    call: Call, grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, stats: Tensor, need: Sequence[bool]
) -> list[Tensor | None]:
    """Return the gradients of the INPUTS, None if not needed. out, stats: over all keys that the rows see."""
    # The gradient of a score is weight * (gradient of weight - delta), where delta = grad_out . out - grad_lse. The
    # scalar from `_weighed` has this gradient, because it divides exp(score - largest) by a constant: the sum in
    # `stats`.
    row_max, log2_sum = stats.double().unbind(-1)
    empty = log2_sum == INFINITE
    row_max = row_max.masked_fill(empty, 0.0)
    grad_out = grad_out.double().masked_fill(empty[..., None], 0.0)
    delta = (grad_out * out).sum(-1) - (0.0 if grad_lse is None else grad_lse.masked_fill(empty, 0.0))
    exact = prepared(call, torch.float64)
    fields = zip(INPUTS, inputs(exact), need, strict=True)
    grads: dict[str, Any] = {name: torch.zeros_like(x) for name, x, needed in fields if needed and x is not None}
    # Each sequence has leaves of its own: the gradient of a slice would be as large as all sequences.
    for (one, rows), (place, _) in zip(_sequences(exact), _sequences(exact._replace(**grads)), strict=True):
        leaves: dict[str, Any] = {name: getattr(one, name).detach().requires_grad_() for name in grads}
        batch, heads, length, _ = one.query.shape
        row_bytes = 32 * batch * heads * max(1, one.key.shape[2])
        for first, last in spans(length, BUDGET // max(1, row_bytes)):
            of_rows = [x[:, :, rows][:, :, first:last] for x in (row_max, log2_sum, grad_out, delta)]
            total = _weighed(one._replace(**leaves), block(one, first, last), *of_rows)
            for name, grad in zip(leaves, torch.autograd.grad(total, list(leaves.values())), strict=True):
                getattr(place, name).add_(grad)
    return [grads[name].to(call.query.dtype) if name in grads else None for name in INPUTS]


@torch.enable_grad()
def _weighed(call: Call, where: Block, row_max: Tensor, log2_sum: Tensor, grad_out: Tensor, delta: Tensor) -> Tensor:
    """Return a scalar whose gradients are the contributions of a block of rows to the gradients of a call."""
    # Subtract the max first: 1e38 would absorb the log. From 1e14 on, float32 rounds the max too much, hence the clamp.
    exponent = (_scores(call, where) - row_max[..., None]).sub_((log2_sum * LN2)[..., None])
    exponent.detach().clamp_(max=1.0)
    weights = exponent.exp_()
    return (_sums(call, where, weights) * grad_out).sum() - (weights.sum(-1) * delta).sum()


def _scores(call: Call, where: Block) -> Tensor:
    """Return the scores of a block, with -inf for hidden pairs."""
    query, key = call.query[:, :, where.first : where.last], call.key[:, :, where.begin : where.end]
    scores = scored(scores_of(query, key, call.scale), call.softcap, pairs.added(call, where, query.dtype))
    seen = pairs.visible(call, where)
    return scores if seen is None else scores.masked_fill(~seen, -INFINITE)


def _sums(call: Call, where: Block, weights: Tensor) -> Tensor:
    factor = pairs.factor(call, where)
    return sums_of(weights if factor is None else weights * factor, call.value[:, :, where.begin : where.end])
