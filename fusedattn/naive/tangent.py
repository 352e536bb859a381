"""The derivative of attention in one direction by its definition, a block of rows at a time.

With tangents t of the inputs and weights p: t_s = (scale (t_q k + q t_k)) cap' + t_bias - t_slope distance,
t_lse = sum p t_s, t_p = p (t_s - t_lse), t_out = sum t_p v + p t_v.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..call.form import DIFFERENTIABLE, Call
from ..call.layout import arrange
from . import formula, pairs
from .blocks import Block, Part, parts, uncut
from .formula import LARGEST_CAP, SMALLEST_CAP, scores_of, sums_of, wide, without_autocast
from .inputs import prepared
from .packed import joined, packed, padded, sequences

Given = Sequence[Tensor | None]  # tangents of the first fields of a call, in their order; None is zero


def _moved(call: Call, given: Given) -> Call:
    """A call with tangents in the place of its fields, so that what cuts and pads a call does so with them.

    In the place of query, key and value that have none stand these themselves.
    """
    some = [x if t is None else t for x, t in zip(call[:3], given, strict=False)]
    fields: dict[str, Any] = dict(zip(Call._fields, (*some, *given[3:]), strict=False))
    return call._replace(**fields)


def _scored(call: Call, block: Block, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor | float]:
    """(scores, derivative of the cap) of a block, before anything is hidden."""
    products, cap = scores_of(q, k, call.scale), call.softcap
    slope: Tensor | float = 1.0
    if cap is not None and cap <= LARGEST_CAP:
        slope = 1 - torch.tanh(products / max(cap, SMALLEST_CAP)) ** 2
    return formula.scored(products, cap, pairs.added(call, block, q.dtype)), slope


def _block(part: Part, moved: Part, block: Block, has: Sequence[bool], need_weights: bool) -> tuple:
    """Tangents of (output, lse, weights or None) of a block; has: which of query, key and value have one."""
    (first, last, begin, end), call, given = block, part.call, moved.call
    q, t_q = (x.query[:, :, first:last] for x in (call, given))
    k, t_k = (x.key[:, :, begin:end] for x in (call, given))
    v, t_v = (x.value[:, :, begin:end] for x in (call, given))
    scores, slope = _scored(call, block, q, k)
    weights, _, of_sinks = formula.softmax(scores, False, sinks=call.sinks, **formula.hiding(call, block))
    t_scores = scores_of(t_q, k, call.scale) if has[0] else torch.zeros_like(scores)
    if has[1]:
        t_scores += scores_of(q, t_k, call.scale)
    t_scores *= slope
    for term in pairs.added(given, block, q.dtype):
        t_scores += term
    if given.bias is not None:
        t_scores.masked_fill_(weights == 0, 0.0)  # what is hidden may have any
    mean = (weights * t_scores).sum(-1, keepdim=True)
    if given.sinks is not None:
        mean += of_sinks * given.sinks[:, :, None, None]
    t_weights, factor = t_scores.sub_(mean).mul_(weights), pairs.factor(call, part.planes, block)
    if factor is not None:
        t_weights, weights = t_weights * factor, weights * factor
    t_out = sums_of(t_weights, v)
    if has[2]:
        t_out += sums_of(weights, t_v)
    if call.query_mask is not None:
        hidden = ~call.query_mask[:, None, first:last, None]
        t_out, t_weights, mean = (x.masked_fill(hidden, 0.0) for x in (t_out, t_weights, mean))
    return t_out, mean.squeeze(-1), t_weights if need_weights else None


def _tangent(call: Call, moved: Call, has: Sequence[bool], need_weights: bool) -> tuple:
    """`tangent` of a call that is not packed; it may be padded."""
    dtype, made = wide(call), prepared(call, wide(call))
    moved = prepared(moved, dtype)
    results = []
    # The same of both: their cuts depend on sizes alone.
    for row, moved_row in zip(*(parts(x, formula.most(made)) for x in (made, moved)), strict=True):
        across = []
        for part, other in zip(row, moved_row, strict=True):
            own = part.call  # in the dtype that is computed in
            lse = own.query.new_empty(own.query.shape[:3])
            out = own.query.new_empty((*lse.shape, own.value.shape[3]))
            # In place: between results that are kept glibc does not reuse what blocks have freed.
            for block in part.blocks:
                here = slice(block.first, block.last)
                out[:, :, here], lse[:, :, here] = _block(part, other, block, has, False)[:2]
            across.append((out, lse))
        results.append([torch.cat(x, 1) for x in zip(*across, strict=True)])
    out, lse = (torch.cat(x) for x in zip(*results, strict=True))
    weights = None
    if need_weights:
        whole, other = uncut(made), uncut(moved)
        weights = _block(whole, other, whole.blocks[0], has, True)[2].to(call.query.dtype)
    return arrange(out, call.query), lse, weights


@without_autocast
def tangent(call: Call, given: Given, need_weights: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Tangents of (output, lse, weights or None) of a checked call, from those of its first fields.

    No derivative can be taken of it.
    """
    assert len(given) == DIFFERENTIABLE
    has, moved = [x is not None for x in given[:3]], _moved(call, given)
    if call.cu_seqlens_q is None:
        return _tangent(call, moved, has, need_weights)
    results = []
    for some, other in zip(sequences(call), sequences(moved), strict=True):
        (made, rows), (moved_too, _) = padded(some), padded(other)
        out, lse, weights = _tangent(made, moved_too, has, need_weights)
        out, *rest = packed(rows, out, lse, weights)
        results.append((out, *rest))
    out, lse, weights = results[0] if len(results) == 1 else joined(results, call.max_seqlen_k)
    lse = lse.masked_fill(lse == float("-inf"), 0.0)  # of rows of no sequence
    return arrange(out, call.query), lse, weights
