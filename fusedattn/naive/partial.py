"""The definition of a partial call: attention over some of the keys that its rows see."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..call.options import INPUTS, Call, Origin, inputs, wide_dtype
from . import pairs
from .blocks import Block, Part, block, spans, uncut
from .formula import BUDGET, FEWEST_COPIES, scored
from .inputs import prepared
from .varlen import of_sequences, part_of

LN2 = 0.6931471805599453
_multiply, _add_up = FEWEST_COPIES


def _sequences(call: Call) -> Iterator[tuple[Call, slice, slice]]:
    """Yield (dense call, its rows, its keys) for each packed sequence, or a dense call as it is."""
    if call.cu_seqlens_q is None or call.cu_seqlens_k is None:
        yield call, slice(None), slice(None)
        return
    rows, keys = call.cu_seqlens_q.tolist(), call.cu_seqlens_k.tolist()
    origin = Origin(heads=call.query.shape[1]) if call.origin is None else Origin(*call.origin)
    for b in range(len(rows) - 1):
        own = origin._replace(plane=origin.plane + b * origin.heads)
        one = part_of(call, rows, keys, b, b + 1)._replace(cu_seqlens_q=None, cu_seqlens_k=None, origin=own)
        yield one, slice(rows[b], rows[b + 1]), slice(keys[b], keys[b + 1])


def _blocks(call: Call) -> Iterator[Block]:
    """Return blocks of as many rows as BUDGET allows."""
    batch, heads, rows, _ = call.query.shape
    row_bytes = 4 * batch * heads * max(1, call.key.shape[2]) * call.query.element_size()
    return (block(call, *span) for span in spans(rows, BUDGET // max(1, row_bytes)))


def _weights(
    part: Part, where: Block, row_max: Tensor | None, log2_sum: Tensor | float, stored: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """Return (weights of a block, row_max): exp(score - row_max) / 2**log2_sum.

    row_max: the largest score over all keys; None computes it from this block, rounded to the dtype `stored`.
    """
    call, (first, last, begin, end) = part.call, where
    scores = _multiply(call.query[:, :, first:last], call.key[:, :, begin:end], call.scale)
    scores = scored(scores, call.softcap, pairs.added(call, where, scores.dtype))
    seen = pairs.visible(call, where)
    if seen is not None:
        scores = scores.masked_fill(~seen, float("-inf"))
    if row_max is None:
        row_max = scores.detach().amax(-1) if end > begin else scores.new_full(scores.shape[:3], float("-inf"))
        row_max = row_max.to(stored)
    exponent = scores - row_max.masked_fill(row_max == float("-inf"), 0.0)[..., None]
    if isinstance(log2_sum, Tensor):
        exponent = exponent - (log2_sum * LN2)[..., None]
    return exponent.exp(), row_max


def _sum(part: Part, where: Block, weights: Tensor) -> Tensor:
    factor = pairs.factor(part.call, part.planes, where)
    return _add_up(weights if factor is None else weights * factor, part.call.value[:, :, where.begin : where.end])


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """Return (output, stats) of a call without sinks, in float32 (float64).

    stats (B, Hq, Sq, 2) are the largest score of a row, and log2(sum of exp(score - largest)); -inf and inf for a row
    that sees nothing. All is computed in float64. If one key has all weight of a row, the gradient is a difference of
    two sums; eager PyTorch rounds both alike, but parts do not.
    """
    rows, wide = call.query.shape[:3], wide_dtype(call)
    out = call.query.new_zeros((*rows, call.value.shape[3]), dtype=wide)
    stats = out.new_empty(*rows, 2)
    for one, of_rows, _ in _sequences(call):
        part = uncut(prepared(one, torch.float64))
        own_out, own_stats = out[:, :, of_rows], stats[:, :, of_rows]
        for where in _blocks(part.call):
            weights, row_max = _weights(part, where, None, 0.0, wide)
            total, here = weights.sum(-1), slice(where.first, where.last)
            own_out[:, :, here] = _sum(part, where, weights) / total.masked_fill(total == 0, 1.0)[..., None]
            own_stats[:, :, here, 0] = row_max
            own_stats[:, :, here, 1] = total.log2().masked_fill(total == 0, float("inf"))
    return out, stats


def backward(
    call: Call, grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, stats: Tensor, need: Sequence[bool]
) -> list[Tensor | None]:
    """Return gradients of the INPUTS, None if not needed. out and stats are over all keys.

    The gradient of a score is weight * (grad_weight - grad_out . out + grad_lse). That is the gradient of a sum of
    values and a sum of weights whose normaliser is constant.
    """
    empty, grad_out = stats[..., 1] == float("inf"), grad_out.double()
    delta = (grad_out * out).sum(-1)
    delta = (delta if grad_lse is None else delta - grad_lse).masked_fill(empty, 0.0)
    grad_out, stats = grad_out.masked_fill(empty[..., None], 0.0), stats.double()
    grads = _zeros(call, need, wide_dtype(call))
    for b, (one, rows, keys) in enumerate(_sequences(call)):
        own = _of_one(one, grad_out[:, :, rows], delta[:, :, rows], stats[:, :, rows], need)
        where = slice(None) if one is call else slice(b, b + 1), (rows, keys), (one.query.shape[2], one.key.shape[2])
        for name, grad, more in zip(INPUTS, grads, own, strict=True):
            place = of_sequences(name, grad, *where)
            if place is not None and more is not None:
                place += more
    return grads


def _zeros(call: Call, need: Sequence[bool], dtype: torch.dtype) -> list[Tensor | None]:
    pairs = zip(inputs(call), need, strict=True)
    return [torch.zeros_like(x, dtype=dtype) if wanted and x is not None else None for x, wanted in pairs]


def _of_one(call: Call, grad_out: Tensor, delta: Tensor, stats: Tensor, need: Sequence[bool]) -> list[Tensor | None]:
    """Return `backward` of a dense call. The incoming gradients are 0 for hidden rows."""
    call64 = prepared(call, torch.float64)
    grads = dict(zip(INPUTS, _zeros(call64, need, torch.float64), strict=True))
    wanted = {name: grad for name, grad in grads.items() if grad is not None}
    for where in _blocks(call64):
        here = slice(where.first, where.last)
        with torch.enable_grad():
            leaves: dict[str, Any] = {name: getattr(call64, name).detach().requires_grad_() for name in wanted}
            part = uncut(call64._replace(**leaves))
            weights, _ = _weights(part, where, stats[:, :, here, 0], stats[:, :, here, 1])
            total = (_sum(part, where, weights) * grad_out[:, :, here]).sum()
            total = total - (weights.sum(-1) * delta[:, :, here]).sum()
        found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
        for grad, more in zip(wanted.values(), found, strict=True):
            if more is not None:
                grad += more
    for name, mask in (("query", call.query_mask), ("key", call.key_mask), ("value", call.key_mask)):
        if name in wanted and mask is not None:
            wanted[name].masked_fill_(~mask[:, None, :, None], 0.0)
    return list(grads.values())
