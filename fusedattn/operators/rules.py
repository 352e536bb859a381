"""Checks the arguments of operators that are called by name, with the rules of `call`.

Sizes, dtypes, devices and numbers. What offsets, lengths, pages and block masks hold is not looked at: kernels stay
inside of the tensors whatever that is.
"""

from typing import Any

import torch
from torch import Tensor

from ..call import cached, layout, packed, rules
from ..call.cached import CacheArguments
from ..call.form import INPUTS, Call, Lengths, Origin, inputs, wide_dtype
from ..call.packed import Packed
from ..call.plan import check_fit, check_masks, pairs_of
from ..call.rules import FLOATING, Rule, Sizes, apply, fail, invalid
from ..cpu import run as cpu
from ..private import holds
from .schema import BACKWARD, FORWARD, TANGENT, stats_columns


def _each_head(name: str) -> tuple[Rule, ...]:
    return (
        rules.is_floating(name),
        *rules.place(name),
        rules.has_shape(name, lambda s: (1, s.Hq), lambda s: (s.B, s.Hq)),
    )


def _side(name: str) -> Rule:
    return invalid(name, "no negative number; None is unbounded", lambda x, _: x is not None and x < 0, lambda x: x)


TENSORS = (rules.has_rank(4, "query"), *rules.TENSORS)
NUMBERS = (_side("left"), _side("right"), *rules.OPTIONS["scale"], *rules.OPTIONS["dropout_p"])
# Of the fields of a Call that may be None. The first two are as long as all packed rows; the others know sequences.
TOKENS = {name: (*rules.OPTIONS[name], rules.has_rank(2, name)) for name in ("key_mask", "query_mask")}
OPTIONS = {
    "mask": (*rules.OPTIONS["mask"], rules.has_rank(4, "mask")),
    "bias": (*rules.OPTIONS["bias"], rules.has_rank(4, "bias")),
    "alibi_slopes": _each_head("alibi_slopes"),
    "sinks": _each_head("sinks"),
    "softcap": rules.OPTIONS["softcap"],
    "seed": rules.OPTIONS["seed"],
}
NEW_KEY_CACHE = (
    rules.is_floating("key_cache"),
    rules.is_strided("key_cache"),
    rules.has_rank(4, "key_cache"),
    rules.has_columns("key_cache"),
    rules.has_rank(1, "cache_seqlens"),
)


def _sizes(query: Tensor, batch: int, rows: int, keys: int) -> Sizes:
    scores = batch, query.shape[1], rows, keys
    return Sizes(query.device, query.dtype, 4, *scores, scores)


def check_call(call: Call, need_weights: bool = False, keys: int | None = None) -> None:
    """Raise for fields of a Call that the kernels cannot take.

    keys: how many there are, of a call whose key and value are caches that have been checked.
    """
    if keys is None:
        apply(TENSORS, call, call)
        keys = call.key.shape[2]
    query = call.query
    whole = sizes = _sizes(query, query.shape[0], query.shape[2], keys)
    if call.cu_seqlens_q is not None or call.cu_seqlens_k is not None:
        _check_packed(call, need_weights)
        rows = query.shape[2] if call.max_seqlen_q is None else call.max_seqlen_q
        keys = keys if call.max_seqlen_k is None else call.max_seqlen_k
        sizes = _sizes(query, call.cu_seqlens_q.shape[0] - 1, rows, keys)  # type: ignore[union-attr]
    apply(NUMBERS, call, whole)
    if call.origin is not None and (len(call.origin) != len(Origin._fields) or min(call.origin[1:]) < 0):
        fail(ValueError, "origin", "shift, and row, key, plane and heads of 0 or more", call.origin)
    if call.dropout_p and call.seed is None:
        fail(ValueError, "seed", "a tensor beside dropout_p", None)
    for table, about in ((TOKENS, whole), (OPTIONS, sizes)):
        for name in table:
            if getattr(call, name) is not None:
                apply(table[name], call, about)
    if call.block_mask is not None:
        apply(BLOCK_MASK, call, sizes)


def _check_packed(call: Call, need_weights: bool) -> None:
    """Raise if offsets do not fit the packed tensors of a Call."""
    if call.query.shape[0] != 1:
        fail(ValueError, "query", "a batch of 1 beside cu_seqlens_q", tuple(call.query.shape))
    query, key, value = (x[0].transpose(0, 1) for x in (call.query, call.key, call.value))
    _check_lengths(
        Packed(query, key, value, call.cu_seqlens_q, call.cu_seqlens_k, call.max_seqlen_q, call.max_seqlen_k)
    )
    if need_weights or any(x is not None for x in (call.mask, call.bias, call.key_mask)):
        _check_longest(call.max_seqlen_q, call.max_seqlen_k, "mask, bias, key_mask and need_weights")


def _check_lengths(arguments: Packed) -> None:
    apply(packed.OFFSETS, arguments, arguments)
    for name, table in packed.LONGEST.items():
        if getattr(arguments, name) is not None:
            apply(table, arguments, arguments)


def _check_longest(max_seqlen_q: int | None, max_seqlen_k: int | None, needed: str) -> None:
    for name, most in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if most is None:
            fail(ValueError, name, f"an int beside {needed}", None)


def _blocks(s: Sizes) -> tuple[int, ...]:
    """Return the shape that a block mask broadcasts to."""
    from ..launch import blocks  # Triton was imported before there was a block mask

    size = blocks.block_mask_size()
    return s.B, s.Hq, -(-s.Sq // size), -(-s.Sk // size)


BLOCK_MASK = (
    *rules.place("block_mask"),
    Rule("block_mask", TypeError, "a tensor of uint8", lambda x, _: x.dtype != torch.uint8, rules.dtype),
    invalid(
        "block_mask",
        lambda _, s: f"rank 4, broadcastable to {_blocks(s)}",
        lambda x, s: x.dim() != 4 or not layout.broadcasts(x, _blocks(s)),
    ),
)


def check_forward(*arguments: Any) -> None:
    _, call, (_, need_weights, _, backend) = FORWARD.split(arguments)
    check_call(call, need_weights)
    check_backend(call, backend)


def check_backend(call: Call, backend: str, also: tuple[str, ...] = ("naive",)) -> None:
    """Raise for an unknown backend, or one that cannot take the call."""
    if backend not in (known := ("hopper", "triton", "cpu", *also)):
        fail(ValueError, "backend", f"one of {', '.join(map(repr, known))}", repr(backend))
    lacks = []
    if backend == "cpu":
        lacks = cpu.limits(call)
    elif backend == "hopper" and holds(call.query.numel() != 0, True) and holds(call.key.numel() != 0, True):
        from ..launch import hopper

        lacks = hopper.limits(call)
    if lacks:
        fail(ValueError, "backend", f"another where {lacks[0]}", repr(backend))


def check_backward(*arguments: Any) -> None:
    """Raise for wrong arguments. Kernels accept stats of 2 columns too."""
    (grad_out, grad_lse, grad_weights, out, weights, stats), call, (backend, need) = BACKWARD.split(arguments)
    needs_weights = grad_weights is not None
    check_call(call, needs_weights)
    check_backend(call, backend)
    rows, dtype = tuple(call.query.shape[:3]), call.query.dtype
    columns = call.key.shape[2] if call.cu_seqlens_q is None else call.max_seqlen_k
    wide, few = wide_dtype(call), stats.dim() == 4 and stats.shape[3] == 2
    stored = wide if call.partial else dtype
    kept = 2 if few and backend != "cpu" else stats_columns(stored, call.value.shape[3], backend)
    results: dict[str, tuple] = {
        "grad_out": (grad_out, dtype, (*rows, call.value.shape[3])),
        "grad_lse": (grad_lse, None, rows),
        "grad_weights": (grad_weights, dtype, (*rows, columns)),
        "out": (out, stored, (*rows, call.value.shape[3])),
        "weights": (weights if needs_weights else None, dtype, (*rows, columns)),
        "stats": (stats, wide, (*rows, kept)),
    }
    for name, (x, wanted, shape) in results.items():
        if x is None:
            continue
        if x.dtype != wanted if wanted else x.dtype not in FLOATING:
            fail(TypeError, name, wanted or "a floating tensor", x.dtype)
        if not layout.is_shape(x.shape, shape):
            fail(ValueError, name, f"shape {shape}, as forward returns it", tuple(x.shape))
        if x.device != call.query.device:
            fail(ValueError, name, f"the device of query, {call.query.device}", x.device)
    if len(need) != len(INPUTS):
        fail(ValueError, "need", f"{len(INPUTS)} bools", need)
    for name, x, needed in zip(INPUTS, inputs(call), need, strict=True):
        if needed and x is None:
            fail(ValueError, "need", f"False for {name}, which is None", True)


def check_tangent(*arguments: Any) -> None:
    (*given, out, stats), call, (need_weights, backend) = TANGENT.split(arguments)
    check_call(call, need_weights)
    check_backend(call, backend)
    if call.partial:
        fail(ValueError, "partial", "False: parts have no derivative in forward mode", True)
    query, rows, width = call.query, call.query.shape[:3], call.value.shape[3]
    expected: dict[str, tuple] = {"out": (out, query.dtype, (*rows, width))}
    if backend != "naive":
        expected["stats"] = stats, wide_dtype(call), (*rows, stats_columns(query.dtype, width, backend))
    field: Any
    for name, x, field in zip(INPUTS, given, inputs(call), strict=True):
        if x is not None and field is None:
            fail(ValueError, f"tangent_{name}", "None beside no such input", "a tensor")
        if x is not None:
            expected[f"tangent_{name}"] = x, field.dtype, tuple(field.shape)
    for name, (x, dtype, shape) in expected.items():
        if x.dtype != dtype:
            fail(TypeError, name, dtype, x.dtype)
        if not layout.is_shape(x.shape, shape):
            fail(ValueError, name, f"shape {shape}", tuple(x.shape))
        if x.device != query.device:
            fail(ValueError, name, f"the device of query, {query.device}", x.device)


def check_block_mask(*arguments: Any) -> None:
    names = "mask", "key_mask", "query_mask", "bias"
    masks = {name: x for name, x in zip(names, arguments, strict=False) if x is not None}
    lengths = Lengths(*arguments[len(names) :])
    check_masks(masks, dict(mask=(4,), key_mask=(2,), query_mask=(2,), bias=(4,)))
    shapes = {name: pairs_of(name, x) for name, x in masks.items()}
    if lengths.cu_seqlens_q is not None or lengths.cu_seqlens_k is not None:
        shapes |= _tokens_of_packed(masks, lengths)
    check_fit(shapes)


def _tokens_of_packed(masks: dict[str, Tensor], lengths: Lengths) -> dict[str, tuple]:
    """Return the shapes of masks of packed rows and keys, as pairs."""
    first = next(iter(masks.values()))
    _, _, rows, keys, max_seqlen_q, max_seqlen_k = lengths
    for name, length in (("rows", rows), ("keys", keys)):
        if holds(length < 0, False):
            fail(ValueError, name, "0 or more", length)
    query, key = (first.new_empty(()).expand(length, 1, 1) for length in (rows, keys))
    _check_lengths(Packed(query, key, key, lengths.cu_seqlens_q, lengths.cu_seqlens_k, max_seqlen_q, max_seqlen_k))
    for name, length in (("key_mask", keys), ("query_mask", rows)):
        if name in masks and not layout.is_shape(masks[name].shape, (1, length)):
            fail(ValueError, name, f"shape {(1, length)}, of all packed rows", tuple(masks[name].shape))
    tokens = [name for name in ("key_mask", "query_mask") if name in masks]
    if tokens:
        _check_longest(max_seqlen_q, max_seqlen_k, tokens[0])
    count = lengths.cu_seqlens_q.shape[0] - 1  # type: ignore[union-attr]
    shapes = dict(key_mask=(count, 1, 1, max_seqlen_k), query_mask=(count, 1, max_seqlen_q, 1))
    return {name: shapes[name] for name in tokens}


def check_append(
    key_cache, value_cache, lengths, table, new_key, new_value, cos, sin, interleaved, named, backend
) -> None:
    check_backend(Call(new_key, new_key, new_value), backend, ())
    new, turning = (new_key, new_value), (cos, sin, interleaved)
    arguments = CacheArguments(key_cache, key_cache, value_cache, lengths, table, *new, *turning)
    apply(NEW_KEY_CACHE, arguments, arguments)
    _, heads, _, dim = key_cache.shape
    level = key_cache.new_empty(()).expand(lengths.shape[0], heads, 0, dim)  # a query that there might be
    cached.check_sizes(arguments._replace(query=level))


def check_caches(arguments: CacheArguments, added: int) -> None:
    """Raise for wrong arguments of `decode` other than the fields of a Call."""
    cached.check_sizes(arguments)
    if added < 0:
        fail(ValueError, "added", "0 or more", added)
