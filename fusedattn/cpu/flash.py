"""Attention of a Call by PyTorch's fused kernel for CPUs, forward and backward, a rectangle of scores at a time.

Source of the kernel: FlashAttention-2, arXiv:2307.08691; in PyTorch aten/src/ATen/native/cpu/FlashAttentionKernel.cpp.
Alone, the kernel's gradients miss the tolerance of `testing.tolerance`. Four measures mend that:

- bfloat16 rounds the output that the backward reads, and a mean shared by all values multiplies that error. So the
  forward saves the output of the values less their mean (`value_mean`).
- float32 exponentials have an error of 2**-20, which does not average out over few keys. Their gradients come from the
  exact formula (`small_k`).
- All weights of a row share the rounding error of its lse. An offset, subtracted from the scores, keeps the lse near 0.
- Both passes pad to the same number of columns. Otherwise they would round the same score differently.
"""

import math
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..call.layout import arrange, dense
from ..call.options import Call, diagonal, wide_dtype
from ..call.private import flash_attention_for_cpu_backward
from ..naive import pairs
from ..naive.blocks import Block
from .kernel import attend
from .merge import exact, merged, shares_of, wide_of
from .small_k import FEW, added_to_few, by_weights, lse_of, product, scores_of, weights_in_place, weights_of
from .tiling import Part, Rectangle, additive, has_holes, is_additive, is_nothing, is_widened, parts, rectangles
from .value_mean import INFINITE, centre, in_groups, to_heads, with_centre

SCORES = 2**25  # bytes of scores that the formula computes at a time for the gradient of a bias


class Result(NamedTuple):
    """Output, lse less the offset, and the output in the form that the backward takes."""

    out: Tensor
    lse: Tensor
    kept: Tensor  # in the dtype of the computation; in bfloat16 the output less the mean of the values
    less: float = 0.0  # the offset


def in_rows(x: Tensor) -> bool:
    """Return whether the kernel can read a tensor: contiguous columns, rows that do not overlap."""
    if x.is_contiguous():
        return True
    *sizes, columns = x.shape
    *strides, step = x.stride()
    return step == 1 and not any(n > 1 and 0 < stride < columns for n, stride in zip(sizes, strides, strict=True))


def _in_columns(x: Tensor, columns: int) -> Tensor:
    """Return a tensor that the kernel can read, padded with zeros to a number of columns."""
    x = x if x.shape[-1] == columns else pad(x, (0, columns - x.shape[-1]))  # keeps the order of dimensions
    return x if in_rows(x) else x.clone(memory_format=torch.contiguous_format)


def _hidden(mask: Tensor | None) -> Tensor:
    """Return the complement of a key_mask or query_mask, (1 or B, 1, S, 1)."""
    assert mask is not None
    return ~mask[:, None, :, None]


def _columns(call: Call) -> int:
    return max(call.query.shape[3], call.value.shape[3])


def _inputs(part: Part, columns: int) -> list[Tensor]:
    """Return [query, key, value] of a part in the kernel's layout, zero where key_mask or query_mask hides them."""
    call = part.call
    query, key, value = (_in_columns(x, columns) for x in call[:3])
    if has_holes(part):
        hidden = _hidden(call.key_mask)
        key, value = key.masked_fill(hidden, 0.0), value.masked_fill(hidden, 0.0)
    if call.query_mask is not None:
        query = query.masked_fill(_hidden(call.query_mask), 0.0)
    return [query, key, value]


def _of(where: Rectangle, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Cut the first tensor to the rows of a rectangle, the others to its keys."""
    query, *others = tensors
    if where.first or where.last < query.shape[2]:
        query = query[:, :, where.first : where.last]
    if where.begin or where.end < others[0].shape[2]:
        others = [x[:, :, where.begin : where.end] for x in others]
    return [query, *others]


def _wide(call: Call) -> Call:
    """Cast query, key and value to a dtype in which the kernel is fast."""
    if not is_widened(call.query.dtype):
        return call
    query, key, value = (x.float() for x in call[:3])
    return call._replace(query=query, key=key, value=value)


def offset(call: Call) -> float:
    """Return the offset subtracted from scores: the expected lse of scores of variance 1.

    It is the same for a call, for its `_wide` form, and under vmap.
    """
    seen = longest = call.key.shape[2]
    if call.cu_seqlens_k is not None:
        seen //= max(1, call.cu_seqlens_k.numel() - 1)
        longest = seen if call.max_seqlen_k is None else call.max_seqlen_k
    dtype = torch.float32 if is_widened(call.query.dtype) else call.query.dtype
    few = dtype == torch.float32 and longest <= FEW
    if dtype == torch.bfloat16 or few or call.key.shape[2] == 0 or is_additive(call):
        return 0.0
    if call.left is not None and call.right is not None:
        seen = min(seen, call.left + call.right + 1)
    return float(round(math.log(max(1, seen)) + 0.5))  # subtracting a whole number rounds large scores least


def mask(call: Call, where: Rectangle, less: float | Tensor) -> Tensor | None:
    """Return what the kernel adds to the scores of a rectangle, or None."""
    if where.masked:
        return additive(call, where, less)
    if is_nothing(less):
        return None
    batch, heads = call.query.shape[:2]
    size = batch, heads, where.last - where.first, where.end - where.begin
    return (-less if isinstance(less, Tensor) else call.query.new_full((1, 1, 1, 1), -less)).expand(size)


def _is_exact(where: Rectangle, query: Tensor) -> bool:
    return query.dtype == torch.float32 and where.end - where.begin <= FEW


def _are_alone(call: Call, some: list[Rectangle]) -> bool:
    """Return whether each rectangle holds all visible keys of its rows."""
    rows_of = [(where.first, where.last) for where in some]
    return call.sinks is None and not call.partial and len(set(rows_of)) == len(rows_of)


def _scores(call: Call, where: Rectangle, less: float | Tensor, query: Tensor, key: Tensor) -> Tensor:
    return scores_of(query, key, call.scale, added_to_few(call, where, less))


def _attend(
    call: Call, where: Rectangle, tensors: Sequence[Tensor], less: float | Tensor, alone: bool
) -> tuple[Tensor, Tensor]:
    """Return (output, lse less the offset) of a rectangle; lse is (B, H, S) with any strides.

    alone: the rows see no other keys, so no gradient is computed from the lse.
    """
    query, key, value = _of(where, tensors)
    if _is_exact(where, query) and not alone:
        scores = _scores(call, where, less, query, key)
        weights = weights_of(scores, where.masked)
        return product(weights, value), lse_of(scores, weights)
    added = mask(call, where, less)
    out, lse = attend(query, key, value, where.causal, added, call.scale)
    if where.masked and not lse.all():  # the kernel returns 0 for a row that sees nothing
        assert added is not None
        lse = lse.masked_fill((added == -INFINITE).all(-1), -INFINITE)
    return out, lse


def _in_blocks(where: Rectangle, call: Call) -> list[Rectangle]:
    """Cut a rectangle along its rows, so that the scores of a block take at most SCORES bytes."""
    batch, heads, _, _ = call.query.shape
    step = max(1, SCORES // (batch * heads * (where.end - where.begin) * call.query.element_size()))
    if where.causal:  # a later row would start at another key
        return [where]
    return [
        where._replace(first=first, last=min(first + step, where.last))
        for first in range(where.first, where.last, step)
    ]


def _differentiate(call: Call, where: Rectangle, less: float, tensors, grad_out, out, lse) -> Sequence[Tensor]:
    """Return the gradients of query, key and value of a rectangle, by the kernel."""
    added = mask(call, where, less)
    return flash_attention_for_cpu_backward(
        grad_out, *tensors, out, lse, 0.0, where.causal, attn_mask=added, scale=call.scale
    )


def _differentiate_exactly(call, where, less, tensors, grad_out, out, lse, of_bias) -> Sequence[Tensor]:
    """Return the same by the formula. lse is None if the rows see no other keys; out is None to recompute it."""
    scores = _scores(call, where, less, *tensors[:2])
    weights = weights_of(scores, where.masked)
    if lse is not None:
        weights *= (lse_of(scores, weights) - lse).exp_()[..., None]
    return by_weights(weights, call.scale, tensors, grad_out, out, of_bias)


def _of_sink(call: Call, dtype: torch.dtype, less: float) -> Tensor:
    """Return the sinks' scores less the offset, (1 or B, Hq, 1)."""
    assert call.sinks is not None
    return call.sinks.to(dtype)[:, :, None] - less


def _forward(part: Part, save: bool, less: float) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return (output, lse less the offset, output less the mean value, the mean value or None) of a part."""
    call, columns = part.call, part.call.value.shape[3]
    query, key, value = _inputs(part, _columns(call))
    out, lse = _of_all_rows(part, (query, key, value), less)
    common = centre(value[:, :, part.begin : part.end]) if save else None
    if common is None:
        return out, lse, out, None
    kept, _ = _of_all_rows(part, (query, key, value - common), less)
    if call.query_mask is not None:  # hidden rows must not influence the others
        hidden = _hidden(call.query_mask)
        out, lse = out.masked_fill(hidden, 0.0), lse.masked_fill(hidden[..., 0], -INFINITE)
    kept, common = with_centre(out, kept, lse, common[..., :columns])
    return out, lse, kept, to_heads(common, call.query.shape[1])


def _of_all_rows(part: Part, tensors: Sequence[Tensor], less: float) -> tuple[Tensor, Tensor]:
    """Return (output, lse less the offset) of a part."""
    call, columns = part.call, part.call.value.shape[3]
    some, rows = list(rectangles(part)), call.query.shape[2]
    all_alone = _are_alone(call, some)

    def attended(where: Rectangle, alone: bool) -> tuple[Tensor, Tensor]:
        out, lse = _attend(call, where, tensors, less, all_alone)
        if not alone or call.sinks is not None:
            lse = exact(call, lse, less, lambda near: _attend(call, where, tensors, near, all_alone)[1])
        return out[..., :columns], lse

    if len(some) == 1 and some[0].last - some[0].first == rows:
        return attended(some[0], True)
    out = dense(call.query, (*call.query.shape[:3], columns)).zero_()
    lse = out.new_full(out.shape[:3], -INFINITE, dtype=wide_of(out) if call.sinks is None else torch.float64)
    for (first, last), same_rows in groupby(some, key=lambda where: where[:2]):
        of_keys = list(same_rows)
        found = [attended(where, len(of_keys) == 1) for where in of_keys]
        out[:, :, first:last], lse[:, :, first:last] = found[0] if len(found) == 1 else merged(found)
    return out, lse


def _finished(call: Call, less: float, out: Tensor, lse: Tensor, kept: Tensor, common: Tensor | None) -> Result:
    """Apply query_mask and sinks, and return the Result."""
    if call.query_mask is not None:
        hidden = _hidden(call.query_mask)
        out, kept = (x.masked_fill(hidden, 0.0) for x in (out, kept))
        lse = lse.masked_fill(hidden[..., 0], -INFINITE)
    if call.sinks is not None:
        shares, total = shares_of((lse, _of_sink(call, torch.float64, less)))
        factor, total = shares[0, ..., None].to(wide_of(out)), total.to(wide_of(out))
        # Scale the whole output, then subtract the mean again.
        kept = kept if common is None else (kept + common.to(factor.dtype)) * factor - common
        out, lse = out * factor, total
    return Result(out, lse, kept if call.query.dtype == torch.bfloat16 and common is not None else out, less)


def at_once(call: Call) -> bool | None:
    """Return whether one causal kernel call computes all (True), one full call does (False), or neither (None)."""
    query, key, value = call[:3]
    rows, keys = query.shape[2], key.shape[2]
    if (
        not (call.bias is call.alibi_slopes is call.sinks is call.mask is call.key_mask is call.query_mask is None)
        or not (call.cu_seqlens_q is call.left is None)
        or call.partial
        or query.shape[3] != value.shape[3]
        or is_widened(query.dtype)
        or query.numel() == 0
        or keys == 0
        or not (in_rows(query) and in_rows(key) and in_rows(value))
    ):
        return None
    if call.right is None or (high := diagonal(call) + call.right) >= keys - 1:
        return False
    return True if high == 0 and rows <= keys and call.scale > 0 else None


def forward(call: Call, save: bool) -> Result:
    """Return output in the dtype and dimension order of query, and lse less the offset in float32 or float64.

    save: a backward follows. This changes no bit of output and lse.
    """
    causal = at_once(call)
    if causal is not None and not (save and call.value.dtype == torch.bfloat16):
        less, everything = offset(call), Rectangle(0, call.query.shape[2], 0, call.key.shape[2], causal)
        out, lse = attend(call.query, call.key, call.value, causal, mask(call, everything, less), call.scale)
        out = arrange(out, call.query)
        return Result(out, lse, out, less)
    like, call = call.query, _wide(call)
    split, less = parts(call), offset(call)
    if len(split) == 1 and split[0].call is call:
        out, lse, kept, _ = _finished(call, less, *_forward(split[0], save, less))
        out = arrange(out, like)
    else:
        out = dense(like, (*like.shape[:3], call.value.shape[3])).zero_()
        lse = out.new_full(out.shape[:3], -INFINITE, dtype=wide_of(out))
        if call.sinks is not None:
            lse = torch.maximum(lse, _of_sink(call, lse.dtype, less).detach())
        kept = torch.zeros_like(out, dtype=call.query.dtype) if save and like.dtype.itemsize == 2 else out
        for part in split:
            of_part = _finished(part.call, less, *_forward(part, save, less))
            part.of_rows(out).copy_(of_part.out)
            part.of_rows(lse).copy_(of_part.lse)
            if kept is not out:
                part.of_rows(kept).copy_(of_part.kept)
    return Result(out, lse, kept.to(call.query.dtype), less)


def _weights_of_rows(part: Part, some: Sequence[Rectangle], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the weights of the rectangles of one block of rows."""
    call = part.call

    def scores(where: Rectangle, less: float | Tensor) -> Tensor:
        return _scores(call, where, less, *_of(where, tensors)[:2])

    def found(where: Rectangle, less: float | Tensor) -> tuple[Tensor, Tensor]:
        of_rows = scores(where, less)
        weights = weights_of(of_rows, where.masked)
        return weights, lse_of(of_rows, weights)

    def lse_less_0(where: Rectangle, lse: Tensor) -> Tensor:
        return exact(call, lse, 0.0, lambda near: found(where, near)[1])

    if len(some) == 1 and call.sinks is None:
        return [weights_in_place(lambda: scores(some[0], 0.0), some[0].masked)]
    made = [found(where, 0.0) for where in some]
    lses = [lse_less_0(where, lse) for where, (_, lse) in zip(some, made, strict=True)]
    lses += [] if call.sinks is None else [_of_sink(call, torch.float64, 0.0)]
    shares = shares_of(lses)[0].to(tensors[0].dtype)
    return [weights * share[..., None] for (weights, _), share in zip(made, shares, strict=False)]


def weights(call: Call, columns: int) -> Tensor:
    """Return the weights (B, Hq, Sq, columns) of a call."""
    split, wide = parts(call), wide_dtype(call)
    if len(split) == 1 and split[0].call is call and call.query_mask is None:
        some = list(rectangles(split[0]))
        if len(some) == 1 and some[0][:4] == (0, call.query.shape[2], 0, columns):  # no zeros to fill in
            tensors = [x.to(wide) for x in _inputs(split[0], call.query.shape[3])]
            return _weights_of_rows(split[0], some, tensors)[0].to(call.query.dtype)
    whole = call.query.new_zeros(*call.query.shape[:3], columns)
    for part in split:
        tensors = [x.to(wide) for x in _inputs(part, call.query.shape[3])]
        of_part = part.of_rows(whole)
        for (first, last), same_rows in groupby(rectangles(part), key=lambda where: where[:2]):
            some = list(same_rows)
            for where, of_keys in zip(some, _weights_of_rows(part, some, tensors), strict=True):
                of_part[:, :, first:last, where.begin : where.end] = of_keys
    return whole if call.query_mask is None else whole.masked_fill_(_hidden(call.query_mask), 0.0)


class Incoming(NamedTuple):
    """Gradients of output and lse (either may be None), and the results of `forward`."""

    grad_out: Tensor | None
    grad_lse: Tensor | None
    out: Tensor
    kept: Tensor
    lse: Tensor


def _backward(part: Part, less: float, rows: Incoming, of_bias: Tensor | None) -> Sequence[Tensor]:
    """Return the gradients of query, key and value of a part; add that of its bias to of_bias."""
    call, columns = part.call, _columns(part.call)
    tensors = _inputs(part, columns)
    grad_out, grad_lse, out, kept, lse = rows
    common = None if grad_out is None else centre(tensors[2][:, :, part.begin : part.end])
    if common is not None:
        same = in_groups(kept == out.to(kept.dtype), common.shape[1]).all(3, keepdim=True).all(2, keepdim=True)
        tensors[2] = tensors[2] - common.masked_fill(same, 0.0)  # for these heads the whole output was saved
    some = list(rectangles(part))
    alone = _are_alone(call, some)
    if of_bias is not None:
        some = [piece for where in some for piece in _in_blocks(where, call)]
    whole = len(some) == 1 and some[0][:4] == (0, call.query.shape[2], 0, call.key.shape[2])
    totals = [] if whole else [x.new_zeros(x.shape, dtype=lse.dtype) for x in tensors]

    def add(grad_out, kept, tensors, wanted, by_output):
        grad_out, kept = _in_columns(grad_out, columns), _in_columns(kept, columns)
        for where in some:
            inputs = _of(where, tensors)
            of_out, out, total = (x[:, :, where.first : where.last] for x in (grad_out, kept, lse))
            if of_bias is not None or _is_exact(where, inputs[0]):
                out, total = out if by_output else None, None if alone else total
                bias = None if of_bias is None else pairs.cut(of_bias, Block(*where[:4]))
                grads = _differentiate_exactly(call, where, less, inputs, of_out, out, total, bias)
            else:
                grads = _differentiate(call, where, less, inputs, of_out, out, total)
            if not totals:
                totals.extend(grads)
                continue
            for total, grad in zip(_of(where, totals)[:wanted], grads, strict=False):
                total += grad

    if grad_out is not None:
        add(grad_out, kept, tensors, 3, not alone)
    if grad_lse is not None:
        # A score's gradient is weight * (grad_out @ value - sum(grad_out * out) + grad_lse). The term of grad_lse
        # equals a second call with values 0 and sum(grad_out * out) = -grad_lse.
        one = pad(torch.ones_like(kept[..., :1]), (0, columns - 1))
        add(one, one * -grad_lse[..., None].to(one.dtype), [*tensors[:2], torch.zeros_like(tensors[2])], 2, True)
        if grad_out is None:
            totals[2] = torch.zeros_like(totals[2])
    grads = zip(totals, call[:3], strict=True)
    return [grad if grad.shape == x.shape else arrange(grad[..., : x.shape[3]], x) for grad, x in grads]


def _of_sinks(call: Call, less: float, rows: Incoming, out: Tensor) -> Tensor:
    """Return the gradient of the sinks: the sum over rows of weight * (grad of lse - grad of output)."""
    missing = torch.zeros_like(rows.lse) if rows.grad_lse is None else rows.grad_lse
    missing = missing if rows.grad_out is None else missing - (rows.grad_out.to(rows.lse.dtype) * out).sum(-1)
    assert call.sinks is not None
    weight = (_of_sink(call, rows.lse.dtype, less) - rows.lse).exp_()
    return (weight * missing).sum(2).sum_to_size(call.sinks.shape).to(call.sinks.dtype)


def backward(
    call: Call,
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    out: Tensor,
    kept: Tensor,
    lse: Tensor,
    need_bias: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of query, key, value, bias and sinks, each in its dtype and contiguous.

    The gradients of the rectangles, each from the output and lse of its whole rows, are added.

    Args:
        grad_out, grad_lse: either may be None.
        out, kept, lse: results of `forward`.
        need_bias: compute the bias gradient; `small_k.has_bias_gradient` must hold. Otherwise it is None.
    """
    causal = at_once(call) if grad_lse is None and call.value.dtype != torch.bfloat16 else None
    if causal is not None and grad_out is not None:
        less, everything = offset(call), Rectangle(0, call.query.shape[2], 0, call.key.shape[2], causal)
        if not _is_exact(everything, call.query):
            incoming = _in_columns(grad_out, call.value.shape[3])
            of_query, of_key, of_value = _differentiate(call, everything, less, call[:3], incoming, out, lse)
            return of_query, of_key, of_value, None, None
    of_bias = None if call.bias is None or not need_bias else torch.zeros_like(call.bias, dtype=lse.dtype)
    inputs, call = call[:3], _wide(call)
    grad_out = None if grad_out is None else grad_out.to(kept.dtype)
    empty = lse == -INFINITE  # all weights are 0, so there is no gradient
    if call.query_mask is not None:
        hidden = _hidden(call.query_mask)
        grad_out = None if grad_out is None else grad_out.masked_fill(hidden, 0.0)
        grad_lse = None if grad_lse is None else grad_lse.masked_fill(hidden[..., 0], 0.0)
        empty = empty | hidden[..., 0]  # their lse is the sink's, so exp(score - lse) may overflow
    grad_lse = None if grad_lse is None else grad_lse.masked_fill(empty, 0.0)
    rows = Incoming(grad_out, grad_lse, out, kept, lse.masked_fill(empty, INFINITE))
    split, less = parts(call), offset(call)
    if len(split) == 1 and split[0].call is call and not (grad_out is grad_lse is None):
        grads = _backward(split[0], less, rows, of_bias)
    else:
        grads = [x.new_zeros(x.shape, dtype=lse.dtype) for x in call[:3]]
        for part in split if not (grad_out is grad_lse is None) else ():
            of_part = rows._replace(**{name: part.of_rows(x) for name, x in rows._asdict().items() if x is not None})
            views = part.of_rows(grads[0]), part.of_keys(grads[1]), part.of_keys(grads[2])
            for view, grad in zip(views, _backward(part, less, of_part, None), strict=True):
                view.copy_(grad)
    of_sinks = None if call.sinks is None else _of_sinks(call, less, rows, out)
    query, key, value = (grad.to(x.dtype) for grad, x in zip(grads, inputs, strict=True))
    return query, key, value, None if of_bias is None or call.bias is None else of_bias.to(call.bias.dtype), of_sinks
