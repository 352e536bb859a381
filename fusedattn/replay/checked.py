"""Runs calls to caches and of packed sequences on a CPU, those like an earlier one without checking it all again.

Shapes, strides, dtypes and options are checked once; what lengths, pages and offsets hold is checked each time.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from .. import backends
from ..call import cached, packed
from ..call.cached import CacheArguments, Decode, stand_in
from ..call.form import Arguments, Call, asked, packed_results, rank4, results, rows
from ..call.packed import Packed
from ..call.rules import check_flags
from ..cpu import cached as cpu
from ..operators import attention, cached as operators, dtensors
from . import cache

_OFFSETS = 5  # how many tensors of packed sequences come before those of options
_CACHES = len(CacheArguments._fields) - 1  # tensors among them: all but rotary_interleaved


class _Known(NamedTuple):
    """What is remembered of a call to caches: itself without its tensors, and `is_one_call` of it."""

    decode: Decode
    is_one_call: bool


def attend_cached(arguments: CacheArguments, options: Arguments, *more: Any) -> Tensor | Any:
    """What `attention_decode` returns; more are return_lse, return_weights and the backend.

    Args:
        options: those that `attention` has too.
    """
    return_lse, return_weights, backend = more
    named = asked.backend if backend is None else backend
    tensors = *arguments[:_CACHES], *_tensors_of(options)
    numbers = *_numbers_of(options), return_lse, return_weights, named, torch.is_grad_enabled(), arguments[_CACHES]
    known = cache.recall(tensors, numbers) if type(numbers[-1]) is bool else None
    if known is not None:
        lengths = cached.check_values(arguments, options)
        if known.is_one_call and lengths and lengths[0] and lengths.count(lengths[0]) == len(lengths):
            out, lse = cpu.attend_at_once(*arguments[:3], lengths[0], known.decode.call.scale)
        else:
            decode = _decode(known.decode, arguments, options)
            cpu.append(decode)
            out, lse = cpu.attend(decode)
        return results(4, out, lse.contiguous() if return_lse else None)
    check_flags(return_lse=return_lse, return_weights=return_weights)
    dtensors.refuse("attention_decode", options._asdict() | arguments._asdict())
    decode = cached.checked(arguments, options, named is not None)
    chosen = backends.choose(decode, return_weights, named)
    if chosen.run is operators.run_on_cpu and not (return_weights or is_compiling()):
        without = _without_tensors(decode)._replace(call=_without_tensors(decode.call))
        cache.remember(tensors, numbers, _Known(without, cpu.is_one_call(decode)))
    out, lse, weights = chosen.run(decode, return_lse, return_weights)
    return results(4, out, lse if return_lse else None, weights)


def _without_tensors(known: Any) -> Any:
    """What of a Call or a Decode may be kept: tensors would live as long, and so would graphs that they come of."""
    return known._replace(**{name: None for name, x in known._asdict().items() if isinstance(x, Tensor)})


def _tensors_of(options: Arguments) -> tuple:
    a = options
    return a.mask, a.bias, a.key_mask, a.query_mask, a.alibi_slopes, a.sinks


def _numbers_of(options: Arguments) -> tuple:
    a = options
    return a.causal, a.window, a.align, a.scale, a.softcap, a.dropout_p


def _without_tokens(options: Arguments) -> dict[str, Any]:
    """Options as `checked_packed` takes them."""
    tokens = "query", "key", "value", "key_mask", "query_mask"
    return {name: x for name, x in options._asdict().items() if name not in tokens}


def _options_of(tensors: tuple) -> dict[str, Any]:
    """`_tensors_of` options, as a Call has them."""
    mask, bias, key_mask, query_mask, slopes, sinks = tensors
    if mask is bias is key_mask is query_mask is slopes is sinks is None:
        return {}
    tokens = dict(key_mask=rows(key_mask), query_mask=rows(query_mask))
    return tokens | dict(mask=rank4(mask), bias=rank4(bias), alibi_slopes=rows(slopes), sinks=rows(sinks))


def _decode(known: Decode, arguments: CacheArguments, options: Arguments) -> Decode:
    """The Decode of arguments that are like those of a known one."""
    query, key_cache, value_cache, lengths, table, new_key, new_value, cos, sin, interleaved = arguments
    key, value = stand_in(key_cache, table), stand_in(value_cache, table)
    call = known.call._replace(query=query, key=key, value=value, **_options_of(_tensors_of(options)))
    caches = key_cache, value_cache, lengths, table
    return Decode(call, *caches, known.added, new_key, new_value, cos, sin, interleaved)


def attend_packed(arguments: Packed, options: Arguments, *more: Any) -> Tensor | Any:
    """What `attention_varlen` returns; more are return_lse, return_weights and the backend.

    Args:
        options: those that `attention` has too, but for key_mask and query_mask, which are among the arguments.
    """
    return_lse, return_weights, backend = more
    named = asked.backend if backend is None else backend
    *packed_tensors, max_seqlen_q, max_seqlen_k, key_mask, query_mask = arguments
    tensors = *packed_tensors, *_tensors_of(options._replace(key_mask=key_mask, query_mask=query_mask))
    lengths = max_seqlen_q, max_seqlen_k
    flags = return_lse, return_weights, named, torch.is_grad_enabled()
    numbers = *_numbers_of(options), *flags, *lengths
    may_know = options.seed is None and all(x is None or type(x) is int for x in lengths)
    known: Call | None = cache.recall(tensors, numbers) if may_know else None
    if known is not None:
        packed.check_values(arguments)
        query, key, value = (x.transpose(0, 1)[None] for x in packed_tensors[:3])
        offsets = dict(cu_seqlens_q=arguments.cu_seqlens_q, cu_seqlens_k=arguments.cu_seqlens_k)
        call = known._replace(query=query, key=key, value=value, **offsets, **_options_of(tensors[_OFFSETS:]))
        out, lse, weights = attention.run_on_cpu(call, return_lse, return_weights)
        return packed_results(out, lse, weights)
    check_flags(return_lse=return_lse, return_weights=return_weights)
    dtensors.refuse("attention_varlen", options._asdict() | arguments._asdict())
    call = packed.checked_packed(arguments, _without_tokens(options), return_weights, named is not None)
    chosen = backends.choose(call, return_weights, named)
    # Longest lengths that were read from these offsets say nothing of others.
    if may_know and chosen.run is attention.run_on_cpu and (call.max_seqlen_q, call.max_seqlen_k) == lengths:
        cache.remember(tensors, numbers, _without_tensors(call))
    out, lse, weights = chosen.run(call, return_lse, return_weights)
    return packed_results(out, lse if return_lse else None, weights)
