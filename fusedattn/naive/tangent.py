"""The derivative of attention in one direction by its definition, a block of rows and keys at a time.

With tangents t of the inputs and weights p: t_s = (scale (t_q k + q t_k)) cap' + t_bias - t_slope distance,
t_lse = sum p t_s, t_p = p (t_s - t_lse), t_out = sum t_p v + p t_v = sum p (t_s v + t_v) - t_lse out.
The last form needs no sum of a row before the next one, so a block may have any of its keys. It takes exp(score) for a
weight where a forward has said that no row's sum of these is far from 1; else exp(score - any number near the largest
score of the row), and adds these up itself.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..call.layout import arrange, dense
from ..call.options import INPUTS, Call, wide_dtype
from . import formula, pairs
from .blocks import CACHE, ROWS, Block, Part, parts, uncut
from .formula import LARGEST_CAP, SMALLEST_CAP, grouped, without_autocast
from .inputs import prepared
from .varlen import joined, packed, padded, sequences

Given = Sequence[Tensor | None]  # tangents of the INPUTS of a call; None is zero


class Known(NamedTuple):
    """Of a forward: lse (B, Hq, Sq) less a number, and the output, unless it is rounded."""

    lse: Tensor | None = None
    less: float = 0.0
    out: Tensor | None = None
    total: Tensor | None = None  # (B, Hq, Sq, 1), sums of exp(score), where lse is near 0 in each row

    def of(self, where: tuple[slice, ...]) -> "Known":
        """Those of some rows."""
        lse, out, total = (None if x is None else x[where] for x in (self.lse, self.out, self.total))
        return Known(lse, self.less, out, total)

    def summed(self) -> "Known":
        """With sums of exp(score), if no such sum overflows or vanishes in a row that sees a key."""
        if self.lse is None or not self.lse.numel():
            return self
        lse, least = self.lse, self.lse.amin().item()
        if least == -math.inf:
            lse = lse.masked_fill(lse == least, -self.less)  # no key is seen: the sum is 1, to divide by
            least = lse.amin().item()
        if not (least >= self.less - NEAR and lse.amax().item() <= NEAR - self.less):
            return self
        total = lse.exp() if self.less == 0 else (lse + self.less).exp_()
        return self._replace(total=total[..., None])


# Rows of a block where each sees all keys: on a Xeon of 2 MiB L2, products of 1024 rows and 512 keys took a tenth less
# time than those of 256 rows and 1024 keys.
TALL = 1024
TIMES = 2  # CACHE, for each thread: with half of it two threads, which wait for each other, took a tenth longer
NEAR = 40.0  # how large the lse of a row may be of which exp(score) is taken
NOTHING = Known()


class _Operands(NamedTuple):
    """What some planes, or rows of them, are computed with."""

    part: Part
    moved: Call
    # Of scores: rows (B, Hq, Sq, D), as `grouped` has those of a block, and keys (.., Sk, D).
    factors: tuple[Tensor, Tensor]
    t_factors: tuple[tuple[Tensor, Tensor], ...]  # of their tangents, which are sums of products
    value: Tensor  # (B * Hkv, Sk, Dv)
    t_value: Tensor | None
    scratch: tuple[Tensor, Tensor]  # for scores of a block and for their tangents, if they fit there


def _operands(part: Part, moved: Call, has: Sequence[bool], scratch: tuple[Tensor, Tensor]) -> _Operands:
    """has: which of query, key and value have a tangent."""
    rows, t_rows = part.call.query, moved.query
    keys, t_keys, value, t_value = (x.flatten(0, 1) for x in (part.call.key, moved.key, part.call.value, moved.value))
    t_factors = [pair for pair, some in zip(((t_rows, keys), (rows, t_keys)), has, strict=False) if some]
    return _Operands(part, moved, (rows, keys), tuple(t_factors), value, t_value if has[2] else None, scratch)


def _of_rows(of: _Operands, block: Block) -> _Operands:
    def cut(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        rows, keys = pair
        return grouped(rows[:, :, block.first : block.last], of.part.call.key.shape[1]), keys

    return of._replace(factors=cut(of.factors), t_factors=tuple(map(cut, of.t_factors)))


def _products(
    of: _Operands, block: Block, shape: Sequence[int], number: int, *factors: tuple[Tensor, Tensor]
) -> Tensor:
    """(B, Hq, rows, keys): scaled sums of rows @ keys.T, of the keys of a block.

    number: of the scratch where they are put, for new memory costs a page fault for each of its pages.
    """
    width, scratch = block.end - block.begin, of.scratch[number]
    columns = of.factors[0].shape[:2]
    size = math.prod(columns) * width
    out = scratch[:size] if size <= scratch.numel() else scratch.new_empty(size)
    out = out.view(*columns, width)
    for n, (rows, keys) in enumerate(factors):
        out.baddbmm_(rows, keys[:, block.begin : block.end].mT, beta=min(n, 1), alpha=of.part.call.scale)
    return out.view(*shape[:3], width)


def _scores(of: _Operands, block: Block, shape: Sequence[int]) -> tuple[Tensor, Tensor | None]:
    """(scores, derivative of the cap or None) of a block, whose results have a shape (B, Hq, rows, any)."""
    call, slope = of.part.call, None
    scores = _products(of, block, shape, 0, of.factors)
    if call.softcap is not None and call.softcap <= LARGEST_CAP:
        slope = 1 - torch.tanh(scores / max(call.softcap, SMALLEST_CAP)) ** 2
    return formula.scored(scores, call.softcap, pairs.added(call, block, scores.dtype)), slope


def _weighed(of: _Operands, block: Block, shape: Sequence[int], pivot: Tensor | None) -> tuple[Tensor, Tensor]:
    """(weights of a block, each row times exp(pivot), and tangents of its scores); shape: as `_scores` has it."""
    scores, slope = _scores(of, block, shape)
    if pivot is not None:
        scores -= pivot
    # Hidden after, not before: of -inf the exponential took ten times as long (torch 2.13 with MKL).
    weights = pairs.hide(scores.exp_(), of.part.call, block)
    t_scores = _products(of, block, shape, 1, *of.t_factors) if of.t_factors else torch.zeros_like(weights)
    pairs.hide(t_scores, of.part.call, block)  # of a hidden key a product may be infinite
    if slope is not None:
        t_scores *= slope
    for term in pairs.added(of.moved, block, weights.dtype):
        t_scores += term
    if of.moved.bias is not None:
        t_scores.masked_fill_(weights == 0, 0.0)  # what is hidden may have any
    return weights, t_scores


class _Sums(NamedTuple):
    """What is added up over the keys of a row, of weights times exp(pivot)."""

    total: Tensor | None  # (B, Hq, rows, 1), of the weights, unless that is known
    t_lse: Tensor
    t_out: Tensor  # as `grouped` has it, of p (t_s v + t_v)
    out: Tensor | None  # of p v, unless that is known


def _add(of: _Operands, block: Block, pivot: Tensor | None, sums: _Sums, first: bool) -> None:
    """Add to sums what the keys of a block give its rows; first: t_out and out hold nothing yet."""
    weights, t_scores = _weighed(of, block, sums.t_lse.shape, pivot)
    if sums.total is not None:
        sums.total.add_(weights.sum(-1, keepdim=True))
    t_weights = t_scores.mul_(weights)
    sums.t_lse.add_(t_weights.sum(-1, keepdim=True))
    factor = pairs.factor(of.part.call, of.part.planes, block)
    if factor is not None:
        t_weights *= factor
        weights *= factor
    keys = slice(block.begin, block.end)
    weights, t_weights = (x.view(*sums.t_out.shape[:2], block.end - block.begin) for x in (weights, t_weights))
    old = 0 if first else 1
    sums.t_out.baddbmm_(t_weights, of.value[:, keys], beta=old)
    if of.t_value is not None:
        sums.t_out.baddbmm_(weights, of.t_value[:, keys])
    if sums.out is not None:
        sums.out.baddbmm_(weights, of.value[:, keys], beta=old)


def _finish(
    of: _Operands, sums: _Sums, pivot: Tensor | None, known: Known, result: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(tangent of lse, sum of the weights) of rows of which everything was added up; that of the output in result."""
    total, t_lse, t_out, own = sums
    of_sinks: Tensor | None = None
    if of.part.call.sinks is not None:
        sinks = of.part.call.sinks[:, :, None, None]
        of_sinks = (sinks if pivot is None else sinks - pivot).exp()
        if of.moved.sinks is not None:
            t_lse += of_sinks * of.moved.sinks[:, :, None, None]
    if total is None:
        assert known.total is not None
        total = known.total
    else:
        total = total if of_sinks is None else total + of_sinks
        total.masked_fill_(total == 0, 1.0)
    t_lse.div_(total)
    if result is not None:
        t_out, out = t_out.view(result.shape).div_(total), known.out
        if out is None:
            assert own is not None
            out = own.view(result.shape).div_(total)
        torch.addcmul(t_out, t_lse, out, value=-1, out=result)
    return t_lse, total


def _pivot(of: _Operands, block: Block) -> Tensor:
    """(B, Hq, rows, 1): the largest score of each row of a block, which has all of its keys; or its sink."""
    call = of.part.call
    pivot = of.value.new_full((*call.query.shape[:2], block.last - block.first, 1), float("-inf"))
    if block.begin < block.end:
        scores, seen = _scores(of, block, pivot.shape)[0], pairs.visible(call, block)
        pivot = (scores if seen is None else scores.masked_fill_(~seen, float("-inf"))).amax(-1, keepdim=True)
    return pivot if call.sinks is None else torch.maximum(pivot, call.sinks[:, :, None, None])


def _rows(
    of: _Operands, block: Block, known: Known, bytes_at_a_time: int, result: Tensor | None = None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """(tangent of lse, the pivot or None for 0, the sum of weights by it) of a block; that of its output in result."""
    of, lse = _of_rows(of, block), known.lse
    pivot: Tensor | None = None
    if known.total is None:
        pivot = _pivot(of, block) if lse is None else lse[..., None] + known.less
        pivot = pivot.masked_fill(pivot == float("-inf"), float("inf"))  # all weights of such a row are 0
    zeros, shape = of.value.new_zeros, (*of.factors[0].shape[:2], of.value.shape[2])
    made = zeros if block.begin == block.end else of.value.new_empty
    column = *of.part.call.query.shape[:2], block.last - block.first, 1
    sums = _Sums(
        None if known.total is not None else zeros(column),
        zeros(column),
        made(shape),
        made(shape) if known.out is None else None,
    )
    step = max(1, bytes_at_a_time // max(1, math.prod(column) * of.value.element_size()))
    for begin in range(block.begin, block.end, step):
        end = min(begin + step, block.end)
        _add(of, block._replace(begin=begin, end=end), pivot, sums, begin == block.begin)
    t_lse, total = _finish(of, sums, pivot, known, result)
    return t_lse, pivot, total


def _weights(of: _Operands, block: Block) -> Tensor:
    """The tangent of the weights of a block, which has all keys of its rows."""
    t_lse, pivot, total = _rows(of, block, NOTHING, formula.BUDGET)
    weights, t_scores = _weighed(_of_rows(of, block), block, t_lse.shape, pivot)
    t_weights = t_scores.sub_(t_lse).mul_(weights.div_(total))
    factor = pairs.factor(of.part.call, of.part.planes, block)
    return t_weights if factor is None else t_weights * factor


def _sizes(call: Call) -> tuple[int, int]:
    """(bytes of the scores of a block of rows with all keys, of those that are computed at a time)."""
    if call.query.device.type != "cpu":
        return formula.most(call), formula.most(call)
    # A plane for each thread: two threads that shared each product took half as long again.
    threads, rows = torch.get_num_threads(), min(TALL, call.query.shape[2])
    at_a_time = min(formula.BUDGET, TIMES * CACHE * threads)
    most = rows * threads * call.key.shape[2] * call.query.element_size()
    return max(at_a_time, min(formula.BUDGET, most)), at_a_time


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


def _tangent(call: Call, moved: Call, has: Sequence[bool], need_weights: bool, known: Known) -> tuple:
    """`tangent` of a call that is not packed; it may be padded."""
    made, moved = (prepared(x, wide_dtype(call)) for x in (call, moved))
    known = known.summed()
    t_out = dense(made.query, (*made.query.shape[:3], made.value.shape[3]))
    t_lse = made.query.new_empty(made.query.shape[:3])
    most, at_a_time = _sizes(made)
    fitting = at_a_time // made.query.element_size() if made.query.device.type == "cpu" else 0
    fitting = min(fitting, math.prod(made.query.shape[:3]) * made.key.shape[2])
    first, second = made.query.new_empty(2, fitting)  # one piece, which malloc sooner keeps: new pages cost a quarter
    # The same of both: their cuts depend on sizes alone.
    cut = (_placed(parts(x, most, ROWS, TALL)) for x in (made, moved))
    for (part, planes), (other, _) in zip(*cut, strict=True):
        of = _operands(part, other.call, has, (first, second))
        for block in part.blocks:
            where = *planes, slice(block.first, block.last)
            t_lse[where] = _rows(of, block, known.of(where), at_a_time, t_out[where])[0].squeeze(-1)
    if made.query_mask is not None:  # such a row has nothing of its sink either
        t_lse.masked_fill_(~made.query_mask[:, None], 0.0)
    weights = None
    if need_weights:
        of = _operands(uncut(made), moved, has, (first, second))
        weights = _weights(of, of.part.blocks[0]).to(call.query.dtype)
    return arrange(t_out, call.query), t_lse, weights


@without_autocast
def tangent(
    call: Call, given: Given, need_weights: bool, known: Known = NOTHING
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Tangents of (output, lse, weights or None) of a checked call, from those of its first fields.

    known: saves work. No derivative can be taken of it.
    """
    has = [x is not None for x in given[:3]]
    # Tangents in the place of the inputs, so that they are cut and padded alike. Without one, an attended tensor stays.
    fields: dict[str, Any] = dict(zip(INPUTS, given, strict=True))
    moved = call._replace(
        **fields | {name: getattr(call, name) for name in ("query", "key", "value") if fields[name] is None}
    )
    if call.cu_seqlens_q is None:
        exact = known.out is not None and known.out.dtype == wide_dtype(call)  # a rounded one does not cancel
        return _tangent(call, moved, has, need_weights, known if exact else known._replace(out=None))
    results = []
    for some, other in zip(sequences(call), sequences(moved), strict=True):
        (made, rows), (moved_too, _) = padded(some), padded(other)
        out, *rest = packed(rows, *_tangent(made, moved_too, has, need_weights, NOTHING))
        results.append((out, *rest))
    t_out, t_lse, weights = joined(results, 2, call.max_seqlen_k)
    t_lse = t_lse.masked_fill(t_lse == float("-inf"), 0.0)  # of rows of no sequence
    return arrange(t_out, call.query), t_lse, weights
