"""Checks of the arguments of `attention_varlen`, which become the Call that every backend takes."""

from typing import Any

import torch

from . import checks, rules
from .bits import FULL, SOME
from .checks import as_python, check_dtype, check_shape, fail, type_name
from .options import Arguments, Call, Lengths, Plan, is_known
from .padding import longest
from .private import holds
from .rules import check_options, check_query_key_value


def check_lengths(lengths: Lengths, device: torch.device, values: bool = False) -> None:
    """Raise if offsets or maximum lengths are wrong. values: also check the values of offsets on a CPU."""
    sides = []
    for side, tensor, rows in (("q", "query", lengths.rows), ("k", "key", lengths.keys)):
        name, longest_name = f"cu_seqlens_{side}", f"max_seqlen_{side}"
        offsets, most = getattr(lengths, name), getattr(lengths, longest_name)
        check_dtype(name, offsets, torch.int32, device)
        if offsets.dim() != 1 or holds(offsets.shape[0] == 0, False):
            fail(ValueError, name, "shape (n + 1,), of n sequences", offsets.shape)
        if holds(offsets.shape[0] == 1, False) and holds(rows != 0, False):
            fail(ValueError, name, f"2 offsets or more, because {tensor} has {rows} rows", 1)
        if most is not None and not checks.is_int(most):
            fail(TypeError, longest_name, "an int or None", type_name(most))
        if most is not None and (holds(most < 0, False) or holds(most >= 2**31, False)):
            fail(ValueError, longest_name, "a length of 0 or more, below 2**31", most)
        sides.append((name, longest_name, tensor, offsets, rows, most))
    count, count_k = (offsets.shape[0] for *_, offsets, _, _ in sides)
    if not checks.is_size(count_k, count):
        fail(ValueError, "cu_seqlens_k", f"{count} offsets, as cu_seqlens_q has", count_k)
    for name, longest_name, tensor, offsets, rows, most in sides if values else ():
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


def checked_varlen(
    arguments: Arguments, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: Any, max_seqlen_k: Any,
    need_weights: bool, named: bool = False,
) -> Call:  # fmt: skip
    """Apply autocast and a plan, check the arguments, and return them as a Call. named: the caller chose a backend."""
    arguments = rules.autocast(arguments)
    query, key, value, *_ = arguments
    masks: dict[str, Any] = dict(key_mask=arguments.key_mask, query_mask=arguments.query_mask)
    if isinstance(plan := arguments.mask, Plan):
        for name in masks:
            if getattr(plan, name) is not None:
                fail(ValueError, "mask", f"a plan without {name}", f"one with it: pass {name} to attention_varlen")
        arguments = arguments._replace(mask=None)
    check_query_key_value(query, key, value, layout="(T, H, D)")
    lengths = Lengths(cu_seqlens_q, cu_seqlens_k, query.shape[0], key.shape[0], max_seqlen_q, max_seqlen_k)
    check_lengths(lengths, query.device, values=True)
    for name, mask in masks.items():
        if mask is not None:
            checks.check_bool(name, mask, query.device)
            size = lengths.keys if name == "key_mask" else lengths.rows
            check_shape(name, mask, (size,), why=f"one for each row of {name.removesuffix('_mask')}")
    max_seqlen_q, max_seqlen_k = as_python(max_seqlen_q), as_python(max_seqlen_k)
    if need_weights or not plan is arguments.bias is arguments.key_mask is None:
        max_seqlen_q = longest(cu_seqlens_q, "max_seqlen_q") if max_seqlen_q is None else max_seqlen_q
        max_seqlen_k = longest(cu_seqlens_k, "max_seqlen_k") if max_seqlen_k is None else max_seqlen_k
    # Options are checked as for a batch of sequences that all have the maximum lengths.
    most_q = lengths.rows if max_seqlen_q is None else max_seqlen_q
    most_k = lengths.keys if max_seqlen_k is None else max_seqlen_k
    sizes = rules.Sizes(query.device, query.dtype, cu_seqlens_q.shape[0] - 1, query.shape[1], most_q, most_k)
    arguments = check_options(arguments._replace(key_mask=None, query_mask=None), sizes)
    marks = rules.marks_of(plan, sizes)
    if marks and masks["key_mask"] is not None:  # it may hide keys in FULL blocks
        marks["block_mask"] = torch.where(marks["block_mask"] == FULL, SOME, marks["block_mask"])
    query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    arguments = arguments._replace(query=query, key=key, value=value, **masks)
    fields = dict(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, named=named)
    return rules.normalise(arguments, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, **fields, **marks)
