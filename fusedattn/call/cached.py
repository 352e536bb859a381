"""Checks a call of `attention_decode`, and brings it into the form that every backend takes: Decode."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ..private import holds
from . import rules
from .form import Arguments, Call, autocast_dtype, differentiated, in_memory, is_known, normalise
from .layout import is_shape, is_size, share, span
from .rules import Rule, Sizes, apply, check_options, fail, invalid


class CacheArguments(NamedTuple):
    """What the caller passed, unchecked, but for the options that `attention` has as well."""

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
def room(decode: Decode) -> int:
    """The most keys that a sequence may have; unchecked lengths on a device are clamped to it."""
    return decode.call.key.shape[2] if holds(decode.key_cache.shape[0] != 0, True) else 0


def capacity(arguments: CacheArguments) -> int:
    """How many keys a sequence has room for."""
    page, table = arguments.key_cache.shape[2], arguments.block_table
    size: int = page if table is None else page * table.shape[1]
    return size


def stand_in(cache: Tensor, table: Tensor | None) -> Tensor:
    """The cache, or for pages a tensor of shape alone."""
    if table is None:
        return cache
    batch, (_, heads, page, dim) = table.shape[0], cache.shape
    return cache.new_empty(()).expand(batch, heads, table.shape[1] * page, dim)


def _written(name: str) -> tuple[Rule, ...]:
    """The rules of a cache that is written to: not expanded, nor a tensor that torch lets nobody write to here."""
    expected = "a cache that new keys can be written to, "

    def expanded(x: Tensor, _: Any) -> bool:
        sizes = zip(x.stride(), x.shape, strict=True)
        return any(holds(step == 0, False) and holds(size > 1, False) for step, size in sizes)

    def negated(x: Tensor, _: Any) -> bool:
        return not is_compiling() and x.is_neg()

    def frozen(x: Tensor, _: Any) -> bool:
        # Kernels write to it all the same, on a GPU.
        inside = is_compiling() or torch.is_inference_mode_enabled() or x.device.type == "cuda"
        return not inside and x.is_inference()

    return (
        invalid(name, f"{expected}with no dimension expanded", expanded, lambda x: f"strides {x.stride()}"),
        invalid(name, f"{expected}no view that negates", negated, lambda x: "one that does"),
        invalid(name, f"{expected}as outside of torch.inference_mode()", frozen, lambda x: "an inference tensor"),
    )


def _shape_of_new(a: Any, cache: Tensor) -> tuple[int, int, int]:
    """(B, Hkv, columns) of what is appended to a cache."""
    return a.query.shape[0], cache.shape[1], cache.shape[3]


_RANKS = tuple(rules.has_rank(4, name) for name in ("query", "key_cache", "value_cache"))
# In the order in which they are looked for: a rule may rely on those above it.
RULES = (
    *rules.of_query_key_value("key_cache", "value_cache", _RANKS, rules.heads),
    *rules.of_dtype("cache_seqlens", torch.int32),
    invalid(
        "cache_seqlens",
        lambda _, a: f"shape ({a.query.shape[0]},)",
        lambda x, a: not is_shape(x.shape, (a.query.shape[0],)),
    ),
)
WITHOUT_TABLE = (
    invalid(
        "key_cache",
        lambda _, a: f"the batch size of query, {a.query.shape[0]}, or a block_table",
        lambda x, a: not is_size(x.shape[0], a.query.shape[0]),
    ),
)
TABLE = (
    *rules.of_dtype("block_table", torch.int32),
    invalid(
        "block_table",
        lambda _, a: f"shape ({a.query.shape[0]}, pages of a sequence)",
        lambda x, a: x.dim() != 2 or not is_size(x.shape[0], a.query.shape[0]),
    ),
)
NEW = (
    rules.is_beside("new_key", "new_value"),
    rules.is_beside("new_value", "new_key"),
    *rules.of_dtype("new_key"),
    *rules.of_dtype("new_value"),
    invalid(
        "new_key",
        lambda _, a: "shape ({}, {}, new, {})".format(*_shape_of_new(a, a.key_cache)),
        lambda x, a: x.dim() != 4 or not is_shape((*x.shape[:2], x.shape[3]), _shape_of_new(a, a.key_cache)),
    ),
    invalid(
        "new_value",
        lambda _, a: f"shape {(*a.new_key.shape[:3], a.value_cache.shape[3])}, as many as new_key",
        lambda x, a: not is_shape(x.shape, (*a.new_key.shape[:3], a.value_cache.shape[3])),
    ),
    *_written("key_cache"),
    *_written("value_cache"),
)
ROTARY = (
    rules.is_beside("rotary_cos", "rotary_sin"),
    rules.is_beside("rotary_sin", "rotary_cos"),
    *(rule for name in ("rotary_cos", "rotary_sin") for rule in (rules.is_floating(name), *rules.place(name))),
    invalid(
        "rotary_cos",
        lambda _, a: (
            f"shape (positions, rotary_dim / 2), of 1 position or more and a rotary_dim of at most {a.query.shape[3]}"
        ),
        lambda x, a: x.dim() != 2 or holds(x.shape[0] == 0, False) or not 0 < 2 * x.shape[1] <= a.query.shape[3],
    ),
    invalid(
        "rotary_sin",
        lambda _, a: f"the shape of rotary_cos, {tuple(a.rotary_cos.shape)}",
        lambda x, a: not is_shape(x.shape, a.rotary_cos.shape),
    ),
)
INTERLEAVED = rules.is_flag("rotary_interleaved")


def check_sizes(a: CacheArguments) -> None:
    """Raise for wrong arguments, without reading tensors' values."""
    concerned = (INTERLEAVED, *RULES, *(WITHOUT_TABLE if a.block_table is None else TABLE))
    if a.new_key is not None or a.new_value is not None:
        concerned += NEW
    if a.rotary_cos is not None or a.rotary_sin is not None:
        concerned += ROTARY
    apply(concerned, a, a)


def check_gradients(arguments: Mapping[str, Any]) -> None:
    """Raise for a tensor that somebody may want a gradient of."""
    if not differentiated(arguments.values()):
        return
    for name, x in arguments.items():
        if differentiated((x,)):
            expected = "a tensor without a gradient, for attention_decode has none (see torch.no_grad)"
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
        fail(ValueError, "value_cache", "memory of its own beside new_key", "some of key_cache")


def _check_pages(a: CacheArguments, before: Tensor, new: int) -> None:
    pages, _, page, _ = a.key_cache.shape
    number = a.block_table.long()
    if not number.numel() or not page:
        return
    reached = torch.arange(number.shape[1], device=number.device) * page < (before + new)[:, None]
    wrong = number[reached & ((number < 0) | (number >= pages))]
    if len(wrong):
        expected = f"pages from 0 to {pages - 1} where the lengths reach"
        fail(ValueError, "block_table", expected if pages else "no lengths without pages", int(wrong[0]))
    if new:
        position = before[:, None] + torch.arange(new, device=before.device)
        written, place = number.gather(1, position // page), position % page
        own = "a place of its own for each new key"
        if len((written * page + place).unique()) < place.numel():
            fail(ValueError, "block_table", own, "one that two sequences write to")
        old = before[:, None] - torch.arange(number.shape[1], device=before.device) * page  # in a page and behind it
        most = before.new_zeros(pages).scatter_reduce_(0, number[old > 0], old[old > 0], "amax")
        if bool((place < most[written]).any()):
            fail(ValueError, "block_table", own, "one where a sequence has an old key")


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
        expected = "no query that stands before position 0, unless causal or a query_mask hides all keys from it"
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
    query, (batch, heads, rows, _), keys = a.query, a.query.shape, capacity(a)
    options = check_options(
        options, Sizes(query.device, query.dtype, 4, batch, heads, rows, keys, (batch, heads, rows, keys))
    )
    learned = {name: getattr(options, name) for name in ("bias", "alibi_slopes", "sinks")}
    check_gradients({**arguments._asdict(), **learned})
    check_values(a, options)
    key, value = (stand_in(cache, a.block_table) for cache in (a.key_cache, a.value_cache))
    options = options._replace(query=query, key=key, value=value)
    # An angle depends on the alignment in any case.
    level = dict(top_left=options.align == "top_left") if a.rotary_cos is not None else {}
    call = normalise(options, named=named, **level)
    return Decode(call, *a[1:5], 0 if a.new_key is None else a.new_key.shape[2], *a[5:])
