"""Checks of operators that are called by name. They use the functions of the package `call`.

Values of offsets, lengths, pages and block masks are not checked: whatever they are, kernels stay inside the tensors.
"""

from typing import Any

import torch
from torch import Tensor

from ..call import checks, rules
from ..call.checks import FLOATING, broadcasts, check_place, fail, is_shape
from ..call.decode import CacheArguments, check_sizes
from ..call.options import BY_HEAD, INPUTS, Arguments, Call, Origin, inputs, lengths_of, sizes as sizes_of, wide_dtype
from ..call.private import holds
from ..call.rules import Sizes
from ..call.varlen import check_lengths
from ..cpu import run as cpu
from .schema import BACKWARD, FORWARD, TANGENT, stats_columns


def check_call(call: Call, backend: str, need_weights: bool = False, capacity: int | None = None) -> None:
    """Raise if an operator cannot take a Call. capacity: that of the caches, checked before; None without them."""
    query = call.query
    if capacity is None:
        checks.check_rank("query", query, "(B, H, S, D)")
        rules.check_query_key_value(query, call.key, call.value)
    (batch, heads, rows, _), keys = query.shape, call.key.shape[2] if capacity is None else capacity
    tokens = sizes = Sizes(query.device, query.dtype, batch, heads, rows, keys)
    if call.cu_seqlens_q is not None or call.cu_seqlens_k is not None:
        _check_packed(call, need_weights)
        sizes = Sizes(query.device, query.dtype, *sizes_of(call))
    for name in ("left", "right"):
        if (side := getattr(call, name)) is not None and side < 0:
            fail(ValueError, name, "0 or more, or None for unbounded", side)
    if call.origin is not None and (len(call.origin) != len(Origin._fields) or min(call.origin[1:]) < 0):
        fail(ValueError, "origin", "shift, and row, key, plane and heads of 0 or more", call.origin)
    numbers = dict(scale=call.scale, softcap=call.softcap, dropout_p=call.dropout_p, seed=call.seed)
    rules.check_options(Arguments(query, call.key, call.value, call.mask, call.bias, **numbers), sizes)
    if call.dropout_p and call.seed is None:
        fail(ValueError, "seed", "a tensor, because dropout_p is given", None)
    for name in ("mask", "bias", "key_mask", "query_mask"):
        if (x := getattr(call, name)) is not None:
            if name.endswith("_mask"):  # token masks cover all packed tokens; a mask or bias, the longest sequence
                rules.check_tokens(name, x, tokens)
            checks.check_rank(name, x, "(B, S)" if name.endswith("_mask") else "(B, H, Sq, Sk)")
    for name in BY_HEAD:
        if (x := getattr(call, name)) is not None:
            rules.check_heads(name, x, query.device, (1, heads), (sizes.B, heads))
    if call.mask_bits is not None:
        rules.check_words("mask_bits", call.mask_bits, query.device)
        if call.mask_bits.dim() != 2 or 0 in call.mask_bits.shape:
            fail(ValueError, "mask_bits", "rank 2, and not empty", call.mask_bits.shape)
        if call.block_mask is None:
            fail(ValueError, "block_mask", "a tensor, because mask_bits is given", None)
    if call.block_mask is not None:
        size = None if call.mask_bits is None else call.mask_bits.shape[1]
        if size is None or backend not in ("cpu", "naive"):
            from ..launch import blocks

            if size not in (None, blocks.BLOCK):
                fail(ValueError, "mask_bits", f"{blocks.BLOCK} words a block", size)
            size = blocks.BLOCK
        shape = sizes.B, heads, -(-sizes.Sq // size), -(-sizes.Sk // size)
        dtype = torch.int16 if call.block_mask.dtype == torch.int16 else torch.int32
        checks.check_dtype("block_mask", call.block_mask, dtype, query.device)
        if call.block_mask.dim() != 4 or not broadcasts(call.block_mask, shape):
            fail(ValueError, "block_mask", f"rank 4, broadcastable to {shape}", call.block_mask.shape)
    check_backend(call, backend)


def _check_packed(call: Call, need_weights: bool) -> None:
    if call.query.shape[0] != 1:
        fail(ValueError, "query", "a batch of 1, because cu_seqlens_q is given", call.query.shape)
    check_lengths(lengths_of(call), call.query.device)
    if need_weights or not call.mask is call.mask_bits is call.bias is call.key_mask is None:
        for name in ("max_seqlen_q", "max_seqlen_k"):
            if getattr(call, name) is None:
                fail(ValueError, name, "an int, because mask, bias, key_mask or need_weights is given", None)


def check_forward(*arguments: Any) -> None:
    _, call, (_, need_weights, _, backend) = FORWARD.split(arguments)
    check_call(call, backend, need_weights)
    if call.partial and need_weights and call.query.dtype.itemsize == 2:
        fail(ValueError, "need_weights", f"False: parts have no weights in {call.query.dtype}", True)


def check_backend(call: Call, backend: str) -> None:
    if backend not in (known := ("hopper", "triton", "cpu", "naive")):
        fail(ValueError, "backend", f"one of {', '.join(map(repr, known))}", repr(backend))
    lacks = []
    if backend == "cpu":
        lacks = cpu.limits(call)
    elif backend == "hopper" and call.named and holds(call.query.numel() * call.key.numel() != 0, True):
        from ..launch import hopper

        lacks = hopper.limits(call) if hopper.missing is None else []  # else Triton kernels run the call
    if lacks:
        fail(ValueError, "backend", f"another, because {lacks[0]}", repr(backend))


def _check_result(name: str, x: Tensor | None, call: Call, dtype: torch.dtype | None, shape: tuple) -> None:
    """Raise if a result, a gradient or a tangent has another dtype, shape or device than the call requires."""
    if x is None:
        return
    if x.dtype != dtype if dtype else x.dtype not in FLOATING:
        fail(TypeError, name, dtype or "a floating tensor", x.dtype)
    if not is_shape(x.shape, shape):
        fail(ValueError, name, f"shape {shape}", x.shape)
    check_place(name, x, call.query.device)


def check_backward(*arguments: Any) -> None:
    (grad_out, grad_lse, grad_weights, out, weights, stats), call, (backend, need) = BACKWARD.split(arguments)
    check_call(call, backend, grad_weights is not None)
    rows, dtype, width = tuple(call.query.shape[:3]), call.query.dtype, call.value.shape[3]
    stored = wide_dtype(call.query.dtype) if call.partial else dtype
    columns = call.key.shape[2] if call.cu_seqlens_q is None else call.max_seqlen_k
    # Kernels also take stats of two columns, which lack the rounding error of the output.
    rounded = backend == "cpu" or stats.dim() != 4 or stats.shape[3] != 2
    saved = stats_columns(stored, width, backend) if rounded else 2
    _check_result("grad_out", grad_out, call, dtype, (*rows, width))
    _check_result("grad_lse", grad_lse, call, None, rows)
    _check_result("grad_weights", grad_weights, call, dtype, (*rows, columns))
    _check_result("weights", None if grad_weights is None else weights, call, dtype, (*rows, columns))
    _check_result("out", out, call, stored, (*rows, width))
    _check_result("stats", stats, call, wide_dtype(call.query.dtype), (*rows, saved))
    if len(need) != len(INPUTS):
        fail(ValueError, "need", f"{len(INPUTS)} bools", need)
    for name, x, needed in zip(INPUTS, inputs(call), need, strict=True):
        if needed and x is None:
            fail(ValueError, "need", f"False for {name}, which is None", True)


def check_tangent(*arguments: Any) -> None:
    (*tangents, out, stats), call, (need_weights, backend) = TANGENT.split(arguments)
    check_call(call, backend, need_weights)
    if call.partial:
        fail(ValueError, "partial", "False: parts have no derivative in forward mode", True)
    rows, dtype, width = tuple(call.query.shape[:3]), call.query.dtype, call.value.shape[3]
    _check_result("out", out, call, dtype, (*rows, width))
    if backend != "naive":
        _check_result("stats", stats, call, wide_dtype(call.query.dtype), (*rows, stats_columns(dtype, width, backend)))
    for name, tangent, field in zip(INPUTS, tangents, inputs(call), strict=True):
        if field is not None:
            _check_result(f"tangent_{name}", tangent, call, field.dtype, tuple(field.shape))
        elif tangent is not None:
            fail(ValueError, f"tangent_{name}", f"None, because {name} is None", "a tensor")


def check_append(*arguments: Any) -> None:
    key_cache, value_cache, lengths, table, new_key, new_value, *rotary, _, backend = arguments
    check_backend(Call(new_key, new_key, new_value), backend)
    checks.check_floating("key_cache", key_cache, None)
    checks.check_rank("key_cache", key_cache, "(B, H, C, D)")
    checks.check_rank("cache_seqlens", lengths, "(B)")
    if key_cache.shape[3] == 0:
        fail(ValueError, "key_cache", "a head dimension of 1 or more", 0)
    # The shared checks need a query. This one has no rows.
    query = key_cache.new_empty(()).expand(lengths.shape[0], key_cache.shape[1], 0, key_cache.shape[3])
    caches = query, key_cache, value_cache, lengths, table
    check_sizes(CacheArguments(*caches, new_key, new_value, *rotary))
