"""Checks a call of `attention_decode`, and brings it into the form that every backend takes: Decode."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from .layout import is_shape, is_size, share, span
from .options import Arguments, Call, autocast_dtype, differentiated, in_memory, is_known, normalise
from .private import holds
from .rules import (
    Sizes,
    check_dtype,
    check_flags,
    check_floating,
    check_options,
    check_query_key_value,
    check_shape,
    fail,
)


class CacheArguments(NamedTuple):
    """Arguments of a call to a cache as written, unchecked, without the options that `attention` has as well."""

    query: Any
    key_cache: Any
    value_cache: Any
    cache_seqlens: Any
    block_table: Any = None
    new_key: Any = None
    new_value: Any = None
    rotary_cos: Any = None
    rotary_sin: Any = None
    rotary_interleaved: Any = False


class Decode(NamedTuple):
    """The same call, checked and in one form.

    call is one of `attention` to (B, Hkv, capacity, D) keys, by lengths that are not in it: its key and value are the
    caches, or, with a table, tensors of that shape that hold nothing. key_cache and value_cache (pages, Hkv, page, D or
    Dv) are one page for each batch without a table (B, n) that names them. lengths (B,) count the keys before the
    `added` new ones, (B, Hkv, added, D or Dv). cos and sin are (positions, half), or None.
    """

    call: Call
    key_cache: Tensor
    value_cache: Tensor
    lengths: Tensor
    table: Tensor | None
    added: int
    new_key: Tensor | None
    new_value: Tensor | None
    cos: Tensor | None
    sin: Tensor | None
    interleaved: bool


def apart(decode: Decode) -> list[Tensor]:
    """New keys and values, as copies where they may lie in a cache: in what order that is written is not said.

    It is for those that write, at the time that they do: a compiler sees no addresses, and takes out copies.
    """
    caches = span(decode.key_cache), span(decode.value_cache)
    rows = []
    for new in (decode.new_key, decode.new_value):
        assert new is not None
        first, end = span(new)
        within = any(first < cache_end and cache_first < end for cache_first, cache_end in caches)
        rows.append(new.clone() if within else new)
    return rows


# Not properties: the compiler of torch 2.10 does not trace those of a NamedTuple.
def capacity_of(decode: Decode) -> int:
    """The most keys that a sequence may have; unchecked lengths on a device are clamped to it."""
    return decode.call.key.shape[2] if holds(decode.key_cache.shape[0] != 0, True) else 0


def capacity(arguments: CacheArguments) -> int:
    page, table = arguments.key_cache.shape[2], arguments.block_table
    size: int = page if table is None else page * table.shape[1]
    return size


def stand_in(cache: Tensor, table: Tensor | None) -> Tensor:
    """The cache, or for pages a tensor of shape alone."""
    if table is None:
        return cache
    batch, (_, heads, page, dim) = table.shape[0], cache.shape
    return cache.new_empty(()).expand(batch, heads, table.shape[1] * page, dim)


def check_inputs(a: CacheArguments) -> None:
    """Raise for query, caches and lengths that do not fit together. Caches may be pages, or more than queries."""
    check_query_key_value(a.query, a.key_cache, a.value_cache, "key_cache", "value_cache", "(B, H, S, D)")
    check_dtype("cache_seqlens", a.cache_seqlens, torch.int32, a.query.device)
    check_shape("cache_seqlens", a.cache_seqlens, (a.query.shape[0],))


def check_sizes(a: CacheArguments) -> None:
    """Raise for wrong arguments, without reading tensors' values."""
    check_inputs(a)
    batch = a.query.shape[0]
    if a.block_table is not None:
        check_dtype("block_table", a.block_table, torch.int32, a.query.device)
        if a.block_table.dim() != 2 or not is_size(a.block_table.shape[0], batch):
            fail(ValueError, "block_table", f"shape ({batch}, pages of a sequence)", tuple(a.block_table.shape))
    elif not is_size(a.key_cache.shape[0], batch):
        fail(ValueError, "key_cache", f"the batch size of query, {batch}, or a block_table", tuple(a.key_cache.shape))
    if not a.new_key is a.new_value is None:
        _check_new(a)
    if not a.rotary_cos is a.rotary_sin is None:
        _check_rotary(a)
    check_flags(rotary_interleaved=a.rotary_interleaved)


def _check_both(**pair: Any) -> None:
    first, second = pair
    for name, other in ((first, second), (second, first)):
        if pair[name] is None:
            fail(ValueError, name, f"a tensor beside {other}", None)


def _check_new(a: CacheArguments) -> None:
    _check_both(new_key=a.new_key, new_value=a.new_value)
    batch, heads, columns = a.query.shape[0], a.key_cache.shape[1], a.key_cache.shape[3]
    for name, new in (("new_key", a.new_key), ("new_value", a.new_value)):
        check_dtype(name, new, a.query.dtype, a.query.device)
    new_key = a.new_key.shape
    if len(new_key) != 4 or not is_shape((*new_key[:2], new_key[3]), (batch, heads, columns)):
        fail(ValueError, "new_key", f"shape ({batch}, {heads}, new, {columns})", tuple(new_key))
    check_shape("new_value", a.new_value, (*new_key[:3], a.value_cache.shape[3]))
    for name, cache in (("key_cache", a.key_cache), ("value_cache", a.value_cache)):
        _check_writable(name, cache)


def _check_writable(name: str, cache: Tensor) -> None:
    for step, size in zip(cache.stride(), cache.shape, strict=True):
        if holds(step == 0, False) and holds(size > 1, False):
            fail(ValueError, name, "a cache without expanded dimensions beside new_key", f"strides {cache.stride()}")
    if is_compiling():
        return
    if cache.is_neg():
        fail(ValueError, name, "a cache that is not a negated view beside new_key (see resolve_neg)", "a negated view")
    # Kernels write to it all the same, on a GPU.
    if cache.is_inference() and not torch.is_inference_mode_enabled() and cache.device.type != "cuda":
        fail(ValueError, name, "a cache made outside of torch.inference_mode() beside new_key", "an inference tensor")


def _check_rotary(a: CacheArguments) -> None:
    cos, sin = a.rotary_cos, a.rotary_sin
    _check_both(rotary_cos=cos, rotary_sin=sin)
    for name, angles in (("rotary_cos", cos), ("rotary_sin", sin)):
        check_floating(name, angles, a.query.device)
    most = a.query.shape[3]
    if cos.dim() != 2 or holds(cos.shape[0] == 0, False) or not 0 < 2 * cos.shape[1] <= most:
        expected = f"shape (positions, rotary_dim / 2), with 1 position or more and a rotary_dim of at most {most}"
        fail(ValueError, "rotary_cos", expected, tuple(cos.shape))
    check_shape("rotary_sin", sin, tuple(cos.shape))


def check_gradients(arguments: Mapping[str, Any]) -> None:
    """Raise for a tensor that somebody may want a gradient of."""
    if not differentiated(arguments.values()):
        return
    for name, x in arguments.items():
        if differentiated((x,)):
            expected = "a tensor without a gradient, because attention_decode has none (see torch.no_grad)"
            fail(ValueError, name, expected, "one that requires it")


def check_values(a: CacheArguments, options: Arguments) -> list[int]:
    """The lengths, where they are known; empty otherwise.

    Raises: ValueError for lengths, pages and positions on the CPU that lie outside of what they count, and for caches
        that would be written over by each other.
    """
    if a.new_key is not None and not is_compiling():
        _check_apart(a)
    if not is_known(a.cache_seqlens) or not a.cache_seqlens.numel():
        return []
    room = capacity(a)
    lengths: list[int] = a.cache_seqlens.tolist()
    new = 0 if a.new_key is None else a.new_key.shape[2]
    least, most = min(lengths), max(lengths)
    if least < 0 or most > room:
        fail(ValueError, "cache_seqlens", f"lengths from 0 to the capacity, {room}", least if least < 0 else most)
    if most + new > room:
        fail(ValueError, "new_key", f"at most {room - most} rows after the {most} of a sequence of {room}", f"{new}")
    if a.block_table is not None:
        _check_pages(a, a.cache_seqlens.long(), new)
    if a.rotary_cos is not None:
        _check_positions(a, options, a.cache_seqlens.long() + new, a.query.shape[2], new)
    return lengths


def _check_apart(a: CacheArguments) -> None:
    """Raise for caches of which one would be written over by the other.

    Values may be the first columns of keys, where what is new is as well, and is not turned.
    """
    pairs = (a.key_cache, a.value_cache), (a.new_key, a.new_value)
    if not in_memory(a[1:3]) or not share(*pairs[0]):
        return
    alike = in_memory(pairs[1]) and all(x.data_ptr() == y.data_ptr() and x.stride() == y.stride() for x, y in pairs)
    if not alike or a.rotary_cos is not None:
        expected = "no memory in common with key_cache beside new_key"
        fail(ValueError, "value_cache", expected, "a tensor that overlaps it")


def _check_pages(a: CacheArguments, before: Tensor, new: int) -> None:
    pages, _, page, _ = a.key_cache.shape
    number = a.block_table.long()
    if not number.numel() or not page:
        return
    reached = torch.arange(number.shape[1], device=number.device) * page < (before + new)[:, None]
    wrong = number[reached & ((number < 0) | (number >= pages))]
    if len(wrong):
        expected = f"pages from 0 to {pages - 1} as far as the lengths reach"
        expected = expected if pages else "lengths of 0, because there are no pages"
        fail(ValueError, "block_table", expected, int(wrong[0]))
    if new:
        position = before[:, None] + torch.arange(new, device=before.device)
        written, place = number.gather(1, position // page), position % page
        own = "a different place for each new key"
        if len((written * page + place).unique()) < place.numel():
            fail(ValueError, "block_table", own, "a place that two keys are written to")
        old = before[:, None] - torch.arange(number.shape[1], device=before.device) * page  # in a page and behind it
        most = before.new_zeros(pages).scatter_reduce_(0, number[old > 0], old[old > 0], "amax")
        if bool((place < most[written]).any()):
            fail(ValueError, "block_table", own, "a place that already holds a key")


def _check_positions(a: CacheArguments, options: Arguments, after: Tensor, rows: int, new: int) -> None:
    """Raise for too few angles, and queries before position 0 that see keys."""
    bottom_right, most = options.align == "bottom_right", int(after.max())
    needed = max(most if new or (rows and bottom_right) else 0, 0 if bottom_right else rows)
    if needed > a.rotary_cos.shape[0]:
        expected = f"a row for each of {needed} positions"
        fail(ValueError, "rotary_cos", expected, f"{a.rotary_cos.shape[0]} rows")
    right = 0 if options.causal else (options.window or (None, None))[1]
    early = (after > 0) & (after < rows)
    # What a query_mask hides sees nothing either; it may lie on a GPU.
    if bottom_right and options.query_mask is None and bool(early.any()) and (right is None or right > 0):
        expected = "at most as many rows as keys, unless causal or a query_mask hides all keys from the first rows"
        fail(ValueError, "query", expected, f"{rows} rows for {int(after[early][0])} keys")


def checked(arguments: CacheArguments, options: Arguments, named: bool = False) -> Decode:
    """The Decode of arguments as the caller wrote them; options hold those that `attention` has too, and no tensors.

    named: whether the caller names a backend.

    Raises: ValueError or TypeError, in one line, for the first thing that is wrong, before anything is written. Values
        are looked at where they lie on the CPU: in code that is compiled they are taken as they are on a GPU.
    """
    a = arguments
    if isinstance(a.query, Tensor):
        a = a._replace(query=a.query.to(autocast_dtype(a.query)))
    check_sizes(a)
    query, (batch, heads, rows, _) = a.query, a.query.shape
    options = check_options(options, Sizes(query.device, query.dtype, batch, heads, rows, capacity(a)))
    learned = dict(bias=options.bias, alibi_slopes=options.alibi_slopes, sinks=options.sinks)
    check_gradients({**arguments._asdict(), **learned})
    check_values(a, options)
    key, value = (stand_in(cache, a.block_table) for cache in (a.key_cache, a.value_cache))
    options = options._replace(query=query, key=key, value=value)
    # An angle depends on the alignment in any case.
    level = dict(top_left=options.align == "top_left") if a.rotary_cos is not None else {}
    call = normalise(options, named=named, **level)
    return Decode(call, *a[1:5], 0 if a.new_key is None else a.new_key.shape[2], *a[5:])
