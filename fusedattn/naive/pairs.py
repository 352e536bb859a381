"""Inputs of the formula in one dtype, and masks, biases and dropout for the (row, key) pairs of a block."""

import functools
from typing import Any

import torch
from torch import Tensor

from ..call.bits import unpack
from ..call.options import INPUTS, Call, diagonal, inputs, origin_of, shift, wide_dtype
from ..call.private import holds
from . import dropout
from .blocks import Block, known_diagonal


def cut(pairs: Tensor, block: Block) -> Tensor:
    """Slice a mask or bias, which broadcasts to (B, Hq, Sq, Sk), to the rows and keys of a block."""
    for dim, start, stop in ((2, block.first, block.last), (3, block.begin, block.end)):
        if not (holds(pairs.shape[dim] == 1, False) or holds(stop - start == pairs.shape[dim], False)):
            pairs = pairs.narrow(dim, start, stop - start)
    return pairs


def of_mask(call: Call, block: Block) -> Tensor | None:
    if call.mask is not None or call.mask_bits is None:
        return None if call.mask is None else cut(call.mask, block)
    assert call.block_mask is not None
    return unpack(call.block_mask, call.mask_bits, *block)


def _offsets(call: Call, block: Block) -> Tensor:
    """Return each pair's signed distance from the diagonal, in keys: (rows, keys), or (n, 1, rows, keys) if padded."""
    device = call.query.device
    row = torch.arange(block.first, block.last, device=device)[:, None]
    if call.cu_seqlens_q is None or call.cu_seqlens_k is None or call.top_left:
        row = row + diagonal(call)
    else:
        row = row + (call.cu_seqlens_k.diff() - call.cu_seqlens_q.diff())[:, None, None, None] + shift(call)
    return torch.arange(block.begin, block.end, device=device)[None, :] - row


def visible(call: Call, block: Block) -> Tensor | None:
    """Return a bool mask of the visible pairs of a block, broadcastable to (B, Hq, rows, keys); None if all are."""
    conditions = []
    if (mask := of_mask(call, block)) is not None:
        conditions.append(mask)
    if call.bias is not None:
        conditions.append(cut(call.bias, block) > float("-inf"))
    if call.key_mask is not None:
        conditions.append(call.key_mask[:, None, None, block.begin : block.end])
    if call.query_mask is not None:
        conditions.append(call.query_mask[:, None, block.first : block.last, None])
    if call.left is not None or call.right is not None:
        offset = _offsets(call, block)
        if call.left is not None:
            conditions.append(offset >= -call.left)
        if call.right is not None:
            conditions.append(offset <= call.right)
    return functools.reduce(Tensor.logical_and, conditions) if conditions else None


def edges(call: Call, block: Block) -> list[tuple[slice, Tensor]] | None:
    """Return [(slice of columns, bool: pairs that the band hides)]; None if more is hidden, or a row sees no key."""
    offset, sides, hidden = known_diagonal(call), [], []
    first, last, begin, end = block
    others = call.mask, call.mask_bits, call.bias, call.key_mask, call.query_mask
    if offset is None or end == begin or any(x is not None for x in others):
        return None
    # If `right` hides all keys of any row, it does so for the first row; `left`, for the last.
    if call.left is not None:  # columns that the first row may see and the last row does not
        if (stop := last - 1 + offset - call.left) >= call.key.shape[2]:
            return None
        sides.append((begin, min(end, stop), first + offset - call.left, False))
    if call.right is not None:
        if (limit := first + offset + call.right) < 0:
            return None
        sides.append((max(begin, limit + 1), end, limit, True))
    for start, stop, limit, right in sides:
        if start < stop:
            rows, columns = last - first, stop - start
            # Edges are cached, because the blocks of a call and the calls of a model use the same few.
            edge = (_kept_edge if rows * columns <= LARGEST_KEPT else _edge)(rows, columns, limit - start, right)
            hidden.append((slice(start - begin, stop - begin), edge))
    return hidden


def _edge(rows: int, columns: int, diagonal: int, right: bool) -> Tensor:
    """Return bool (rows, columns), True in row i for columns right of i + diagonal; if not `right`, left of it."""
    everywhere = torch.ones(rows, columns, dtype=torch.bool, device="cpu")
    return everywhere.triu_(diagonal + 1) if right else everywhere.tril_(diagonal - 1)


LARGEST_KEPT = 2**16  # elements of the largest edge to cache
_kept_edge = functools.lru_cache(maxsize=16)(_edge)


def added(call: Call, block: Block, dtype: torch.dtype) -> list[Tensor]:
    """Return the terms to add to the scores of a block: ALiBi and bias."""
    terms = []
    if call.alibi_slopes is not None:
        terms.append(-cast(call.alibi_slopes, dtype)[:, :, None, None] * _offsets(call, block).abs().to(dtype))
    if call.bias is not None:
        terms.append(cast(cut(call.bias, block), dtype))
    return terms


def factor(call: Call, block: Block) -> Tensor | None:
    """Return the dropout factors for the weights of a block: 0 or 1 / (1 - dropout_p)."""
    if call.seed is None:
        return None
    (first, last, begin, end), origin = block, origin_of(call)
    batch, head = (torch.arange(n, device=call.query.device) for n in call.query.shape[:2])
    planes = origin.plane + batch[:, None] * origin.heads + head
    rows, keys = (first + origin.row, last + origin.row), (begin + origin.key, end + origin.key)
    kept = dropout.keep(call.seed, planes.flatten(), rows, keys, call.dropout_p).to(call.query.dtype)
    scale = 1 / (1 - call.dropout_p) if call.dropout_p < 1 else 0.0
    return kept.mul_(scale).view(*planes.shape, last - first, end - begin)


def prepared(call: Call, dtype: torch.dtype | None = None) -> Call:
    """Return the call in `dtype` (None: `wide_dtype`), with zeros for rows and keys that its token masks hide."""
    dtype = wide_dtype(call.query.dtype) if dtype is None else dtype
    if call.key_mask is call.query_mask is None and all(x is None or x.dtype == dtype for x in inputs(call)):
        return call
    present = [name for name in INPUTS if getattr(call, name) is not None]
    fields: dict[str, Any] = {name: cast(getattr(call, name), dtype) for name in present}
    for name, mask in dict(query=call.query_mask, key=call.key_mask, value=call.key_mask).items():
        if mask is not None:
            fields[name] = fields[name].masked_fill(~mask[:, None, :, None], 0.0)
    return call._replace(**fields)


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor in `dtype`. Finite values beyond its range are clamped: -inf in a bias would hide a score."""
    lowest = torch.finfo(dtype).min
    if torch.finfo(tensor.dtype).min < lowest:
        hidden = tensor == float("-inf")
        finite = tensor.masked_fill(hidden, 0.0)
        clamped = tensor.detach().clamp(lowest, -lowest).masked_fill(hidden, float("-inf"))
        tensor = clamped + (finite - finite.detach())  # a plain clamp would stop gradients
    return tensor.to(dtype)
