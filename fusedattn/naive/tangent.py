"""Forward-mode derivatives of attention, a block of rows and keys at a time.

With tangents t of the inputs and weights p: t_s = (scale (t_q k + q t_k)) cap' + t_bias - t_slope distance,
t_lse = sum p t_s, t_p = p (t_s - t_lse), t_out = sum t_p v + p t_v = sum p (t_s v + t_v) - t_lse out.
The last form needs one pass over the keys. Its weights are exp(score) if a forward has shown that their sums neither
overflow nor vanish. Otherwise they are exp(score - pivot), with a pivot near the row max, and are summed here.
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
    """Results of a forward: lse (B, Hq, Sq) minus a number `less`, and the output if it is not rounded."""

    lse: Tensor | None = None
    less: float = 0.0
    out: Tensor | None = None
    total: Tensor | None = None  # (B, Hq, Sq, 1), sums of exp(score), if lse is near 0 in each row

    def of(self, where: tuple[slice, ...]) -> "Known":
        lse, out, total = (None if x is None else x[where] for x in (self.lse, self.out, self.total))
        return Known(lse, self.less, out, total)

    def summed(self) -> "Known":
        """Return this with sums of exp(score), unless one overflows or vanishes in a row that sees a key."""
        if self.lse is None or not self.lse.numel():
            return self
        lse, least = self.lse, self.lse.amin().item()
        if least == -math.inf:
            lse = lse.masked_fill(lse == least, -self.less)  # rows that see nothing get the sum 1
            least = lse.amin().item()
        if not (least >= self.less - NEAR and lse.amax().item() <= NEAR - self.less):
            return self
        total = lse.exp() if self.less == 0 else (lse + self.less).exp_()
        return self._replace(total=total[..., None])


# Rows of a block in which all rows see all keys. On a Xeon with 2 MiB L2, products of 1024 rows and 512 keys took a
# tenth less time than those of 256 rows and 1024 keys.
TALL = 1024
TIMES = 2  # multiple of CACHE per thread; with 1, two threads took a tenth longer
NEAR = 40.0  # largest lse of a row for which weights are exp(score)
NOTHING = Known()


class _Operands(NamedTuple):
    """Tensors of some planes, or of some rows of them."""

    part: Part
    moved: Call
    factors: tuple[Tensor, Tensor]  # of scores: rows (B, Hq, Sq, D), in a block as in `grouped`, and keys (.., Sk, D)
    t_factors: tuple[tuple[Tensor, Tensor], ...]  # of the tangent of scores, a sum of products
    value: Tensor  # (B * Hkv, Sk, Dv)
    t_value: Tensor | None
    scratch: tuple[Tensor, Tensor]  # memory for scores and their tangents, if they fit


def _operands(part: Part, moved: Call, has: Sequence[bool], scratch: tuple[Tensor, Tensor]) -> _Operands:
    """Return the operands of a part. has: whether query, key and value have a tangent."""
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
    """Return scaled sums of rows @ keys.T for a block, (B, Hq, rows, keys).

    number: the scratch to write to. New memory would cost a fault for each page.
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
    """Return (scores, derivative of the softcap or None) of a block. shape: (B, Hq, rows, any)."""
    call, slope = of.part.call, None
    scores = _products(of, block, shape, 0, of.factors)
    if call.softcap is not None and call.softcap <= LARGEST_CAP:
        slope = 1 - torch.tanh(scores / max(call.softcap, SMALLEST_CAP)) ** 2
    return formula.scored(scores, call.softcap, pairs.added(call, block, scores.dtype)), slope


def _weighed(of: _Operands, block: Block, shape: Sequence[int], pivot: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return (exp(score - pivot) of a block, 0 for hidden pairs; tangents of its scores)."""
    scores, slope = _scores(of, block, shape)
    if pivot is not None:
        scores -= pivot
    # Hidden after the exponential: that of -inf took ten times as long (torch 2.13 with MKL).
    weights = pairs.hide(scores.exp_(), of.part.call, block)
    t_scores = _products(of, block, shape, 1, *of.t_factors) if of.t_factors else torch.zeros_like(weights)
    pairs.hide(t_scores, of.part.call, block)  # products of hidden keys may be infinite
    if slope is not None:
        t_scores *= slope
    for term in pairs.added(of.moved, block, weights.dtype):
        t_scores += term
    if of.moved.bias is not None:
        t_scores.masked_fill_(weights == 0, 0.0)  # a hidden bias may have any tangent
    return weights, t_scores


class _Sums(NamedTuple):
    """Sums over the keys of a row, with weights that are not normalised."""

    total: Tensor | None  # (B, Hq, rows, 1), of the weights; None if known
    t_lse: Tensor
    t_out: Tensor  # of p (t_s v + t_v), in the shape of `grouped`
    out: Tensor | None  # of p v; None if known


def _add(of: _Operands, block: Block, pivot: Tensor | None, sums: _Sums, first: bool) -> None:
    """Add the keys of a block to the sums of its rows. first: overwrite t_out and out."""
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
    """Return (tangent of lse, sum of the weights) from complete sums. Write the tangent of the output to `result`."""
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
    """Return the row max of a block with all keys, sinks included, (B, Hq, rows, 1)."""
    call = of.part.call
    pivot = of.value.new_full((*call.query.shape[:2], block.last - block.first, 1), float("-inf"))
    if block.begin < block.end:
        scores, seen = _scores(of, block, pivot.shape)[0], pairs.visible(call, block)
        pivot = (scores if seen is None else scores.masked_fill_(~seen, float("-inf"))).amax(-1, keepdim=True)
    return pivot if call.sinks is None else torch.maximum(pivot, call.sinks[:, :, None, None])


def _rows(
    of: _Operands, block: Block, known: Known, bytes_at_a_time: int, result: Tensor | None = None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return (tangent of lse, pivot or None for 0, sum of weights). Write the tangent of the output to `result`."""
    of, lse = _of_rows(of, block), known.lse
    pivot: Tensor | None = None
    if known.total is None:
        pivot = _pivot(of, block) if lse is None else lse[..., None] + known.less
        pivot = pivot.masked_fill(pivot == float("-inf"), float("inf"))  # makes all weights of the row 0
    zeros, shape = of.value.new_zeros, (*of.factors[0].shape[:2], of.value.shape[2])
    new = zeros if block.begin == block.end else of.value.new_empty
    column = *of.part.call.query.shape[:2], block.last - block.first, 1
    sums = _Sums(
        None if known.total is not None else zeros(column),
        zeros(column),
        new(shape),
        new(shape) if known.out is None else None,
    )
    step = max(1, bytes_at_a_time // max(1, math.prod(column) * of.value.element_size()))
    for begin in range(block.begin, block.end, step):
        end = min(begin + step, block.end)
        _add(of, block._replace(begin=begin, end=end), pivot, sums, begin == block.begin)
    t_lse, total = _finish(of, sums, pivot, known, result)
    return t_lse, pivot, total


def _weights(of: _Operands, block: Block) -> Tensor:
    """Return the tangent of the weights of a block with all keys."""
    t_lse, pivot, total = _rows(of, block, NOTHING, formula.BUDGET)
    weights, t_scores = _weighed(_of_rows(of, block), block, t_lse.shape, pivot)
    t_weights = t_scores.sub_(t_lse).mul_(weights.div_(total))
    factor = pairs.factor(of.part.call, of.part.planes, block)
    return t_weights if factor is None else t_weights * factor


def _sizes(call: Call) -> tuple[int, int]:
    """Return the largest bytes of scores (of a block of rows with all keys, at a time)."""
    if call.query.device.type != "cpu":
        return formula.most(call), formula.most(call)
    # A plane for each thread: two threads that share each product took half as long again.
    threads, rows = torch.get_num_threads(), min(TALL, call.query.shape[2])
    at_a_time = min(formula.BUDGET, TIMES * CACHE * threads)
    most = rows * threads * call.key.shape[2] * call.query.element_size()
    return max(at_a_time, min(formula.BUDGET, most)), at_a_time


def _placed(rows: list[list[Part]]) -> Iterator[tuple[Part, tuple[slice, slice]]]:
    """Yield (part, its batches and heads) for the parts of a call."""
    batch = 0
    for row in rows:
        head = 0
        for part in row:
            batches, heads = part.call.query.shape[:2]
            yield part, (slice(batch, batch + batches), slice(head, head + heads))
            head += heads
        batch += batches


def _tangent(call: Call, moved: Call, has: Sequence[bool], need_weights: bool, known: Known) -> tuple:
    """Return `tangent` of a call that is not packed; it may be padded."""
    wide, moved = (prepared(x, wide_dtype(call)) for x in (call, moved))
    known = known.summed()
    t_out = dense(wide.query, (*wide.query.shape[:3], wide.value.shape[3]))
    t_lse = wide.query.new_empty(wide.query.shape[:3])
    most, at_a_time = _sizes(wide)
    fitting = at_a_time // wide.query.element_size() if wide.query.device.type == "cpu" else 0
    fitting = min(fitting, math.prod(wide.query.shape[:3]) * wide.key.shape[2])
    first, second = wide.query.new_empty(2, fitting)  # one tensor, which malloc tends to keep: new pages cost a quarter
    # Both are cut alike, since cuts depend on sizes only.
    cut = (_placed(parts(x, most, ROWS, TALL)) for x in (wide, moved))
    for (part, planes), (other, _) in zip(*cut, strict=True):
        of = _operands(part, other.call, has, (first, second))
        for block in part.blocks:
            where = *planes, slice(block.first, block.last)
            t_lse[where] = _rows(of, block, known.of(where), at_a_time, t_out[where])[0].squeeze(-1)
    if wide.query_mask is not None:  # hidden rows have no tangent of their sink either
        t_lse.masked_fill_(~wide.query_mask[:, None], 0.0)
    weights = None
    if need_weights:
        of = _operands(uncut(wide), moved, has, (first, second))
        weights = _weights(of, of.part.blocks[0]).to(call.query.dtype)
    return arrange(t_out, call.query), t_lse, weights


@without_autocast
def tangent(
    call: Call, given: Given, need_weights: bool, known: Known = NOTHING
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return tangents of (output, lse, weights or None) of a checked call. It cannot be differentiated.

    given: tangents of the INPUTS. known: results of the forward, which save work.
    """
    has = [x is not None for x in given[:3]]
    # A call of the tangents is cut and padded as the call itself is. Without a tangent, query, key and value stay.
    fields: dict[str, Any] = dict(zip(INPUTS, given, strict=True))
    moved = call._replace(
        **fields | {name: getattr(call, name) for name in ("query", "key", "value") if fields[name] is None}
    )
    if call.cu_seqlens_q is None:
        exact = known.out is not None and known.out.dtype == wide_dtype(
            call
        )  # errors of a rounded output would not cancel
        return _tangent(call, moved, has, need_weights, known if exact else known._replace(out=None))
    results = []
    for part, other in zip(sequences(call), sequences(moved), strict=True):
        (batch, rows), (moved_batch, _) = padded(part), padded(other)
        results.append(packed(rows, *_tangent(batch, moved_batch, has, need_weights, NOTHING)))
    t_out, t_lse, weights = joined(results, 2, call.max_seqlen_k)
    t_lse = t_lse.masked_fill(t_lse == float("-inf"), 0.0)  # rows outside all sequences
    return arrange(t_out, call.query), t_lse, weights
