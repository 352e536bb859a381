"""Checks of the arguments of `attention_decode`, which become the Decode that every backend takes."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from . import checks, rules
from .checks import check_dtype, check_floating, check_shape, fail, is_size
from .layout import share, span
from .options import INPUTS, Arguments, Call, differentiated, is_known
from .private import has_storage, holds, storage
from .rules import check_options, check_query_key_value


class CacheArguments(NamedTuple):
    """Unchecked arguments of `attention_decode`, without the options that it shares with `attention`."""

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
    """A checked call of `attention_decode`.

    call: attention to (B, Hkv, capacity, D) keys. Its key and value are the caches; with a block table, uninitialised
    tensors of that shape. key_cache, value_cache: (pages, Hkv, page, D or Dv). table: (B, pages of a sequence), or None
    if sequence b is page b. lengths: (B,), the keys before the append. new_key, new_value: (B, Hkv, added, D or Dv) or
    None. cos, sin: (positions, rotary_dim / 2) or None.
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
    """Return the new keys and values, copied if they may overlap a cache: an append reads and writes in any order."""
    # Call it inside the operator that appends: a compiler sees no addresses, and would remove an earlier copy.
    caches = [span(decode.key_cache), span(decode.value_cache)]
    new = [x for x in (decode.new_key, decode.new_value) if x is not None]
    overlap = [any(first < last and begin < end for begin, last in caches) for first, end in [span(x) for x in new]]
    return [x.clone() if overlaps else x for x, overlaps in zip(new, overlap, strict=True)]


def keys_hold_values(decode: Decode) -> bool:
    """Return whether the cached values are the first columns of the keys."""
    key, value = decode.key_cache, decode.value_cache
    first = key.storage_offset() == value.storage_offset() and key.stride() == value.stride()
    first = first and value.shape[3] <= key.shape[3]
    return first and has_storage(key) and has_storage(value) and storage(key) == storage(value)


# Functions, not properties: the compiler of torch 2.10 does not trace properties of a NamedTuple.
def capacity_of(decode: Decode) -> int:
    """Return the number of keys that a cache can hold for one sequence. It is 0 if the cache has no pages."""
    return decode.call.key.shape[2] if holds(decode.key_cache.shape[0] != 0, True) else 0


def stand_in(cache: Tensor, table: Tensor | None) -> Tensor:
    """Return the cache; if it is paged, one uninitialised element expanded to (B, Hkv, capacity, D)."""
    if table is None:
        return cache
    batch, (_, heads, page, dim) = table.shape[0], cache.shape
    return cache.new_empty(()).expand(batch, heads, table.shape[1] * page, dim)


def check_inputs(a: CacheArguments) -> None:
    """Raise if query, caches and cache_seqlens do not match. The caches' batch size or pages are checked later."""
    check_query_key_value(a.query, a.key_cache, a.value_cache, "key_cache", "value_cache", "(B, H, S, D)")
    check_dtype("cache_seqlens", a.cache_seqlens, torch.int32, a.query.device)
    check_shape("cache_seqlens", a.cache_seqlens, (a.query.shape[0],), why="one for each batch of query")


def check_sizes(a: CacheArguments) -> None:
    """Raise if an argument of `attention_decode` has a wrong dtype, device or shape. No values are read."""
    check_inputs(a)
    batch = a.query.shape[0]
    if a.block_table is not None:
        check_dtype("block_table", a.block_table, torch.int32, a.query.device)
        if a.block_table.dim() != 2 or not is_size(a.block_table.shape[0], batch):
            fail(ValueError, "block_table", f"shape ({batch}, pages of a sequence)", a.block_table.shape)
    elif not is_size(a.key_cache.shape[0], batch):
        fail(ValueError, "key_cache", f"a batch size of {batch}, as query has, or a block_table", a.key_cache.shape)
    for first, second, check in (("new_key", "new_value", _check_new), ("rotary_cos", "rotary_sin", _check_rotary)):
        for name, other in ((first, second), (second, first)):
            if getattr(a, name) is None and getattr(a, other) is not None:
                fail(ValueError, name, f"a tensor, because {other} is given", None)
        if getattr(a, first) is not None:
            check(a)


def _check_new(a: CacheArguments) -> None:
    batch, heads, columns = a.query.shape[0], a.key_cache.shape[1], a.key_cache.shape[3]
    for name, new in (("new_key", a.new_key), ("new_value", a.new_value)):
        check_dtype(name, new, a.query.dtype, a.query.device)
    new_key = a.new_key.shape
    if len(new_key) != 4 or not checks.is_shape((*new_key[:2], new_key[3]), (batch, heads, columns)):
        fail(ValueError, "new_key", f"shape ({batch}, {heads}, new, {columns})", new_key)
    fits = (*new_key[:3], a.value_cache.shape[3])
    check_shape("new_value", a.new_value, fits, why="as new_key has, with the columns of value_cache")
    for name in ("key_cache", "value_cache"):
        _check_writable(name, getattr(a, name))


def _check_writable(name: str, cache: Tensor) -> None:
    for step, size in zip(cache.stride(), cache.shape, strict=True):
        if holds(step == 0, False) and holds(size > 1, False):
            fail(ValueError, name, "a cache without expanded dimensions for new_key", f"strides {cache.stride()}")
    if is_compiling():
        return
    if cache.is_neg():
        fail(ValueError, name, "a cache that is no negated view, because new_key is given", "one: see resolve_neg()")


def _check_rotary(a: CacheArguments) -> None:
    cos, most = a.rotary_cos, a.query.shape[3]
    for name in ("rotary_cos", "rotary_sin"):
        check_floating(name, getattr(a, name), a.query.device)
    if cos.dim() != 2 or holds(cos.shape[0] == 0, False) or not 0 < 2 * cos.shape[1] <= most:
        expected = f"shape (positions, rotary_dim / 2), with 1 position or more and a rotary_dim of at most {most}"
        fail(ValueError, "rotary_cos", expected, cos.shape)
    check_shape("rotary_sin", a.rotary_sin, tuple(cos.shape), why="as rotary_cos has")


def check_gradients(arguments: Mapping[str, Any]) -> None:
    if not differentiated(arguments.values()):
        return
    for name, x in arguments.items():
        if differentiated((x,)):
            expected = "a tensor without gradient, because attention_decode has no backward"
            fail(ValueError, name, expected, "one that requires grad: use torch.no_grad()")


def check_values(a: CacheArguments, options: Arguments, most_keys: int) -> None:
    """Raise if the caches overlap, or if lengths, pages or rotary positions on a CPU are out of range."""
    if a.new_key is not None and not is_compiling():
        _check_apart(a)
    if not is_known(a.cache_seqlens) or not a.cache_seqlens.numel():
        return
    lengths = a.cache_seqlens.tolist()
    new = 0 if a.new_key is None else a.new_key.shape[2]
    least, most = min(lengths), max(lengths)
    if least < 0 or most > most_keys:
        fail(ValueError, "cache_seqlens", f"lengths from 0 to the capacity, {most_keys}", least if least < 0 else most)
    if most + new > most_keys:
        expected = f"at most {most_keys - most} rows, because a sequence holds {most} of at most {most_keys} keys"
        fail(ValueError, "new_key", expected, new)
    if a.block_table is not None and is_known(a.block_table):
        _check_pages(a, a.cache_seqlens.long(), new)
    if a.rotary_cos is not None:
        _check_positions(a, options, a.cache_seqlens.long() + new, a.query.shape[2], new)


def _check_apart(a: CacheArguments) -> None:
    """Raise if an append to one cache would overwrite the other."""
    # value_cache may be the first columns of key_cache if new_value is these columns of new_key and nothing is rotated.
    pairs = (a.key_cache, a.value_cache), (a.new_key, a.new_value)
    if not checks.in_memory(pairs[0]) or not share(*pairs[0]):
        return
    alike = checks.in_memory(pairs[1]) and all(
        x.data_ptr() == y.data_ptr() and x.stride() == y.stride() for x, y in pairs
    )
    if not alike or a.rotary_cos is not None:
        expected = "no memory in common with key_cache, because new_key is given"
        fail(ValueError, "value_cache", expected, "a tensor that overlaps it")


def _check_pages(a: CacheArguments, before: Tensor, new: int) -> None:
    pages, _, page, _ = a.key_cache.shape
    number = a.block_table.long()
    if not number.numel() or not page:
        return
    reached = torch.arange(number.shape[1], device=number.device) * page < (before + new)[:, None]
    wrong = number[reached & ((number < 0) | (number >= pages))]
    if len(wrong):
        expected = f"pages from 0 to {pages - 1}" if pages else "lengths of 0 without pages"
        fail(ValueError, "block_table", expected, int(wrong[0]))
    if new:
        position = before[:, None] + torch.arange(new, device=before.device)
        written, place = number.gather(1, position // page), position % page
        expected = "new rows at positions of the cache that are free"
        if len((written * page + place).unique()) < place.numel():
            fail(ValueError, "block_table", expected, "one for two rows: give each sequence its own page there")
        old = before[:, None] - torch.arange(number.shape[1], device=before.device) * page  # old keys from page n on
        most = before.new_zeros(pages).scatter_reduce_(0, number[old > 0], old[old > 0], "amax")
        if bool((place < most[written]).any()):
            fail(ValueError, "block_table", expected, "one that another sequence uses: copy the shared page first")


def _check_positions(a: CacheArguments, options: Arguments, after: Tensor, rows: int, new: int) -> None:
    """Raise if rotary_cos has too few positions, or if a query at a negative position sees keys."""
    bottom_right, most = options.align == "bottom_right", int(after.max())
    needed = max(most if new or (rows and bottom_right) else 0, 0 if bottom_right else rows)
    if needed > len(a.rotary_cos):
        fail(ValueError, "rotary_cos", f"{needed} rows, one for each position", f"{len(a.rotary_cos)} rows")
    right = 0 if options.causal else (options.window or (None, None))[1]
    early = (after > 0) & (after < rows)
    # A query_mask may hide these queries; on a GPU it is not read.
    if bottom_right and options.query_mask is None and bool(early.any()) and (right is None or right > 0):
        got = f"{rows} rows for {int(after[early][0])} keys: pass causal=True, a query_mask or align='top_left'"
        fail(ValueError, "query", "no more rows than keys, because rotary positions begin at 0", got)


def checked(a: CacheArguments, options: Arguments, named: bool = False) -> Decode:
    """Apply autocast, check the arguments, and return a Decode. options: Arguments without query, key and value."""
    # Values on a GPU and in compiled code are not read.
    if isinstance(a.query, Tensor) and (dtype := rules.autocast_dtype(a.query)) != a.query.dtype:
        a = a._replace(query=a.query.to(dtype))
    check_sizes(a)
    query, (batch, heads, rows, _) = a.query, a.query.shape
    key, value = (stand_in(cache, a.block_table) for cache in (a.key_cache, a.value_cache))
    options = check_options(options, rules.Sizes(query.device, query.dtype, batch, heads, rows, key.shape[2]))
    learned = {name: getattr(options, name) for name in INPUTS if name not in a._fields}
    check_gradients({**a._asdict(), **learned})
    check_values(a, options, key.shape[2])
    options = options._replace(query=query, key=key, value=value)
    # Rotary positions always depend on align, which `normalise` ignores without causal and window.
    alignment = dict(top_left=options.align == "top_left") if a.rotary_cos is not None else {}
    call = rules.normalise(options, named=named, **alignment)
    caches = a.key_cache, a.value_cache, a.cache_seqlens, a.block_table
    new = 0 if a.new_key is None else a.new_key.shape[2], a.new_key, a.new_value
    return Decode(call, *caches, *new, a.rotary_cos, a.rotary_sin, a.rotary_interleaved)
