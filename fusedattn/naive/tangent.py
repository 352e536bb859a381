"""Forward-mode derivatives of attention, a block of rows at a time.

With scores s, weights p, tangents t_x of x, and the derivative cap' of the softcap: t_lse = sum p t_s, t_out = sum
t_p v + p t_v, with t_p = p (t_s - t_lse) and t_s = scale (t_q k + q t_k) cap' + t_bias - t_slope distance.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..call.layout import arrange
from ..call.options import INPUTS, Call
from . import formula, pairs
from .blocks import ROWS, Block, parts, whole_block
from .formula import LARGEST_CAP, SMALLEST_CAP, by_part, by_sequence, grouped, without_autocast
from .pairs import prepared


def _products(out: Tensor, scale: float, factors: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Write to `out` (B, Hq, Sq, Sk) the sum of scale * rows @ keys.T over all (rows, keys) in `factors`."""
    if not factors:
        return out.zero_()
    for number, (rows, keys) in enumerate(factors):
        products = grouped(out, keys.shape[1])
        products.baddbmm_(grouped(rows, keys.shape[1]), keys.flatten(0, 1).mT, beta=min(number, 1), alpha=scale)
    return out


def _of_block(
    call: Call, moved: Call, has: Sequence[bool], block: Block, memory: Tensor, need_weights: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the tangents of (output, lse, weights or None) of a block."""
    # moved: the Call with tangents as INPUTS. has: whether query, key and value have one. memory: (2, n), for scores.
    first, last, begin, end = block
    query, t_query = (x.query[:, :, first:last] for x in (call, moved))
    key, value, t_key, t_value = (x[:, :, begin:end] for x in (call.key, call.value, moved.key, moved.value))
    shape = *query.shape[:3], end - begin
    scores, t_scores = (x[: math.prod(shape)].view(shape) for x in memory)
    scores = formula.scored(_products(scores, call.scale, [(query, key)]), call.softcap, ())
    factors = [pair for pair, some in zip(((t_query, key), (query, t_key)), has, strict=False) if some]
    t_scores = _products(t_scores, call.scale, factors)
    if call.softcap is not None and call.softcap <= LARGEST_CAP:
        t_scores *= 1 - (scores / max(call.softcap, SMALLEST_CAP)) ** 2
    for terms, total in ((call, scores), (moved, t_scores)):
        for term in pairs.added(terms, block, scores.dtype):
            total += term
    hidden = formula.hiding(call, block, call.query.device.type == "cpu")
    # Products of hidden keys may be infinite, and the tangent of a hidden bias may be anything.
    if (visible := hidden.get("visible")) is not None:
        t_scores.masked_fill_(~visible, 0.0)
    for columns, where in hidden.get("limits", ()):
        t_scores[..., columns].masked_fill_(where, 0.0)
    weights, lse = formula.softmax(scores, moved.sinks is not None, sinks=call.sinks, in_place=True, **hidden)
    t_weights = t_scores.mul_(weights)
    t_lse = t_weights.sum(-1)
    if moved.sinks is not None and call.sinks is not None:
        lse = lse.masked_fill(lse == -math.inf, math.inf)
        t_lse += (call.sinks[:, :, None] - lse).exp_() * moved.sinks[:, :, None]
    t_weights.addcmul_(weights, t_lse[..., None], value=-1)
    if (factor := pairs.factor(call, block)) is not None:
        t_weights *= factor
        weights = weights * factor
    t_out = formula.sums_of(t_weights, value)
    if has[2]:
        t_out += formula.sums_of(weights, t_value)
    return t_out, t_lse, t_weights if need_weights else None


def _tangent(call: Call, moved: Call, has: Sequence[bool], need_weights: bool) -> tuple:
    """Return `tangent` of a call that is not packed, or of a padded one. moved: the Call with tangents as INPUTS."""
    wide, moved = (prepared(x) for x in (call, moved))
    # Give each thread at least ROWS rows: products of fewer rows took a quarter longer with 12288 keys.
    row_bytes = wide.key.shape[2] * wide.query.element_size()
    limit = max(formula.most(wide), min(formula.BUDGET, ROWS * row_bytes * torch.get_num_threads()))
    # Both calls are cut alike, since cuts depend on sizes only.
    cut = [([[x]], [whole_block(x)]) if need_weights else parts(x, limit) for x in (wide, moved)]
    calls, blocks = cut[0]
    largest = max((last - first) * (end - begin) for first, last, begin, end in blocks)
    # Allocate once for all blocks: new memory pages took a quarter of the time.
    memory = wide.query.new_empty(2, largest * math.prod(calls[0][0].query.shape[:2]))
    t_out, t_lse, weights = by_part(
        lambda part, other, block: _of_block(part, other, has, block, memory, need_weights), *cut
    )
    if wide.query_mask is not None:  # the lse of a hidden row is its sink, but has no tangent
        t_lse.masked_fill_(~wide.query_mask[:, None], 0.0)
    return arrange(t_out, call.query), t_lse, None if weights is None else weights.to(call.query.dtype)


@without_autocast
def tangent(
    call: Call, directions: Sequence[Tensor | None], need_weights: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the tangents of (output, lse, weights or None) from the tangents of a call's INPUTS; None is zero."""
    # As fields of a Call, tangents are cut and padded like inputs. Query, key and value replace their missing tangents.
    fields: dict[str, Any] = dict(zip(INPUTS, directions, strict=True))
    has = [fields[name] is not None for name in ("query", "key", "value")]
    fields |= {name: getattr(call, name) for name in ("query", "key", "value") if fields[name] is None}
    moved = call._replace(**fields)
    t_out, t_lse, weights = by_sequence(lambda one, other: _tangent(one, other, has, need_weights), call, moved)
    if call.cu_seqlens_q is not None:
        t_lse = t_lse.masked_fill(t_lse == -math.inf, 0.0)  # rows outside all sequences
    return t_out, t_lse, weights
