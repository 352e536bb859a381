"""Appends to key-value caches, and turns a Decode into a Call: pages are gathered, unused slots masked."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..call.checks import fail, plain
from ..call.decode import Decode, apart, capacity_of
from ..call.layout import arrange
from ..call.options import Call, is_known
from ..call.private import holds, unmapped
from .varlen import of_batches

WORTH = 2**13  # elements of a key cache that an extra call must skip to pay off: the call takes 0.1 ms on a CPU


def rotated(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Return x (B, H, S, D) with rotary embeddings of positions (B or 1, S) applied to its first columns."""
    # Columns 2n and 2n + 1 are a pair if interleaved, else n and n + half. Positions beyond cos use the last row of
    # cos.
    # Source: RoFormer, arXiv:2104.09864, section 3.2.
    half, wide = cos.shape[1], torch.promote_types(x.dtype, torch.float32)
    positions = positions.clamp(0, cos.shape[0] - 1)
    c, s = (angles[positions][:, None].to(wide) for angles in (cos, sin))  # (B or 1, 1, S, half)
    columns = x[..., : 2 * half].to(wide)
    pairs = columns.unflatten(-1, (half, 2)) if interleaved else columns.unflatten(-1, (2, half)).mT
    first, second = pairs.unbind(-1)
    pairs = torch.stack([first * c - second * s, first * s + second * c], -1)
    columns = (pairs if interleaved else pairs.mT).flatten(-2)
    return arrange(torch.cat([columns.to(x.dtype), x[..., 2 * half :]], -1), x)


def _to_write(
    cache: Tensor, new: Tensor, position: Tensor, table: Tensor | None, capacity: int
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return (page numbers, slots in pages, values) to write for `new` (B, H, S, D) at `position` (B, S), or None."""
    # None: there is nothing to write. Rows past the capacity or on pages outside the pool are dropped.
    pages, _, page, _ = cache.shape
    if any(holds(size == 0, False) for size in (*cache.shape, *new.shape, capacity)):
        return None
    if table is None:
        number = torch.arange(pages, device=cache.device)[:, None].expand_as(position)
    else:
        number = table.long().gather(1, (position // page).clamp(max=table.shape[1] - 1))
    valid = ((position < capacity) & (number >= 0) & (number < pages)).flatten()
    number, slot = (torch.where(valid, x.flatten(), 0) for x in (number, position % page))
    rows = new.transpose(1, 2).flatten(0, 1)
    # Dropped rows go to slot 0 of page 0. They write what that slot will hold: the valid row for it, or its old row.
    first = valid & (number == 0) & (slot == 0)
    # Use index_select: a tensor as a plain index would cause a host sync.
    held = torch.where(first.any(), rows.index_select(0, first.int().argmax()[None]), cache.narrow(0, 0, 1)[:, :, 0])
    return number, slot, torch.where(valid[:, None, None], rows, held)


def _gathered(cache: Tensor, table: Tensor | None) -> Tensor:
    """Return a cache as (B, H, capacity, D), with its pages gathered. Invalid page numbers give an arbitrary page."""
    if table is None:
        return cache
    pages, heads, page, dim = cache.shape
    if holds(pages == 0, False):
        return cache.new_zeros(table.shape[0], heads, table.shape[1] * page, dim)
    by_head = cache.transpose(0, 1)[:, table.long().clamp(0, pages - 1)]  # (H, B, pages, page, D), so copied once
    return by_head.transpose(0, 1).flatten(2, 3)


def _lengths(decode: Decode) -> tuple[Tensor, Tensor]:
    """Return the length of each sequence before and after the append."""
    before = decode.lengths.long().clamp(0, capacity_of(decode))
    return before, (before + decode.added).clamp(max=capacity_of(decode))


def _check_mapped(decode: Decode) -> None:
    """Raise if torch.vmap maps over new keys, new values or their positions, but not over their cache."""
    if torch.compiler.is_compiling():  # a compiler cannot tell whether tensors are mapped
        return
    where = decode.lengths, decode.table, decode.cos, decode.sin
    for name, new in (("key_cache", decode.new_key), ("value_cache", decode.new_value)):
        cache = getattr(decode, name)
        if unmapped(cache) is cache and any(unmapped(x) is not x for x in (new, *where) if x is not None):
            expected = "a cache that torch.vmap maps, because it maps what is written there"
            fail(ValueError, name, expected, "one that it does not map: add in_dims for it")


def append(decode: Decode) -> None:
    """Write the new keys and values into the caches, without a host sync."""
    if decode.new_key is None or decode.new_value is None:
        return
    caches = decode.key_cache, decode.value_cache
    for name, cache in zip(("key_cache", "value_cache"), caches, strict=True):
        # PyTorch would raise after it has written the keys. Kernels can write to an inference tensor.
        if not torch.compiler.is_compiling() and cache.is_inference() and not torch.is_inference_mode_enabled():
            fail(ValueError, name, "a cache made outside of torch.inference_mode() for new_key", "an inference tensor")
    if decode.table is None and decode.cos is None and is_known(decode.lengths) and plain(decode):
        lengths = decode.lengths.tolist()
        if lengths and min(lengths) >= 0 and max(lengths) + decode.added <= capacity_of(decode):
            for cache, new in zip(caches, apart(decode), strict=True):
                for first, last, length in alike(lengths):
                    cache[first:last, :, length : length + decode.added] = new[first:last]
            return
    _check_mapped(decode)
    before, _ = _lengths(decode)
    position, new_key = before[:, None] + torch.arange(decode.added, device=before.device), decode.new_key
    if decode.cos is not None and decode.sin is not None:
        new_key = rotated(new_key, position, decode.cos, decode.sin, decode.interleaved)
    rows = new_key, decode.new_value
    # Read both before writing either: the new rows may be views of a cache.
    writes = [_to_write(*each, position, decode.table, capacity_of(decode)) for each in zip(caches, rows, strict=True)]
    for cache, write in zip(caches, writes, strict=True):
        if write is not None:
            number, slot, values = write
            # Transpose to make the indices adjacent: otherwise torch.vmap writes to wrong places (torch 2.13).
            cache.transpose(1, 2)[number, slot] = values


def dense(decode: Decode) -> Call:
    """Convert a Decode to the equivalent padded Call. Call this after `append`, which fills the caches."""
    # If causal, window or slopes align sequences at their ends, the Call gets cu_seqlens, like one of `varlen.padded`.
    call, (_, after) = rotated_query(decode), _lengths(decode)
    real = torch.arange(call.key.shape[2], device=after.device) < after[:, None]
    real = real if call.key_mask is None else real & call.key_mask
    key, value = _gathered(decode.key_cache, decode.table), _gathered(decode.value_cache, decode.table)
    call = call._replace(key=key, value=value, key_mask=real)
    if call.top_left or call.left is call.right is call.alibi_slopes is None:
        return call
    rows = torch.arange(after.shape[0] + 1, device=after.device) * call.query.shape[2]
    return call._replace(cu_seqlens_q=rows, cu_seqlens_k=torch.nn.functional.pad(after.cumsum(0), (1, 0)))


def by_length(decode: Decode) -> list[Call] | None:
    """Split a Decode into dense Calls, one for each run of sequences of equal length, with keys cut to that length."""
    # Return None if that skips too few keys, or if reading lengths would cause a host sync, a graph break or an error.
    if not is_known(decode.lengths) or not len(decode.lengths) or not plain((*decode, *decode.call)):
        return None
    call, lengths = rotated_query(decode), _lengths(decode)[1].tolist()
    runs = list(alike(lengths))
    skipped = (len(lengths) * call.key.shape[2] - sum(lengths)) * call.key.shape[1] * call.key.shape[3]
    return None if skipped < WORTH * (len(runs) - 1) else [of_length(call, decode, *run) for run in runs]


def alike(lengths: Sequence[Any]) -> Iterator[tuple[int, int, Any]]:
    """Yield (first, last + 1, length) for each run of equal lengths."""
    first = 0
    for length, run in itertools.groupby(lengths):
        last = first + len(list(run))
        yield first, last, length
        first = last


def of_length(call: Call, decode: Decode, first: int, last: int, length: int, page: int | None = None) -> Call:
    """Return the Call of sequences first .. last - 1, which all have this length. call: from `rotated_query`."""
    # page: the first sequence's page, if each sequence has one page and these pages are consecutive.
    batches = slice(first, last)
    slices: dict[str, slice] = {}
    if last - first < decode.lengths.shape[0]:  # a slice takes 3 us
        slices["B"] = batches
    if length < call.key.shape[2]:
        slices["K"] = slice(length)
    call = of_batches(call, **slices) if slices else call
    if decode.table is None:
        return call
    caches = decode.key_cache, decode.value_cache
    if page is None:
        table = decode.table[batches, : -(-length // max(1, decode.key_cache.shape[2]))]
        key, value = (_gathered(cache, table)[:, :, :length] for cache in caches)
    else:
        key, value = (cache[page : page + last - first, :, :length] for cache in caches)
    return call._replace(key=key, value=value)


def rotated_query(decode: Decode) -> Call:
    """Return the Call of a Decode, with rotary embeddings applied to its query."""
    call = decode.call
    if decode.cos is None or decode.sin is None:
        return call
    _, after = _lengths(decode)
    position = torch.arange(call.query.shape[2], device=after.device)[None]
    position = position if call.top_left else position + (after - call.query.shape[2])[:, None]
    return call._replace(query=rotated(call.query, position, decode.cos, decode.sin, decode.interleaved))
