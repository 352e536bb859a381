"""One call of `attention_decode`: what a caller can get wrong in it, and the one form that every backend takes."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .form import Arguments, Call, autocast_dtype, differentiated, normalise
from .rules import Rule, check, divides, fail, has_rank, is_flag, is_floating, is_strided, kind_of, place, shape_of


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


# Not properties: the compiler of torch 2.10 does not trace those of a NamedTuple.
def room(decode: Decode) -> int:
    """The most keys that a sequence may have: lengths on a device, which nobody has checked, are taken for less."""
    return decode.call.key.shape[2] if decode.key_cache.shape[0] else 0


def capacity(arguments: CacheArguments) -> int:
    """How many keys a sequence has room for."""
    page, table = arguments.key_cache.shape[2], arguments.block_table
    found: int = page if table is None else page * table.shape[1]
    return found


def stand_in(cache: Tensor, table: Tensor | None) -> Tensor:
    """What a Decode has for the keys or values of its Call."""
    if table is None:
        return cache
    batch, (_, heads, page, dim) = table.shape[0], cache.shape
    return cache.new_empty(()).expand(batch, heads, table.shape[1] * page, dim)


def _tensor(name: str, dtype: torch.dtype | None = None) -> tuple[Rule, ...]:
    """What holds for every tensor but the query: of a dtype, by default that of the query, and where the query is."""

    def is_wrong(a: Any) -> bool:
        x = getattr(a, name)
        return not isinstance(x, Tensor) or x.dtype != (dtype or a.query.dtype)

    expected = f"a tensor of {dtype}" if dtype else "a tensor of the dtype of query, {dtype}"
    return (Rule(name, TypeError, is_wrong, expected, kind_of(name)), *place(name))


def _both(name: str, other: str) -> Rule:
    return Rule(
        name,
        ValueError,
        lambda a: getattr(a, name) is None and getattr(a, other) is not None,
        f"a tensor beside {other}",
        lambda a: None,
    )


def _repeats(x: Tensor) -> bool:
    """Whether it was expanded: several of its elements are then one in memory."""
    return any(step == 0 and size > 1 for step, size in zip(x.stride(), x.shape, strict=True))


def _alone(name: str) -> Rule:
    """Of a cache that is written to."""
    return Rule(
        name,
        ValueError,
        lambda a: _repeats(getattr(a, name)),
        "a cache that new keys can be written to, with no dimension expanded",
        lambda a: f"strides {getattr(a, name).stride()}",
    )


# In the order in which they are looked for: a rule may rely on those above it.
RULES = (
    is_floating("query"),
    is_strided("query"),
    has_rank(4, "query"),
    Rule("query", ValueError, lambda a: a.query.shape[3] == 0, "a head dimension of 1 or more", shape_of("query")),
    *_tensor("key_cache"),
    *_tensor("value_cache"),
    has_rank(4, "key_cache"),
    has_rank(4, "value_cache"),
    Rule(
        "key_cache",
        ValueError,
        lambda a: a.key_cache.shape[3] != a.query.shape[3],
        "the head dimension of query, {D}",
        shape_of("key_cache"),
    ),
    Rule(
        "value_cache",
        ValueError,
        lambda a: a.value_cache.shape[:3] != a.key_cache.shape[:3],
        "all but the last dimension as in key_cache, {key_cache}",
        shape_of("value_cache"),
    ),
    Rule(
        "value_cache",
        ValueError,
        lambda a: a.value_cache.shape[3] == 0,
        "a head dimension of 1 or more",
        shape_of("value_cache"),
    ),
    Rule(
        "key_cache",
        ValueError,
        lambda a: not divides(a.query.shape[1], a.key_cache.shape[1]),
        "a number of heads that divides the {Hq} of query",
        lambda a: f"{a.key_cache.shape[1]} heads",
    ),
    *_tensor("cache_seqlens", torch.int32),
    Rule(
        "cache_seqlens",
        ValueError,
        lambda a: tuple(a.cache_seqlens.shape) != (a.query.shape[0],),
        "shape ({B},)",
        shape_of("cache_seqlens"),
    ),
)
WITHOUT_TABLE = (
    Rule(
        "key_cache",
        ValueError,
        lambda a: a.key_cache.shape[0] != a.query.shape[0],
        "the batch size of query, {B}, or a block_table",
        shape_of("key_cache"),
    ),
)
TABLE = (
    *_tensor("block_table", torch.int32),
    Rule(
        "block_table",
        ValueError,
        lambda a: a.block_table.dim() != 2 or a.block_table.shape[0] != a.query.shape[0],
        "shape ({B}, pages of a sequence)",
        shape_of("block_table"),
    ),
)
NEW = (
    _both("new_key", "new_value"),
    _both("new_value", "new_key"),
    *_tensor("new_key"),
    *_tensor("new_value"),
    Rule(
        "new_key",
        ValueError,
        lambda a: a.new_key.dim() != 4 or (*a.new_key.shape[:2], a.new_key.shape[3]) != _around(a, a.key_cache),
        "shape ({B}, {Hkv}, new, {D})",
        shape_of("new_key"),
    ),
    Rule(
        "new_value",
        ValueError,
        lambda a: tuple(a.new_value.shape) != (*a.new_key.shape[:3], a.value_cache.shape[3]),
        "shape ({B}, {Hkv}, {new}, {Dv}), as many as new_key",
        shape_of("new_value"),
    ),
    _alone("key_cache"),
    _alone("value_cache"),
)
ROTARY = (
    _both("rotary_cos", "rotary_sin"),
    _both("rotary_sin", "rotary_cos"),
    *(rule for name in ("rotary_cos", "rotary_sin") for rule in (is_floating(name), *place(name))),
    Rule(
        "rotary_cos",
        ValueError,
        lambda a: a.rotary_cos.dim() != 2 or a.rotary_cos.shape[0] == 0 or not 0 < 2 * a.rotary_cos.shape[1] <= _dim(a),
        "shape (positions, rotary_dim / 2), of 1 position or more and a rotary_dim of at most {D}",
        shape_of("rotary_cos"),
    ),
    Rule(
        "rotary_sin",
        ValueError,
        lambda a: a.rotary_sin.shape != a.rotary_cos.shape,
        "the shape of rotary_cos, {cos}",
        shape_of("rotary_sin"),
    ),
)


INTERLEAVED = is_flag("rotary_interleaved")


def _around(a: CacheArguments, cache: Tensor) -> tuple[int, int, int]:
    return a.query.shape[0], cache.shape[1], cache.shape[3]


def _dim(a: CacheArguments) -> Any:
    return a.query.shape[3]


def _facts(a: CacheArguments) -> dict[str, Any]:
    """What `expected` may name, of arguments that have come so far."""
    query = a.query
    facts = dict(dtype=query.dtype, device=query.device) if isinstance(query, Tensor) else {}
    if facts and query.dim() == 4:
        facts |= dict(B=query.shape[0], Hq=query.shape[1], D=query.shape[3])
        if all(isinstance(x, Tensor) and x.dim() == 4 for x in (a.key_cache, a.value_cache)):
            facts |= dict(Hkv=a.key_cache.shape[1], Dv=a.value_cache.shape[3], key_cache=tuple(a.key_cache.shape))
    if isinstance(a.new_key, Tensor) and a.new_key.dim() == 4:
        facts["new"] = a.new_key.shape[2]
    if isinstance(a.rotary_cos, Tensor):
        facts["cos"] = tuple(a.rotary_cos.shape)
    return facts


def rules(a: CacheArguments) -> tuple[Rule, ...]:
    """Those that concern a call, in their order."""
    found = (*RULES, *(WITHOUT_TABLE if a.block_table is None else TABLE))
    if a.new_key is not None or a.new_value is not None:
        found += NEW
    if a.rotary_cos is not None or a.rotary_sin is not None:
        found += ROTARY
    return (*found, INTERLEAVED)


def check_sizes(a: CacheArguments) -> None:
    """Raise for what is wrong with arguments, whatever the tensors hold."""
    for rule in rules(a):
        if rule.wrong(a):
            fail(rule.error, rule.argument, rule.expected.format(**_facts(a)), rule.got(a))


def check_gradients(arguments: Mapping[str, Any]) -> None:
    """Raise for a tensor that somebody may want a gradient of."""
    if not differentiated(arguments.values()):
        return
    for name, x in arguments.items():
        if differentiated((x,)):
            expected = "a tensor without a gradient, for attention_decode has none (see torch.no_grad)"
            fail(ValueError, name, expected, "one that requires it")


def is_known(x: Tensor) -> bool:
    """Whether to look at the values of a tensor: it costs no wait, and they are there."""
    return type(x) is Tensor and x.device.type == "cpu" and not torch.compiler.is_compiling()


def _check_values(a: CacheArguments, options: Arguments) -> None:
    """Raise for lengths, pages and positions on the CPU that lie outside of what they count, before any is used."""
    if not is_known(a.cache_seqlens) or not a.cache_seqlens.numel():
        return
    before, room, rows = a.cache_seqlens.long(), capacity(a), a.query.shape[2]
    new = 0 if a.new_key is None else a.new_key.shape[2]
    least, most = int(before.min()), int(before.max())
    if least < 0 or most > room:
        fail(ValueError, "cache_seqlens", f"lengths from 0 to the capacity, {room}", least if least < 0 else most)
    if most + new > room:
        fail(ValueError, "new_key", f"at most {room - most} rows after the {most} of a sequence of {room}", f"{new}")
    if a.block_table is not None:
        _check_pages(a, before, new)
    if a.rotary_cos is not None:
        _check_positions(a, options, before + new, rows, new)


def _check_pages(a: CacheArguments, before: Tensor, new: int) -> None:
    pages, _, page, _ = a.key_cache.shape
    number = a.block_table.long()
    if not number.numel() or not page:
        return
    reached = torch.arange(number.shape[1]) * page < (before + new)[:, None]
    wrong = number[reached & ((number < 0) | (number >= pages))]
    if len(wrong):
        expected = f"pages from 0 to {pages - 1} where the lengths reach"
        fail(ValueError, "block_table", expected if pages else "no lengths without pages", int(wrong[0]))
    if new:
        position = before[:, None] + torch.arange(new)
        place = number.gather(1, position // page) * page + position % page
        if len(place.unique()) < place.numel():
            fail(ValueError, "block_table", "a place of its own for each new key", "one that two sequences write to")


def _check_positions(a: CacheArguments, options: Arguments, after: Tensor, rows: int, new: int) -> None:
    """Rows that stand before the first key are no mistake where they see nothing."""
    bottom_right, most = options.align == "bottom_right", int(after.max())
    needed = max(most if new or (rows and bottom_right) else 0, 0 if bottom_right else rows)
    if needed > a.rotary_cos.shape[0]:
        expected = f"a row for each of {needed} positions"
        fail(ValueError, "rotary_cos", expected, f"{a.rotary_cos.shape[0]} rows")
    right = 0 if options.causal else (options.window or (None, None))[1]
    early = (after > 0) & (after < rows)
    # What a query_mask hides sees nothing either; it may lie on a GPU.
    if bottom_right and options.query_mask is None and bool(early.any()) and (right is None or right > 0):
        expected = "no query that stands before position 0 and sees keys"
        fail(ValueError, "query", expected, f"{rows} rows for {int(after[early][0])} keys")


def checked(arguments: CacheArguments, options: Arguments) -> Decode:
    """The Decode of arguments as the caller wrote them; options hold those that `attention` has too, and no tensors.

    Raises: ValueError or TypeError, in one line, for the first thing that is wrong, before anything is written. Values
        are looked at where they lie on the CPU: in code that is compiled they are taken as they are on a GPU.
    """
    a = arguments
    if isinstance(a.query, Tensor):
        a = a._replace(query=a.query.to(autocast_dtype(a.query)))
    check_sizes(a)
    key, value = (stand_in(cache, a.block_table) for cache in (a.key_cache, a.value_cache))
    options = options._replace(query=a.query, key=key, value=value)
    check(options)
    learned = {name: getattr(options, name) for name in ("bias", "alibi_slopes", "sinks")}
    check_gradients({**arguments._asdict(), **learned})
    _check_values(a, options)
    call = normalise(options)
    if a.rotary_cos is not None:
        call = call._replace(top_left=options.align == "top_left")  # a turn depends on it in any case
    return Decode(call, *a[1:5], 0 if a.new_key is None else a.new_key.shape[2], *a[5:])
