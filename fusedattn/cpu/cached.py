"""Calls to caches: keys are read as far as the lengths reach, and appended where they end."""

from collections.abc import Iterator

import torch
from torch import Tensor

from ..call.cached import Decode, room
from ..call.form import Call
from ..call.layout import dense
from ..naive import cached as naive
from ..naive.formula import without_autocast
from . import flash


def _alike(lengths: list[int]) -> Iterator[tuple[int, int, int]]:
    """(first, last + 1, length) of consecutive sequences of one length."""
    first = 0
    for number, length in enumerate(lengths):
        if number + 1 == len(lengths) or lengths[number + 1] != length:
            yield first, number + 1, length
            first = number + 1


def append(decode: Decode) -> None:
    """Write what is new into the caches."""
    lengths = decode.lengths.tolist()
    fits = lengths and min(lengths) >= 0 and max(lengths) + decode.added <= room(decode)
    if decode.table is not None or decode.cos is not None or not fits:
        naive.append(decode)
        return
    assert decode.new_key is not None and decode.new_value is not None
    for first, last, length in _alike(lengths):
        for cache, new in ((decode.key_cache, decode.new_key), (decode.value_cache, decode.new_value)):
            cache[first:last, :, length : length + decode.added] = new[first:last]


def _keys(cache: Tensor, table: Tensor | None, batches: slice, length: int) -> Tensor:
    """(B, H, length, D): the keys or values of some batches, from a cache or from its pages."""
    if table is None:
        return cache[batches, :, :length]
    pages, heads, page, columns = cache.shape
    if not pages or not length:
        return cache.new_zeros(table[batches].shape[0], heads, length, columns)
    numbers = table[batches, : -(-length // page)].clamp(0, pages - 1)
    return cache[numbers].transpose(1, 2).flatten(2, 3)[:, :, :length]


def _short(call: Call, decode: Decode, batches: slice, length: int) -> Call:
    """A call of some batches to keys of one length, the last of which the last row is level with."""

    def some(x: Tensor | None) -> Tensor | None:
        return x if x is None or x.shape[0] == 1 else x[batches]

    def of_keys(x: Tensor | None) -> Tensor | None:
        return x if x is None or x.shape[-1] == 1 else x[..., :length]

    key, value = (_keys(x, decode.table, batches, length) for x in (decode.key_cache, decode.value_cache))
    query = call.query[batches]
    if call.bias is call.mask is call.key_mask is call.query_mask is call.alibi_slopes is None:
        return call._replace(query=query, key=key, value=value)
    masks = dict(mask=of_keys(some(call.mask)), key_mask=of_keys(some(call.key_mask)), query_mask=some(call.query_mask))
    scores = dict(bias=of_keys(some(call.bias)), alibi_slopes=some(call.alibi_slopes))
    return call._replace(query=query, key=key, value=value, **masks, **scores)


@without_autocast
def _attend(call: Call, decode: Decode, need_weights: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    after = decode.lengths.clamp(0, room(decode)).add(decode.added).clamp(max=room(decode)).tolist()
    if decode.cos is not None and decode.sin is not None:
        rows = torch.arange(call.query.shape[2])[None]
        level = rows if call.top_left else rows + (torch.tensor(after)[:, None] - call.query.shape[2])
        call = call._replace(query=naive.rotated(call.query, level, decode.cos, decode.sin, decode.interleaved))
    runs = list(_alike(after))
    capacity, results = call.key.shape[2], []
    for first, last, length in runs:
        short = _short(call, decode, slice(first, last), length)
        out, lse, _ = flash.forward(short, False)
        results.append((out, lse, flash.weights(short, lse, capacity) if need_weights else None))
    if len(results) == 1:
        return results[0]
    out = dense(call.query, (*call.query.shape[:3], call.value.shape[3]))
    lse = out.new_empty(out.shape[:3], dtype=torch.promote_types(out.dtype, torch.float32))
    weights = out.new_empty(*out.shape[:3], capacity) if need_weights else None
    for (first, last, _), result in zip(runs, results, strict=True):
        for x, part in zip((out, lse, weights), result, strict=True):
            if x is not None and part is not None:
                x[first:last] = part
    return out, lse, weights


def attend(decode: Decode, need_weights: bool = False) -> tuple[Tensor, Tensor, Tensor | None]:
    """(output, lse, weights or None) of a call to caches that what is new has been appended to."""
    return _attend(decode.call, decode, need_weights)
