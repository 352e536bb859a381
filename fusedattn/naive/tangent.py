"""The derivative of attention in one direction by its definition, a block of rows and keys at a time.

With tangents t of the inputs and weights p: t_s = (scale (t_q k + q t_k)) cap' + t_bias - t_slope distance,
t_lse = sum p t_s, t_p = p (t_s - t_lse), t_out = sum t_p v + p t_v = sum p (t_s v + t_v) - t_lse out.
The last form needs no sum of a row before the next one, so a block may have any of its keys. Of the softmax it needs
any number near the largest score of a row; it divides by the sum of what it has computed itself.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..call.form import DIFFERENTIABLE, Call
from ..call.layout import arrange, dense
from . import formula, pairs
from .blocks import CACHE, ROWS, Block, Part, parts, uncut
from .formula import LARGEST_CAP, SMALLEST_CAP, grouped, wide, without_autocast
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


class _Operands(NamedTuple):
    """What some planes, or rows of them, are computed with: scores are rows @ keys.T, tangents t_rows @ t_keys.T."""

    part: Part
    moved: Call
    rows: Tensor  # of planes (B, Hq, Sq, D), of a block as `grouped` has it
    t_rows: Tensor | None
    keys: Tensor  # (B * Hkv, Sk, D)
    t_keys: Tensor | None
    value: Tensor
    t_value: Tensor | None


def _operands(part: Part, moved: Call, has: Sequence[bool]) -> _Operands:
    """has: which of query, key and value have a tangent. t_q k + q t_k is one product, twice as wide."""
    call = part.call
    rows, (keys, value) = call.query * call.scale, (x.flatten(0, 1) for x in call[1:3])
    t_keys, t_value = (x.flatten(0, 1) for x in moved[1:3])
    left = [x for x, needed in zip((moved.query * call.scale, rows), has, strict=False) if needed]
    right = [x for x, needed in zip((keys, t_keys), has, strict=False) if needed]
    t_rows, t_both = (torch.cat(left, -1), torch.cat(right, -1)) if left else (None, None)
    return _Operands(part, moved, rows, t_rows, keys, t_both, value, t_value if has[2] else None)


def _of_rows(of: _Operands, block: Block) -> _Operands:
    """Those of a block of rows."""

    def cut(x: Tensor) -> Tensor:
        return grouped(x[:, :, block.first : block.last], of.part.call.key.shape[1])

    return of._replace(rows=cut(of.rows), t_rows=None if of.t_rows is None else cut(of.t_rows))


def _product(rows: Tensor, keys: Tensor, block: Block, shape: Sequence[int]) -> Tensor:
    """(B, Hq, rows, keys), of the keys of a block."""
    return torch.bmm(rows, keys[:, block.begin : block.end].mT).view(*shape[:3], block.end - block.begin)


def _scores(of: _Operands, block: Block, shape: Sequence[int]) -> tuple[Tensor, Tensor | None]:
    """(scores, derivative of the cap or None) of a block, whose results have a shape (B, Hq, rows, any)."""
    call, scores, slope = of.part.call, _product(of.rows, of.keys, block, shape), None
    if call.softcap is not None and call.softcap <= LARGEST_CAP:
        slope = 1 - torch.tanh(scores / max(call.softcap, SMALLEST_CAP)) ** 2
    return formula.scored(scores, call.softcap, pairs.added(call, block, scores.dtype)), slope


def _weighed(of: _Operands, block: Block, pivot: Tensor) -> tuple[Tensor, Tensor]:
    """(weights of a block, each row times a number of its own, and tangents of its scores)."""
    scores, slope = _scores(of, block, pivot.shape)
    # Hidden after, not before: of -inf the exponential took ten times as long (torch 2.13 with MKL).
    weights = pairs.hide(scores.sub_(pivot).exp_(), of.part.call, block)
    if of.t_rows is None or of.t_keys is None:
        t_scores = torch.zeros_like(weights)
    else:
        t_scores = _product(of.t_rows, of.t_keys, block, pivot.shape)
    if slope is not None:
        t_scores *= slope
    for term in pairs.added(of.moved, block, weights.dtype):
        t_scores += term
    if of.moved.bias is not None:
        t_scores.masked_fill_(weights == 0, 0.0)  # what is hidden may have any
    return weights, t_scores


class _Sums(NamedTuple):
    """What is added up over the keys of a row, of weights times a number of its own."""

    total: Tensor  # (B, Hq, rows, 1), of the weights
    t_lse: Tensor
    t_out: Tensor  # as `grouped` has it, of p (t_s v + t_v)
    out: Tensor | None  # of p v, unless that is known


def _add(of: _Operands, block: Block, pivot: Tensor, sums: _Sums) -> None:
    """Add to sums what the keys of a block give its rows."""
    weights, t_scores = _weighed(of, block, pivot)
    sums.total.add_(weights.sum(-1, keepdim=True))
    t_weights = t_scores.mul_(weights)
    sums.t_lse.add_(t_weights.sum(-1, keepdim=True))
    factor = pairs.factor(of.part.call, of.part.planes, block)
    if factor is not None:
        t_weights *= factor
        weights *= factor
    keys = slice(block.begin, block.end)
    weights, t_weights = (x.view(*sums.t_out.shape[:2], -1) for x in (weights, t_weights))
    sums.t_out.baddbmm_(t_weights, of.value[:, keys])
    if of.t_value is not None:
        sums.t_out.baddbmm_(weights, of.t_value[:, keys])
    if sums.out is not None:
        sums.out.baddbmm_(weights, of.value[:, keys])


def _finish(of: _Operands, sums: _Sums, pivot: Tensor, out: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """(tangents of output and lse, sum of the weights) of rows of which everything was added up."""
    total, t_lse, t_out, own = sums
    if of.part.call.sinks is not None:
        of_sinks = (of.part.call.sinks[:, :, None, None] - pivot).exp_()
        total += of_sinks
        if of.moved.sinks is not None:
            t_lse += of_sinks * of.moved.sinks[:, :, None, None]
    total.masked_fill_(total == 0, 1.0)
    t_lse, t_out = t_lse.div_(total), t_out.view(*total.shape[:3], -1).div_(total)
    if out is None:
        assert own is not None
        out = own.view_as(t_out).div_(total)
    return t_out.addcmul_(t_lse, out, value=-1), t_lse, total


def _pivot(of: _Operands, block: Block) -> Tensor:
    """(B, Hq, rows, 1): the largest score of each row of a block, which has all of its keys; or its sink."""
    call = of.part.call
    pivot = of.rows.new_full((*call.query.shape[:2], block.last - block.first, 1), float("-inf"))
    if block.begin < block.end:
        scores, seen = _scores(of, block, pivot.shape)[0], pairs.visible(call, block)
        pivot = (scores if seen is None else scores.masked_fill_(~seen, float("-inf"))).amax(-1, keepdim=True)
    return pivot if call.sinks is None else torch.maximum(pivot, call.sinks[:, :, None, None])


def _rows(
    of: _Operands, block: Block, known: Sequence[Tensor | None], bytes_at_a_time: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(tangents of output and lse, the pivot, the sum of weights by it) of a block; known: its lse and out, or None."""
    lse, out = known
    of = _of_rows(of, block)
    pivot = _pivot(of, block) if lse is None else lse[..., None]
    pivot = pivot.masked_fill(pivot == float("-inf"), float("inf"))  # all weights of such a row are 0
    zeros, shape = of.rows.new_zeros, (*of.rows.shape[:2], of.value.shape[2])
    sums = _Sums(zeros(pivot.shape), zeros(pivot.shape), zeros(shape), zeros(shape) if out is None else None)
    step = max(1, bytes_at_a_time // max(1, pivot.numel() * pivot.element_size()))
    for begin in range(block.begin, block.end, step):
        _add(of, block._replace(begin=begin, end=min(begin + step, block.end)), pivot, sums)
    t_out, t_lse, total = _finish(of, sums, pivot, out)
    return t_out, t_lse, pivot, total


def _weights(of: _Operands, block: Block) -> Tensor:
    """The tangent of the weights of a block, which has all keys of its rows."""
    _, t_lse, pivot, total = _rows(of, block, (None, None), formula.BUDGET)
    weights, t_scores = _weighed(_of_rows(of, block), block, pivot)
    t_weights = t_scores.sub_(t_lse).mul_(weights.div_(total))
    factor = pairs.factor(of.part.call, of.part.planes, block)
    return t_weights if factor is None else t_weights * factor


def _sizes(call: Call) -> tuple[int, int]:
    """(bytes of the scores of a block of rows with all keys, of those that are computed at a time)."""
    if call.query.device.type != "cpu":
        return formula.most(call), formula.most(call)
    # Two tensors of a mebibyte a thread are in work. On a Xeon of 2 MiB L2, float32, D 64, S 2048, blocks of 256 rows
    # and 1024 keys took 2.8 times as long as PyTorch's fused forward, all keys of 64 or of 256 rows 3.1 to 3.5 times;
    # two threads that shared each product took half as long again as with a plane for each.
    threads = torch.get_num_threads()
    at_a_time = CACHE // 2 * threads
    return max(at_a_time, ROWS * threads * call.key.shape[2] * call.query.element_size()), at_a_time


def _placed(rows: list[list[Part]]) -> Iterator[tuple[Part, tuple[slice, slice]]]:
    """(part, which batches and heads it has) of the parts of a call."""
    batch = 0
    for row in rows:
        head = 0
        for part in row:
            batches, heads = part.call.query.shape[:2]
            yield part, (slice(batch, batch + batches), slice(head, head + heads))
            head += heads
        batch += batches


def _tangent(call: Call, moved: Call, has: Sequence[bool], need_weights: bool, known: Sequence[Tensor | None]) -> tuple:
    """`tangent` of a call that is not packed; it may be padded."""
    made, moved = (prepared(x, wide(call)) for x in (call, moved))
    t_out = dense(made.query, (*made.query.shape[:3], made.value.shape[3]))
    t_lse = made.query.new_empty(made.query.shape[:3])
    most, at_a_time = _sizes(made)
    # The same of both: their cuts depend on sizes alone.
    for (part, planes), (other, _) in zip(*(_placed(parts(x, most, ROWS)) for x in (made, moved)), strict=True):
        of = _operands(part, other.call, has)
        for block in part.blocks:
            where = *planes, slice(block.first, block.last)
            known_here = [None if x is None else x[where] for x in known]
            t_out[where], lse, *_ = _rows(of, block, known_here, at_a_time)
            t_lse[where] = lse.squeeze(-1)
    if made.query_mask is not None:  # such a row has nothing of its sink either
        t_lse.masked_fill_(~made.query_mask[:, None], 0.0)
    weights = None
    if need_weights:
        of = _operands(uncut(made), moved, has)
        weights = _weights(of, of.part.blocks[0]).to(call.query.dtype)
    return arrange(t_out, call.query), t_lse, weights


@without_autocast
def tangent(
    call: Call, given: Given, need_weights: bool, out: Tensor | None = None, lse: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Tangents of (output, lse, weights or None) of a checked call, from those of its first fields.

    out, lse: of the forward, if they are known, each lse with an error of a few; they save work. No derivative can be
    taken of it.
    """
    assert len(given) == DIFFERENTIABLE
    has, moved = [x is not None for x in given[:3]], _moved(call, given)
    if call.cu_seqlens_q is None:
        exact = out is not None and out.dtype == wide(call)  # a rounded one does not cancel
        return _tangent(call, moved, has, need_weights, (lse, out if exact else None))
    results = []
    for some, other in zip(sequences(call), sequences(moved), strict=True):
        (made, rows), (moved_too, _) = padded(some), padded(other)
        out, *rest = packed(rows, *_tangent(made, moved_too, has, need_weights, (None, None)))
        results.append((out, *rest))
    t_out, t_lse, weights = results[0] if len(results) == 1 else joined(results, call.max_seqlen_k)
    t_lse = t_lse.masked_fill(t_lse == float("-inf"), 0.0)  # of rows of no sequence
    return arrange(t_out, call.query), t_lse, weights
