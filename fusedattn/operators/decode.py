"""The operators append, which writes into caches, and decode, which reads them.

Neither has a derivative. Each has a schema, an implementation for CUDA and for CPU, and a fake one.
"""

import contextlib

import torch
from torch import Tensor

from ..call.decode import CacheArguments, Decode, capacity, check_gradients, stand_in
from ..call.layout import dense, is_contiguous
from ..call.options import Call, plain
from ..call.private import argument_names, below_autograd, unmapped
from ..cpu import decode as cpu
from ..launch import failures
from ..launch.failures import KernelUnavailable
from ..naive import decode as cached, formula
from . import fallback, flops, rules
from .namespace import OPERATORS, register, register_derivative
from .schema import declared


def _append(decode: Decode, backend: str) -> None:
    if backend == "cpu":
        cpu.append(decode)
        return
    from ..launch import decode as launch

    try:
        launch.launch_append(decode)
    except KernelUnavailable as why:
        fallback.append(decode, why)


def _append_operator(key_cache, value_cache, lengths, table, new_key, new_value, cos, sin, interleaved, named, backend):
    call = Call(new_key, *_stand_ins(key_cache, value_cache, table), named=named)
    caches = key_cache, value_cache, lengths, table
    _append(Decode(call, *caches, new_key.shape[2], new_key, new_value, cos, sin, interleaved), backend)


def _stand_ins(key_cache, value_cache, table):
    return stand_in(key_cache, table), stand_in(value_cache, table)


def _new(query, value_cache, need_lse):
    """Return uninitialised (out, lse); lse is empty unless needed."""
    rows, wide = query.shape[:3], torch.promote_types(query.dtype, torch.float32)
    shape = (*rows, value_cache.shape[3])
    out = query.new_empty(shape) if is_contiguous(query) else dense(query, shape)
    return out, query.new_empty(rows if need_lse else (0,), dtype=wide)


def _call(query, key_cache, value_cache, lengths, table, *rest):
    options = dict(zip(_OPTIONS, rest[4:-2], strict=True))
    return Call(query, *_stand_ins(key_cache, value_cache, table), **options)


def _attend(decode: Decode, need_lse: bool, backend: str) -> tuple[Tensor, Tensor]:
    """Return (output, lse) after the append."""
    if backend == "cpu":
        out, lse = cpu.attend(decode)
        return out, lse.contiguous() if need_lse else lse.new_empty(0)
    out, lse = _new(decode.call.query, decode.value_cache, need_lse)
    if out.numel():
        from ..launch import decode as launch

        try:
            launch.launch_decode(out, lse, decode)
        except KernelUnavailable as why:
            fallback.decode((out, lse), decode, why)
    return out, lse


def _decode(*arguments):
    _, *caches, added, cos, sin, interleaved = arguments[:9]
    return Decode(_call(*arguments), *caches, added, None, None, cos, sin, interleaved)


def _decode_operator(*arguments):
    return _attend(_decode(*arguments), *arguments[-2:])


def _decompose(*arguments):
    """Compute `decode` with torch's own operators."""
    return fallback.results(cached.dense(_decode(*arguments)), arguments[-2], False, False)[:2]


def _new_decode(query, key_cache, value_cache, *rest):
    return _new(query, value_cache, rest[-2])


def _check_decode(*arguments):
    *caches, added, cos, sin, interleaved = arguments[:9]
    caches_and_angles = CacheArguments(*caches, None, None, cos, sin, interleaved)
    rules.check_caches(caches_and_angles, added)
    call = _call(*arguments)
    rules.check_call(call, keys=capacity(caches_and_angles))
    rules.check_backend(call, arguments[-1], ())


# The options of a Call that one to a cache may have.
_OPTIONS = [
    name
    for name in Call._fields[3:]
    if name not in ("seed", "block_mask", "cu_seqlens_q", "cu_seqlens_k", "dropout_p", "max_seqlen_q", "max_seqlen_k")
    and name not in ("deterministic", "origin", "partial")
]
_TURNING = "Tensor? rotary_cos, Tensor? rotary_sin, bool rotary_interleaved"
register(
    "append(Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor cache_seqlens, Tensor? block_table, Tensor new_key, "
    f"Tensor new_value, {_TURNING}, bool named, str backend) -> ()",
    _append_operator,
    lambda *_: None,
    rules.check_append,
)
register(
    "decode(Tensor query, Tensor key_cache, Tensor value_cache, Tensor cache_seqlens, Tensor? block_table, "
    f"SymInt added, {_TURNING}, {declared(_OPTIONS)}, bool need_lse, str backend) -> (Tensor out, Tensor lse)",
    _decode_operator,
    _new_decode,
    _check_decode,
    _decompose,
)


def _refuse(name):
    """Have an operator raise if a derivative of it is wanted."""
    named = argument_names(getattr(OPERATORS, name).default)
    register_derivative(name, lambda *arguments: check_gradients(dict(zip(named, arguments, strict=False))))


_refuse("append")
_refuse("decode")


def _run_operators(decode: Decode, need_lse: bool, backend: str) -> tuple[Tensor, Tensor]:
    """Append and attend through torch's dispatcher."""
    call, caches = decode.call, (decode.key_cache, decode.value_cache, decode.lengths, decode.table)
    turning = decode.cos, decode.sin, decode.interleaved
    options = [getattr(call, name) for name in _OPTIONS]
    flops.offer(OPERATORS.decode)
    # No derivative is wanted: the call has been checked for that.
    with contextlib.nullcontext() if torch.compiler.is_compiling() else below_autograd():
        if decode.new_key is not None:
            OPERATORS.append(*caches, decode.new_key, decode.new_value, *turning, call.named, backend)
        return OPERATORS.decode(call.query, *caches, decode.added, *turning, *options, need_lse, backend)


def _run(decode: Decode, need_lse: bool, backend: str) -> tuple[Tensor, Tensor]:
    """Append, and return (output, lse); lse is empty unless needed."""
    if plain((*decode.call, *decode[1:])):
        if decode.new_key is not None:
            _append(decode, backend)
        out, lse = _attend(decode, need_lse, backend)
    else:
        out, lse = _run_operators(decode, need_lse, backend)
    if decode.new_key is not None and not torch.compiler.is_compiling():  # to a compiler the operator's schema says so
        torch.autograd.graph.increment_version((decode.key_cache, decode.value_cache))
    return out, lse


def _results(decode: Decode, need_lse: bool, need_weights: bool, backend: str):
    """Return (output, lse or None, weights or None). Weights are computed naively."""
    out, lse = _run(decode, need_lse, backend)
    weights = formula.run_naive(cached.dense(decode), False, True)[2] if need_weights else None
    return out, lse if need_lse else None, weights


def run_triton(decode: Decode, need_lse: bool, need_weights: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
    return _results(decode, need_lse, need_weights, "triton")


def run_cpu(decode: Decode, need_lse: bool, need_weights: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
    return _results(decode, need_lse, need_weights, "cpu")


def unmappable(decode: Decode) -> list[str]:
    """Return why operators cannot take a call under torch.vmap."""
    if decode.new_key is None or torch.compiler.is_compiling():
        return []
    if all(unmapped(x) is x for x in decode[1:] if isinstance(x, Tensor)):
        return []
    return ["torch.vmap maps over no operator that writes, as they do new_key and new_value"]


def failed(decode: Decode) -> list[str]:
    """Return which kernel of a call is known to fail on this machine."""
    if not failures.failed_kernels or torch.compiler.is_compiling():
        return []
    from ..launch import decode as launch

    return [str(why)] if (why := launch.failed(decode)) is not None else []
