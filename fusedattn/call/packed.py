"""Checks a call of `attention_varlen`, and brings it into the form that every backend takes."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..private import holds
from . import rules
from .form import Arguments, Call, Plan, autocast, is_known, normalise
from .layout import is_size
from .numbers import as_python, is_int
from .packing import longest
from .rules import Rule, Sizes, apply, check_options, fail, invalid


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


def _known(offsets: Tensor) -> list[int] | None:
    """What offsets hold; None where that is not known."""
    return offsets.tolist() if is_known(offsets) else None


def _sizes(name: str, tensor: str) -> tuple[Rule, ...]:
    """The rules of cu_seqlens whatever its values: int32, shape and device."""

    def none_of_some(x: Tensor, a: Packed) -> bool:
        return holds(x.shape[0] == 1, False) and holds(getattr(a, tensor).shape[0] != 0, False)

    return (
        rules.is_tensor(name),
        Rule(name, TypeError, "an int32 tensor", lambda x, _: x.dtype != torch.int32, rules.dtype),
        *rules.place(name),
        invalid(name, "shape (n + 1,), of n sequences", lambda x, _: x.dim() != 1 or holds(x.shape[0] == 0, False)),
        invalid(name, f"a sequence, for there are rows in {tensor}", none_of_some),
    )


def _fall(x: Tensor) -> str | None:
    """Where offsets decrease; None if nowhere, or if not known."""
    known = _known(x) or []
    return next(
        (f"{after} after {before}" for before, after in zip(known, known[1:], strict=False) if after < before), None
    )


def _values(name: str, tensor: str) -> tuple[Rule, ...]:
    """Rules of known cu_seqlens values."""

    def last(_: Tensor, a: Packed) -> str:
        return f"the number of rows of {tensor} as its last, {getattr(a, tensor).shape[0]}"

    def ends_elsewhere(x: Tensor, a: Packed) -> bool:
        return (known := _known(x)) is not None and known[-1] != getattr(a, tensor).shape[0]

    return (
        invalid(name, "0 as its first", lambda x, _: (_known(x) or [0])[0] != 0, lambda x: x.tolist()[0]),
        invalid(name, "no value below the one before it", lambda x, _: _fall(x) is not None, _fall),
        invalid(name, last, ends_elsewhere, lambda x: x.tolist()[-1]),
    )


def _longest(name: str) -> tuple[Rule, ...]:
    """The rules of max_seqlen, without the offsets."""
    return (
        Rule(name, TypeError, "an int or None", lambda x, _: not is_int(x), rules.type_name),
        invalid(name, "a length of 0 or more", lambda x, _: holds(x < 0, False), lambda x: x),
        invalid(
            name, "a length below 2**31, as offsets of int32 have", lambda x, _: holds(x >= 2**31, False), lambda x: x
        ),
    )


def _is_longest(name: str, offsets: str) -> Rule:
    def too_short(x: int, a: Packed) -> bool:
        cu_seqlens = getattr(a, offsets)
        return _known(cu_seqlens) is not None and longest(cu_seqlens, name) > x

    return invalid(name, f"at least the longest length in {offsets}", too_short, lambda x: x)


def _tokens(name: str, tensor: str) -> tuple[Rule, ...]:
    """A key_mask or query_mask of all packed rows."""
    return rules.is_bool(name), *rules.place(name), rules.has_shape(name, lambda a: (getattr(a, tensor).shape[0],))


OFFSETS = (
    *_sizes("cu_seqlens_q", "query"),
    *_sizes("cu_seqlens_k", "key"),
    invalid(
        "cu_seqlens_k",
        lambda _, a: f"as many as cu_seqlens_q has, {a.cu_seqlens_q.shape[0]}",
        lambda x, a: not is_size(x.shape[0], a.cu_seqlens_q.shape[0]),
    ),
)
LONGEST = {name: _longest(name) for name in ("max_seqlen_q", "max_seqlen_k")}
_RANKS = tuple(rules.has_rank(3, name, ", (T, H, D)") for name in ("query", "key", "value"))
TENSORS = (
    *rules.of_query_key_value("key", "value", _RANKS, heads=lambda x: x.shape[1]),
    *OFFSETS,
)
VALUES = (*_values("cu_seqlens_q", "query"), *_values("cu_seqlens_k", "key"))
_LONGEST = {
    "max_seqlen_q": _is_longest("max_seqlen_q", "cu_seqlens_q"),
    "max_seqlen_k": _is_longest("max_seqlen_k", "cu_seqlens_k"),
}
OPTIONS = {
    "max_seqlen_q": (*LONGEST["max_seqlen_q"], _LONGEST["max_seqlen_q"]),
    "max_seqlen_k": (*LONGEST["max_seqlen_k"], _LONGEST["max_seqlen_k"]),
    "key_mask": _tokens("key_mask", "key"),
    "query_mask": _tokens("query_mask", "query"),
}


def check_values(packed: Packed) -> None:
    """Raise for what offsets on a CPU hold, if everything else has been checked."""
    apply(VALUES, packed, packed)
    apply((rule for name, rule in _LONGEST.items() if getattr(packed, name) is not None), packed, packed)


def checked_packed(packed: Packed, options: dict[str, Any], need_weights: bool, named: bool = False) -> Call:
    """The Call of packed sequences as the caller wrote them, autocast and plans included.

    Args:
        options: those of `attention` but key_mask and query_mask; mask may be a plan of a mask.
        named: whether the caller names a backend.
    """
    query, key, value, *_ = autocast(Arguments(*packed[:3]))
    packed, block_mask = packed._replace(query=query, key=key, value=value), None
    arguments = Arguments(query, key, value, **options)
    if isinstance(plan := arguments.mask, Plan):
        for name in ("key_mask", "query_mask"):
            if getattr(plan, name) is not None:
                fail(ValueError, "mask", f"a plan without a {name}, which is of packed rows here", "one that has it")
        # Its blocks that are all seen may hold keys that key_mask hides.
        arguments, block_mask = arguments._replace(mask=plan.mask), plan.block_mask if packed.key_mask is None else None
    apply((*TENSORS, *VALUES), packed, packed)
    for name, table in OPTIONS.items():
        if getattr(packed, name) is not None:
            apply(table, packed, packed)
    max_seqlen_q, max_seqlen_k = as_python(packed.max_seqlen_q), as_python(packed.max_seqlen_k)
    if need_weights or any(x is not None for x in (arguments.mask, arguments.bias, packed.key_mask)):
        max_seqlen_q = longest(packed.cu_seqlens_q, "max_seqlen_q") if max_seqlen_q is None else max_seqlen_q
        max_seqlen_k = longest(packed.cu_seqlens_k, "max_seqlen_k") if max_seqlen_k is None else max_seqlen_k
    # What is asked of every sequence is asked of a batch of the longest.
    most_q = query.shape[0] if max_seqlen_q is None else max_seqlen_q
    most_k = key.shape[0] if max_seqlen_k is None else max_seqlen_k
    scores = packed.cu_seqlens_q.shape[0] - 1, query.shape[1], most_q, most_k
    arguments = check_options(arguments, Sizes(query.device, query.dtype, 4, *scores, scores))
    query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
    tokens = dict(key_mask=packed.key_mask, query_mask=packed.query_mask)
    lengths = dict(cu_seqlens_q=packed.cu_seqlens_q, cu_seqlens_k=packed.cu_seqlens_k)
    lengths |= dict(max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)
    arguments = arguments._replace(query=query, key=key, value=value, **tokens)
    return normalise(arguments, block_mask=block_mask, named=named, **lengths)
