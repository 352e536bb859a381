"""Checks a call of `attention_varlen` and makes its Call."""

from typing import Any, NamedTuple

import torch

from .layout import is_size
from .numbers import as_python, is_int
from .options import Arguments, Call, Plan, autocast, is_known, normalise
from .padding import longest
from .private import holds
from .rules import Sizes, check_bool, check_dtype, check_options, check_query_key_value, check_shape, fail, type_name


class VarlenArguments(NamedTuple):
    """Arguments of packed sequences as the caller wrote them, unchecked, and the masks of packed tokens."""

    query: Any
    key: Any
    value: Any
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    max_seqlen_q: Any = None
    max_seqlen_k: Any = None
    key_mask: Any = None
    query_mask: Any = None


# (offsets, maximum length, packed tensor)
_SIDES = (("cu_seqlens_q", "max_seqlen_q", "query"), ("cu_seqlens_k", "max_seqlen_k", "key"))


def check_lengths(packed: VarlenArguments) -> None:
    """Raise for offsets and maximum lengths of wrong types and sizes, without reading the offsets."""
    for name, longest_name, tensor in _SIDES:
        offsets, rows, most = getattr(packed, name), getattr(packed, tensor).shape[0], getattr(packed, longest_name)
        check_dtype(name, offsets, torch.int32, packed.query.device)
        if offsets.dim() != 1 or holds(offsets.shape[0] == 0, False):
            fail(ValueError, name, "shape (n + 1,), of n sequences", offsets.shape)
        if holds(offsets.shape[0] == 1, False) and holds(rows != 0, False):
            fail(ValueError, name, f"2 offsets or more, because {tensor} has {rows} rows", 1)
        if most is None:
            continue
        if not is_int(most):
            fail(TypeError, longest_name, "an int or None", type_name(most))
        if holds(most < 0, False) or holds(most >= 2**31, False):
            fail(ValueError, longest_name, "a length of 0 or more, below 2**31", most)
    count = packed.cu_seqlens_q.shape[0]
    if not is_size(packed.cu_seqlens_k.shape[0], count):
        fail(ValueError, "cu_seqlens_k", f"{count} offsets, as cu_seqlens_q has", packed.cu_seqlens_k.shape[0])


def check_values(packed: VarlenArguments) -> None:
    """Raise for wrong values of offsets on a CPU, of arguments that `check_lengths` passed."""
    for name, longest_name, tensor in _SIDES:
        offsets, rows, most = getattr(packed, name), getattr(packed, tensor).shape[0], getattr(packed, longest_name)
        if not is_known(offsets):
            continue
        first, *rest = known = offsets.tolist()
        if first != 0:
            fail(ValueError, name, "a first offset of 0", first)
        for before, after in zip(known, rest, strict=False):
            if after < before:
                fail(ValueError, name, "offsets that do not decrease", f"{after} after {before}")
            if most is not None and after - before > most:
                fail(ValueError, longest_name, f"{after - before} or more, the longest length in {name}", most)
        if known[-1] != rows:
            fail(ValueError, name, f"a last offset of {rows}, the number of rows of {tensor}", known[-1])


def checked_varlen(packed: VarlenArguments, options: dict[str, Any], need_weights: bool, named: bool = False) -> Call:
    """Apply autocast and a plan, check the arguments, and return their Call.

    Args:
        options: those of `attention`, without key_mask and query_mask; mask may be a plan of a mask.
        named: the caller named the backend.
    """
    query, key, value, *_ = autocast(Arguments(packed.query, packed.key, packed.value))
    packed, block_mask = packed._replace(query=query, key=key, value=value), None
    arguments = Arguments(query, key, value, **options)
    if isinstance(plan := arguments.mask, Plan):
        for name in ("key_mask", "query_mask"):
            if getattr(plan, name) is not None:
                fail(ValueError, "mask", f"a plan without {name}", f"one with it: pass {name} to attention_varlen")
        # Blocks that the plan marks as fully visible may hold keys that key_mask hides.
        arguments, block_mask = arguments._replace(mask=plan.mask), plan.block_mask if packed.key_mask is None else None
    check_query_key_value(query, key, value, layout="(T, H, D)")
    check_lengths(packed)
    check_values(packed)
    for name, mask, tensor in (("key_mask", packed.key_mask, key), ("query_mask", packed.query_mask, query)):
        if mask is not None:
            check_bool(name, mask, query.device)
            check_shape(name, mask, (tensor.shape[0],), why=f"one for each row of {name.removesuffix('_mask')}")
    max_seqlen_q, max_seqlen_k = as_python(packed.max_seqlen_q), as_python(packed.max_seqlen_k)
    if need_weights or not arguments.mask is arguments.bias is packed.key_mask is None:
        max_seqlen_q = longest(packed.cu_seqlens_q, "max_seqlen_q") if max_seqlen_q is None else max_seqlen_q
        max_seqlen_k = longest(packed.cu_seqlens_k, "max_seqlen_k") if max_seqlen_k is None else max_seqlen_k
    # Options are checked as those of a batch of sequences of the maximum lengths.
    most_q = query.shape[0] if max_seqlen_q is None else max_seqlen_q
    most_k = key.shape[0] if max_seqlen_k is None else max_seqlen_k
    batch, heads = packed.cu_seqlens_q.shape[0] - 1, query.shape[1]
    arguments = check_options(arguments, Sizes(query.device, query.dtype, batch, heads, most_q, most_k))
    query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    arguments = arguments._replace(query=query, key=key, value=value)
    arguments = arguments._replace(key_mask=packed.key_mask, query_mask=packed.query_mask)
    lengths = dict(max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)
    lengths |= dict(cu_seqlens_q=packed.cu_seqlens_q, cu_seqlens_k=packed.cu_seqlens_k)
    return normalise(arguments, block_mask=block_mask, named=named, **lengths)
