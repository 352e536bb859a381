"""Computes the forward of a Call by PyTorch's fused CPU kernel, one rectangle of scores at a time.

Source of the kernel: FlashAttention-2, arXiv:2307.08691; in PyTorch aten/src/ATen/native/cpu/FlashAttentionKernel.cpp.
The kernel's own gradients miss the tolerance of `testing.tolerance`. Five measures correct that:

- bfloat16 rounds the output that the backward reads, and a mean shared by all values multiplies that error. So the
  forward saves the output of the values minus their mean (`value_mean`).
- float32 exponentials have an error of 2**-20, which does not average out over few keys. The forward and the backward
  round scores differently, which does not average out over few rows. The exact formula (`small_k`) serves both cases.
- All weights of a row share the rounding error of its lse. Subtracting an offset (`less`) from scores keeps it small.
- Both passes pad to the same number of columns. Otherwise they would round the same score differently.
- Both get a power of two as scale; the query is multiplied by the rest. They would round other scales differently.
"""

import functools
import math
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..call.layout import arrange, dense
from ..call.options import Call, diagonal, sizes, wide_dtype
from ..call.private import flash_attention_for_cpu
from ..naive.formula import repeated, sums_of
from ..naive.pairs import cast
from . import tiling
from .small_k import FEW, FEW_ROWS, has_nan, is_few, lse_of, scores_of, weights_of
from .tiling import Part, Rectangle, additive, has_holes, is_additive, is_nothing, is_short, is_widened
from .value_mean import INFINITE, centre, with_centre

SMALL = 2.0**20  # norm of tensors whose products are far from an overflow
VECTOR = 16  # float32 numbers in the widest vector register
LARGE_LSE = {torch.bfloat16: 2.0**13}  # lse above which float32 is too inaccurate for merging; 16 for other dtypes


class Result(NamedTuple):
    """Result of the forward: output, lse minus the offset, and `kept`, the output in the form the backward needs."""

    out: Tensor
    lse: Tensor
    kept: Tensor  # the output in the dtype of the computation; in bfloat16 minus the mean of the values
    less: float = 0.0  # the offset: a number subtracted from all scores


def by_power(query: Tensor, scale: float) -> tuple[Tensor, float, float]:
    """Split scale: return (query * factor, power of two, factor), or (query, scale, 1) in bfloat16 or if it is huge."""
    factor, exponent = math.frexp(scale)
    if abs(factor) in (0.0, 0.5) or exponent > 127 or query.dtype == torch.bfloat16:
        return query, scale, 1.0
    return query * factor, 2.0**exponent, factor


def attend(
    query: Tensor, key: Tensor, value: Tensor, where: Rectangle, added: Tensor | None, scale: float, exact: bool
) -> tuple[Tensor, Tensor]:
    """Return (output, lse) of a rectangle by PyTorch's kernel. added: the tensor to add to its scores, or None."""
    # exact: the formula computes the gradients (`is_exact`). The scale may then be any number, not a power of two.
    if not exact:
        query, scale, _ = by_power(query, scale)
    out, lse = flash_attention_for_cpu(query, key, value, 0.0, where.causal, attn_mask=added, scale=scale)
    if added is None and key.shape[2] < VECTOR and not bool(lse.all()):
        # The kernel may have ignored a NaN and returned an lse of 0. With an added tensor it checks every score.
        zeros = query.new_zeros((1, 1, 1, 1)).expand(*query.shape[:3], key.shape[2])
        out, lse = flash_attention_for_cpu(query, key, value, 0.0, where.causal, attn_mask=zeros, scale=scale)
    if where.masked and not bool((lse.abs() > 0).all()):
        # For a row that sees nothing the kernel returns an lse of 0, or NaN if its query is NaN.
        assert added is not None
        nothing = (added == -INFINITE).all(-1)
        out, lse = out.masked_fill(nothing[..., None], 0.0), lse.masked_fill(nothing, -INFINITE)
    return out, lse


def in_rows(x: Tensor) -> bool:
    """Return whether the kernel can read a tensor: contiguous columns, rows that are apart or all the same."""
    if x.is_contiguous():
        return True
    *sizes, columns = x.shape
    *strides, step = x.stride()
    return step == 1 and not any(n > 1 and 0 < stride < columns for n, stride in zip(sizes, strides, strict=True))


def in_columns(x: Tensor, columns: int) -> Tensor:
    """Pad a tensor with zeros to a number of columns, and copy it if the kernel cannot read its strides."""
    x = x if x.shape[-1] == columns else pad(x, (0, columns - x.shape[-1]))  # keeps the order of dimensions
    return x if in_rows(x) else x.clone(memory_format=torch.contiguous_format)


def hidden_by(mask: Tensor | None) -> Tensor:
    """Invert a key_mask or query_mask: return bool (1 or B, 1, S, 1), True = hidden."""
    assert mask is not None
    return ~mask[:, None, :, None]


def zeroed(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return x (B, H, S, D), with 0 for tokens that a key_mask or query_mask hides."""
    # `masked_fill` takes 1.3 to 12 times as long, because it reads the mask for each element.
    bits = getattr(torch, f"int{8 * x.dtype.itemsize}")
    return (x.view(bits) & (hidden_by(mask).to(bits) - 1)).view(x.dtype)


def inputs_of(part: Part, columns: int | None, *grads: Tensor | None) -> list[Tensor]:
    """Return a part's [query, key, value], 0 where token masks hide them, and padded to `columns` unless None."""
    # Small hidden keys and values change no result, so they are not copied. grads: gradients to multiply with values.
    call = part.call
    query, key, value = call[:3] if columns is None else (in_columns(x, columns) for x in call[:3])
    query = query if call.query_mask is None else zeroed(query, call.query_mask)
    if has_holes(part):
        read = [x for x in (query, key, value, *grads) if x is not None]
        if call.query.dtype == torch.bfloat16 or not all(torch.linalg.vector_norm(x) < SMALL for x in read):
            key, value = zeroed(key, call.key_mask), zeroed(value, call.key_mask)
    return [query, key, value]


def centre_of(part: Part, value: Tensor) -> Tensor | None:
    """Return the `centre` of a part's visible values; None if its backward does not need it. value: of `inputs_of`."""
    if value.dtype != torch.bfloat16 or is_short(*part.call[:2]):
        return None
    # The mask counts even if it hides no key of this part: under torch.vmap the parts of the backward may be others.
    keys, mask = slice(part.begin, part.end), part.call.key_mask
    return centre(value[:, :, keys], None if mask is None else mask[:, keys])


def whole(call: Call) -> Part:
    return Part(call, 0, call.query.shape[2], 0, call.key.shape[2])


def cut(where: Rectangle, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Slice the first tensor to the rows of a rectangle of scores, and all other tensors to its keys."""
    query, *others = tensors
    query = query[:, :, where.first : where.last] if where.first or where.last < query.shape[2] else query
    if where.begin or where.end < others[0].shape[2]:
        others = [x[:, :, where.begin : where.end] for x in others]
    return [query, *others]


def to_wide(call: Call, always: bool = False) -> Call:
    """Cast query, key and value to float32 if the kernel is slow in their dtype, or always."""
    if not (always or is_widened(call.query.dtype)):
        return call
    query, key, value = (x.float() for x in call[:3])
    return call._replace(query=query, key=key, value=value)


def offset(call: Call) -> float:
    """Return the number to subtract from all scores: their expected lse if their variance is 1, or 0."""
    # It stays the same if `to_wide` or torch.vmap changes the call.
    rows, seen = call.query.shape[2], call.key.shape[2]
    longest = seen
    if call.cu_seqlens_k is not None:
        count = max(1, call.cu_seqlens_k.numel() - 1)
        rows, seen = rows // count if call.max_seqlen_q is None else call.max_seqlen_q, seen // count
        longest = seen if call.max_seqlen_k is None else call.max_seqlen_k
    dtype = torch.float32 if is_widened(call.query.dtype) else call.query.dtype
    few = dtype == torch.float32 and (longest <= FEW or rows < FEW_ROWS)
    if dtype == torch.bfloat16 or few or call.key.shape[2] == 0 or is_additive(call):
        return 0.0
    seen = min(seen, call.left + call.right + 1) if call.left is not None and call.right is not None else seen
    return float(round(math.log(max(1, seen)) + 0.5))  # subtracting a whole number rounds large scores least


def mask(call: Call, where: Rectangle, less: float | Tensor) -> Tensor | None:
    """Return the tensor to add to a rectangle's scores, from masks, bias, ALiBi and -less; None if it would be zero."""
    if where.masked:
        return additive(call, where, less)
    if is_nothing(less):
        return None
    terms = -less if isinstance(less, Tensor) else call.query.new_full((1, 1, 1, 1), -less)
    return terms.expand(-1, -1, where.last - where.first, where.end - where.begin)


def is_exact(call: Call, where: Rectangle) -> bool:
    """Return whether the softmax formula, not the kernel, computes the gradients of a rectangle of scores."""
    return is_few(call) or (call.query.dtype == torch.float32 and where.end - where.begin <= FEW)


def covering(part: Part) -> list[Rectangle]:
    """Return rectangles that cover the visible scores of a part."""
    # If the formula computes the gradients, each rectangle has all keys of its rows: a merged lse would add its error.
    return tiling.rectangles_of_rows(part) if is_few(part.call) else list(tiling.rectangles(part))


def are_complete(call: Call, some: list[Rectangle]) -> bool:
    """Return whether each rectangle has all visible keys of its rows. False with sinks or for a partial call."""
    rows_of = [(where.first, where.last) for where in some]
    return call.sinks is None and not call.partial and len(set(rows_of)) == len(rows_of)


def _attend(
    call: Call, where: Rectangle, tensors: Sequence[Tensor], less: float | Tensor, complete: bool
) -> tuple[Tensor, Tensor]:
    """Return (output, lse - less) of a rectangle of scores. complete: it has all keys of its rows; no sinks."""
    query, key, value = cut(where, tensors)
    of_formula = is_exact(call, where)
    if of_formula and not complete:
        scores = scores_of(call, where, less, query, key)
        weights = weights_of(scores, where.masked)
        return sums_of(weights, value), lse_of(scores, weights)
    return attend(query, key, value, where, mask(call, where, less), call.scale, of_formula)


def sinks_less(call: Call, dtype: torch.dtype, less: float) -> Tensor:
    """Return the sinks minus the offset `less`, with shape (1 or B, Hq, 1)."""
    assert call.sinks is not None
    return cast(call.sinks, wide_dtype(call.query.dtype)).to(dtype)[:, :, None] - less


def of_part(part: Part, save: bool, less: float) -> Result:
    call = part.call
    query, key, value = inputs_of(part, max(call.query.shape[3], call.value.shape[3]))
    out, lse = _of_all_rows(part, (query, key, value), less)
    common = centre_of(part, value) if save else None
    kept = out if common is None else _of_all_rows(part, (query, key, value - common), less)[0]
    if call.query_mask is not None:  # before `with_centre`, whose mean must not include hidden rows
        hidden = hidden_by(call.query_mask)
        kept = kept.masked_fill(hidden, 0.0)
        out = kept if common is None else out.masked_fill(hidden, 0.0)
        lse = lse.masked_fill(hidden[..., 0], -INFINITE)
    if common is not None:
        kept, common = with_centre(out, kept, lse, common[..., : out.shape[3]])
    if call.sinks is not None:
        shares, total = shares_of((lse, sinks_less(call, torch.float64, less)))
        factor, lse = shares[0, ..., None].to(wide_dtype(call.query.dtype)), total.to(wide_dtype(call.query.dtype))
        out = out * factor
        if common is not None:  # scale the whole output, then subtract the mean again
            common = repeated(common, call.query.shape[1])
            kept = (kept + common.to(factor.dtype)) * factor - common
    return Result(out, lse, out if common is None else kept, less)


def _of_all_rows(part: Part, tensors: Sequence[Tensor], less: float) -> tuple[Tensor, Tensor]:
    """Return (output, lse - less) of a part, without its sinks. tensors: the query, key and value of `inputs_of`."""
    call, columns = part.call, part.call.value.shape[3]
    some, rows = covering(part), call.query.shape[2]
    all_complete = are_complete(call, some)

    def attended(where: Rectangle, complete: bool) -> tuple[Tensor, Tensor]:
        out, lse = _attend(call, where, tensors, less, all_complete)
        is_merged, large = not complete or call.sinks is not None, LARGE_LSE.get(call.query.dtype, 16.0)
        if is_merged and lse.dtype != torch.float64 and bool(((lse.abs() > large) & lse.isfinite()).any()):
            # A merge would show this lse's error. The lse of scores minus `near` is close to 0, so its error is small.
            near = lse.masked_fill(lse.isinf(), 0.0) + less
            again = _attend(call, where, tensors, near[..., None], all_complete)[1]
            lse = again.double() + (near.double() - less)
        return out[..., :columns], lse

    if len(some) == 1 and some[0].last - some[0].first == rows:
        return attended(some[0], True)
    out = dense(call.query, (*call.query.shape[:3], columns)).zero_()
    dtype = wide_dtype(call.query.dtype) if call.sinks is None else torch.float64
    lse = out.new_full(out.shape[:3], -INFINITE, dtype=dtype)
    for (first, last), same_rows in groupby(some, key=lambda where: where[:2]):
        of_keys = list(same_rows)
        results = [attended(where, len(of_keys) == 1) for where in of_keys]
        out[:, :, first:last], lse[:, :, first:last] = results[0] if len(results) == 1 else merged(results)
    return out, lse


def merged(results: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return (output, lse) over all keys, from the (output, lse) over each of several disjoint sets of keys."""
    shares, total = shares_of([lse for _, lse in results])
    shares = shares.to(torch.promote_types(results[0][0].dtype, torch.float32))
    terms = [out * share[..., None] for (out, _), share in zip(results, shares, strict=True)]
    return torch.stack(terms).sum(0), total


def shares_of(lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return (softmax over the lses of sets of keys, 0 where all are -inf; their logsumexp, the lse over all keys)."""
    every = torch.stack(torch.broadcast_tensors(*lses))
    total = every.logsumexp(0)
    return every.softmax(0).masked_fill_(total == -INFINITE, 0.0), total


def at_once(call: Call, biased: bool = False) -> Rectangle | None:
    """Return the rectangle of all scores of a call if one kernel call computes it, else None. biased: allow a bias."""
    query, key, value = call[:3]
    rows, keys = query.shape[2], key.shape[2]
    if (
        not (call.alibi_slopes is call.sinks is call.mask is call.mask_bits is None)
        or not (biased or call.bias is None)
        or not (call.key_mask is call.query_mask is None)
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
        return Rectangle(0, rows, 0, keys, masked=call.bias is not None)
    square = high == 0 and rows <= keys and call.scale > 0 and call.bias is None
    return Rectangle(0, rows, 0, keys, causal=True) if square else None


def forward(call: Call, save: bool) -> Result:
    """Return the Result of a call. save: also compute `kept` for a backward, with the same bits of `out` and `lse`."""
    everything = at_once(call, is_additive(call))
    if everything is not None and not (save and centre_of(whole(call), call.value) is not None):
        less = offset(call)
        exact = is_few(call) if call.bias is None else is_exact(call, everything)
        out, lse = attend(*call[:3], everything, mask(call, everything, less), call.scale, exact)
        out = arrange(out, call.query)
        return Result(out, lse, out, less)
    like, call = call.query, to_wide(call)
    split, less = tiling.parts(call), offset(call)
    if len(split) == 1 and split[0].call is call:
        out, lse, kept, _ = of_part(split[0], save, less)
        out = arrange(out, like)
    else:
        out = dense(like, (*like.shape[:3], call.value.shape[3])).zero_()
        lse = out.new_full(out.shape[:3], -INFINITE, dtype=wide_dtype(call.query.dtype))
        lse = lse if call.sinks is None else torch.maximum(lse, sinks_less(call, lse.dtype, less).detach())
        kept = torch.zeros_like(out, dtype=call.query.dtype) if save and like.dtype.itemsize == 2 else out
        for part in split:
            result = of_part(part, save, less)
            part.view(out, part.rows).copy_(result.out)
            part.view(lse, part.rows).copy_(result.lse)
            if kept is not out:
                part.view(kept, part.rows).copy_(result.kept)
    return Result(out, lse, kept.to(call.query.dtype), less)


def weights(call: Call) -> Tensor:
    """Return the attention weights of a call: (B, Hq, Sq, Sk), if packed (1, Hq, total rows, max_seqlen_k)."""
    if (everything := at_once(call)) is not None:
        query, key = (x.to(wide_dtype(x.dtype)) for x in call[:2])
        return exact_weights(call, everything, query, key).to(call.query.dtype)
    shape = *call.query.shape[:3], sizes(call)[3]
    whole = functools.cache(lambda: call.query.new_zeros(shape))  # not needed if one rectangle holds all weights
    for part in tiling.parts(call):
        tensors = [x.to(wide_dtype(call.query.dtype)) for x in inputs_of(part, None)[:2]]
        for where in tiling.rectangles_of_rows(part):
            of_rows = exact_weights(part.call, where, *cut(where, tensors))
            if part.call is call and call.query_mask is None and of_rows.shape == shape:
                return of_rows.to(call.query.dtype)
            part.view(whole(), part.rows)[:, :, where.first : where.last, where.begin : where.end] = of_rows
    return whole() if call.query_mask is None else whole().masked_fill_(hidden_by(call.query_mask), 0.0)


def exact_weights(call: Call, where: Rectangle, query: Tensor, key: Tensor) -> Tensor:
    """Return the softmax weights of a rectangle of scores that contains all visible keys of its rows."""

    def scores() -> Tensor:
        scores = scores_of(call, where, 0.0, query, key)
        if call.sinks is None:
            return scores
        return torch.cat([scores, sinks_less(call, scores.dtype, 0.0)[..., None].expand(*scores.shape[:3], 1)], -1)

    made = scores()
    weights = torch.softmax(made, -1, out=made)  # allocating new memory takes longer than the softmax
    weights = weights_of(scores(), True) if where.masked and has_nan(weights) else weights
    return weights if call.sinks is None else weights[..., :-1].contiguous()  # a view cannot be an operator's result
