"""What a caller can get wrong about packed sequences, in rules as `checks` has them, and the Call of what is right."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .form import Arguments, Call, Plan, autocast, normalise
from .packing import longest
from .rules import (
    FLOATING,
    Rule,
    apply,
    check,
    divides,
    dtype_of,
    fail,
    is_bool,
    is_strided,
    is_tensor,
    place,
    shape_of,
)


class Packed(NamedTuple):
    """What the caller passed of packed sequences, unchecked; all else is as in `Arguments`."""

    query: Any
    key: Any
    value: Any
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    max_seqlen_q: Any = None
    max_seqlen_k: Any = None
    key_mask: Any = None
    query_mask: Any = None


def _rank(name: str) -> Rule:
    return Rule(name, ValueError, lambda a: getattr(a, name).dim() != 3, "rank 3, (T, H, D)", shape_of(name))


def _sizes(name: str, tensor: str) -> tuple[Rule, ...]:
    """int32 offsets of sequences in the rows of a tensor, whatever they hold."""
    return (
        is_tensor(name),
        Rule(name, TypeError, lambda a: getattr(a, name).dtype != torch.int32, "an int32 tensor", dtype_of(name)),
        *place(name),
        Rule(
            name,
            ValueError,
            lambda a: getattr(a, name).dim() != 1 or getattr(a, name).shape[0] == 0,
            "shape (n + 1,), of n sequences",
            shape_of(name),
        ),
        Rule(
            name,
            ValueError,
            lambda a: getattr(a, name).shape[0] == 1 and getattr(a, tensor).shape[0] != 0,
            f"a sequence, for there are rows in {tensor}",
            shape_of(name),
        ),
    )


def _values(name: str, tensor: str) -> tuple[Rule, ...]:
    """What offsets hold; those on a GPU are not looked at."""

    def values(a: Packed) -> Any:
        offsets = getattr(a, name)
        # Neither does the compiler know what they hold.
        return None if offsets.device.type != "cpu" or torch.compiler.is_compiling() else offsets.tolist()

    def rule(wrong: Callable[[Packed, Any], bool], expected: str, got: Callable[[Packed], Any]) -> Rule:
        return Rule(name, ValueError, lambda a: values(a) is not None and wrong(a, values(a)), expected, got)

    def falls(a: Packed, offsets: list[int]) -> bool:
        return any(after < before for before, after in zip(offsets, offsets[1:], strict=False))

    def fall(a: Packed) -> str:
        offsets = values(a)
        return next(f"{y} after {x}" for x, y in zip(offsets, offsets[1:], strict=False) if y < x)

    def rows(a: Packed) -> Any:
        return getattr(a, tensor).shape[0]

    return (
        rule(lambda a, offsets: offsets[0] != 0, "0 as its first", lambda a: values(a)[0]),
        rule(falls, "no value below the one before it", fall),
        rule(
            lambda a, offsets: offsets[-1] != rows(a),
            f"the number of rows of {tensor} as its last, {{T{tensor[0]}}}",
            lambda a: values(a)[-1],
        ),
    )


def _longest(name: str) -> tuple[Rule, ...]:
    """The longest length, whatever the offsets hold."""

    def number(a: Packed) -> bool:
        given = getattr(a, name)
        return isinstance(given, int | torch.SymInt) and not isinstance(given, bool)

    return (
        Rule(name, TypeError, lambda a: not number(a), "an int or None", lambda a: type(getattr(a, name)).__name__),
        Rule(name, ValueError, lambda a: getattr(a, name) < 0, "a length of 0 or more", lambda a: getattr(a, name)),
    )


def _is_longest(name: str, offsets: str) -> Rule:
    def too_short(a: Packed) -> bool:
        given = getattr(a, offsets)
        known = given.device.type == "cpu" and not torch.compiler.is_compiling()
        return known and longest(given, name) > getattr(a, name)

    return Rule(name, ValueError, too_short, f"at least the longest length in {offsets}", lambda a: getattr(a, name))


def _tokens(name: str, tensor: str) -> tuple[Rule, ...]:
    """A key_mask or query_mask of all packed rows."""
    return (
        is_bool(name),
        *place(name),
        Rule(
            name,
            ValueError,
            lambda a: tuple(getattr(a, name).shape) != (getattr(a, tensor).shape[0],),
            f"shape ({{T{tensor[0]}}},)",
            shape_of(name),
        ),
    )


# In the order in which they are looked for, as in `checks`.
OFFSETS = (
    *_sizes("cu_seqlens_q", "query"),
    *_sizes("cu_seqlens_k", "key"),
    Rule(
        "cu_seqlens_k",
        ValueError,
        lambda a: a.cu_seqlens_k.shape[0] != a.cu_seqlens_q.shape[0],
        "as many as cu_seqlens_q has, {offsets}",
        shape_of("cu_seqlens_k"),
    ),
)
LONGEST = {name: _longest(name) for name in ("max_seqlen_q", "max_seqlen_k")}
TENSORS = (
    *(is_tensor(name) for name in ("query", "key", "value")),
    is_strided("query"),
    *place("key"),
    *place("value"),
    Rule("query", TypeError, lambda a: a.query.dtype not in FLOATING, "a floating dtype", dtype_of("query")),
    Rule("key", TypeError, lambda a: a.key.dtype != a.query.dtype, "the dtype of query, {dtype}", dtype_of("key")),
    Rule(
        "value", TypeError, lambda a: a.value.dtype != a.query.dtype, "the dtype of query, {dtype}", dtype_of("value")
    ),
    *map(_rank, ("query", "key", "value")),
    Rule("query", ValueError, lambda a: a.query.shape[2] == 0, "a head dimension of 1 or more", shape_of("query")),
    Rule("value", ValueError, lambda a: a.value.shape[2] == 0, "a head dimension of 1 or more", shape_of("value")),
    Rule(
        "key",
        ValueError,
        lambda a: a.key.shape[2] != a.query.shape[2],
        "the head dimension of query, {D}",
        shape_of("key"),
    ),
    Rule(
        "value",
        ValueError,
        lambda a: a.value.shape[:2] != a.key.shape[:2],
        "all but the last dimension as in key, {key}",
        shape_of("value"),
    ),
    Rule(
        "key",
        ValueError,
        lambda a: not divides(a.query.shape[1], a.key.shape[1]),
        "a number of heads that divides the {Hq} of query",
        lambda a: f"{a.key.shape[1]} heads",
    ),
    *OFFSETS,
    *_values("cu_seqlens_q", "query"),
    *_values("cu_seqlens_k", "key"),
)
OPTIONS = {
    "max_seqlen_q": (*LONGEST["max_seqlen_q"], _is_longest("max_seqlen_q", "cu_seqlens_q")),
    "max_seqlen_k": (*LONGEST["max_seqlen_k"], _is_longest("max_seqlen_k", "cu_seqlens_k")),
    "key_mask": _tokens("key_mask", "key"),
    "query_mask": _tokens("query_mask", "query"),
}
FACTS: dict[str, Callable[[Packed], Any]] = {
    "device": lambda a: a.query.device,
    "dtype": lambda a: a.query.dtype,
    "D": lambda a: a.query.shape[2],
    "Hq": lambda a: a.query.shape[1],
    "Tq": lambda a: a.query.shape[0],
    "Tk": lambda a: a.key.shape[0],
    "key": lambda a: tuple(a.key.shape),
    "offsets": lambda a: a.cu_seqlens_q.shape[0],
}


def checked_packed(packed: Packed, options: dict[str, Any], need_weights: bool) -> Call:
    """The Call of packed sequences as the caller wrote them, autocast and plans included.

    Args:
        options: those of `attention` but key_mask and query_mask; mask may be a plan of a mask.
    """
    query, key, value, *_ = autocast(Arguments(*packed[:3]))
    packed, options, marks = packed._replace(query=query, key=key, value=value), dict(options), None
    if isinstance(plan := options.get("mask"), Plan):
        for name in ("key_mask", "query_mask"):
            if getattr(plan, name) is not None:
                fail(ValueError, "mask", f"a plan without a {name}, which is of packed rows here", "one that has it")
        # Its blocks that are all seen may hold keys that key_mask hides.
        options["mask"], marks = plan.mask, plan.marks if packed.key_mask is None else None
    apply(TENSORS, packed, FACTS)
    for name, rules in OPTIONS.items():
        if getattr(packed, name) is not None:
            apply(rules, packed, FACTS)
    most_q, most_k = packed.max_seqlen_q, packed.max_seqlen_k
    pairs = options.get("mask"), options.get("bias"), packed.key_mask
    if need_weights or any(x is not None for x in pairs):
        most_q = longest(packed.cu_seqlens_q, "max_seqlen_q") if most_q is None else most_q
        most_k = longest(packed.cu_seqlens_k, "max_seqlen_k") if most_k is None else most_k
    # What is asked of every sequence is asked of a batch of the longest, which has a shape and no memory.
    sizes = len(packed.cu_seqlens_q) - 1, query.shape[0] if most_q is None else most_q
    keys = key.shape[0] if most_k is None else most_k
    check(
        Arguments(
            query.new_empty(()).expand(sizes[0], query.shape[1], sizes[1], query.shape[2]),
            key.new_empty(()).expand(sizes[0], key.shape[1], keys, key.shape[2]),
            value.new_empty(()).expand(sizes[0], value.shape[1], keys, value.shape[2]),
            **options,
        )
    )
    by_head = (x.transpose(0, 1)[None] for x in (query, key, value))
    arguments = Arguments(*by_head, **options)._replace(key_mask=packed.key_mask, query_mask=packed.query_mask)
    call = normalise(arguments, marks)
    return call._replace(offsets_q=packed.cu_seqlens_q, offsets_k=packed.cu_seqlens_k, most_q=most_q, most_k=most_k)
