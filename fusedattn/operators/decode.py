"""The torch.library operators `append`, which writes to caches, and `decode`, which reads them. No derivatives."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..call.checks import fail, plain
from ..call.decode import CacheArguments, Decode, apart, check_sizes, keys_hold_values, stand_in
from ..call.options import Call
from ..call.private import OLD_COMPILER, below_autograd, transforms_active, unmapped
from ..cpu import decode as cpu_decode
from ..launch.failures import KernelUnavailable, fall_back
from ..naive import decode as naive_decode, formula
from . import flops, repeats, rules
from .namespace import OPERATORS, register
from .schema import DECODE, ROTARY, by_kernel, fill, new_results


def _repeated(what: tuple, decode: Decode, record: Callable[..., Any]) -> list[Tensor | None] | None:
    """Repeat an earlier Decode's launches, if any. what: operator, options. record(recorder, meta Decode) launches."""
    shared, columns = keys_hold_values(decode), decode.value_cache.shape[3]
    kind = *what, decode.added, decode.interleaved, shared and columns
    own: dict[str, Any] = {name: x for name, x in decode._asdict().items() if isinstance(x, Tensor) or x is None}
    own |= dict(value_cache=None) if shared else {}

    def launch(recorder, call, *bare):
        caches = dict(zip(own, bare, strict=True))
        key, table = caches["key_cache"], caches["table"]
        value = key[..., :columns] if shared else caches["value_cache"]
        whole = call._replace(key=stand_in(key, table), value=stand_in(value, table))
        return record(recorder, decode._replace(**caches | dict(call=whole, value_cache=value)))

    # The key and value of the call are the caches, or stand in for paged ones.
    without: dict[str, Any] = dict(key=None, value=None)
    return repeats.repeat(kind, decode.call._replace(**without), [*own.values()], launch)


def _append(decode: Decode, backend: str) -> None:
    if backend in ("cpu", "naive"):
        naive_decode.append(decode)
        return
    from ..launch.decode import launch_append

    key, value = apart(decode)
    decode = decode._replace(new_key=key, new_value=value)
    if _repeated(("append",), decode, lambda recorder, bare: launch_append(bare) or ()) is None:
        by_kernel(decode.call, [lambda: launch_append(decode)], lambda: naive_decode.append(decode))


def _append_operator(key_cache, value_cache, lengths, table, new_key, new_value, cos, sin, interleaved, named, backend):
    call = Call(new_key, stand_in(key_cache, table), stand_in(value_cache, table), named=named)
    caches = key_cache, value_cache, lengths, table
    _append(Decode(call, *caches, new_key.shape[2], new_key, new_value, cos, sin, interleaved), backend)


def _attend(decode: Decode, need_lse: bool, backend: str) -> tuple[Tensor, Tensor]:
    if backend == "cpu":
        out, lse = cpu_decode.attend(decode)
        return out, lse.contiguous() if need_lse else lse.new_empty(0)
    query, (out, lse, _) = decode.call.query, new_results(decode.call, need_lse, False)

    def naive():
        fill((out, lse), formula.run_padded(naive_decode.dense(decode), need_lse, False))

    if not query.numel() or not decode.value_cache.shape[3]:
        return out, lse
    if backend == "naive":
        naive()
        return out, lse
    from ..launch import decode as launch, forward, hopper, run

    def record(recorder, bare):
        results = [recorder.make(x) for x in new_results(bare.call, need_lse, False)[:2]]
        launch.launch_decode(*results, bare)
        return results

    on_hopper = backend == "hopper" and run.has_hopper(query)
    if on_hopper and (lacks := hopper.cache_reasons(decode)):  # a compiler chose it without knowing all sizes
        if decode.call.named:
            fall_back(KernelUnavailable(lacks[0]), named=True)
        on_hopper = False
    found: Any = None if on_hopper else _repeated(("decode", need_lse), decode, record)
    if found is not None:
        return tuple(found)
    launches = [lambda: launch.launch_decode(out, lse, decode)]
    if on_hopper:
        call, own = naive_decode.rotated_query(decode), lse if need_lse else None
        launches.insert(0, lambda: forward.launch_on_hopper(out, own, None, call, decode))
    by_kernel(decode.call, launches, naive)
    return out, lse


def _decode(*arguments):
    """Convert the arguments of the operator `decode` to (Decode, need_lse, backend)."""
    (query, *caches, added, cos, sin, interleaved), options, (need_lse, backend) = DECODE.parts(arguments)
    key_cache, value_cache, _, table = caches
    fields = dict(zip(DECODE.fields, options, strict=True))
    call = Call(query, stand_in(key_cache, table), stand_in(value_cache, table), **fields)
    return Decode(call, *caches, added, None, None, cos, sin, interleaved), need_lse, backend


def _decode_operator(*arguments):
    return _attend(*_decode(*arguments))


def _new_decode(*arguments):
    decode, need_lse, _ = _decode(*arguments)
    return new_results(decode.call, need_lse, False)[:2]


def _decompose(*arguments):
    decode, need_lse, _ = _decode(*arguments)
    out, lse, _ = formula.run_padded(naive_decode.dense(decode), need_lse, False)
    return out, out.new_empty(0) if lse is None else lse


def _check_decode(*arguments):
    (*caches, added, cos, sin, interleaved), _, (_, backend) = DECODE.parts(arguments)
    check_sizes(CacheArguments(*caches, None, None, cos, sin, interleaved))
    if added < 0:
        fail(ValueError, "added", "0 or more", added)
    call = _decode(*arguments)[0].call
    rules.check_call(call, backend, capacity=call.key.shape[2])


_CACHES = "Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor cache_seqlens, Tensor? block_table"
_APPEND = f"append({_CACHES}, Tensor new_key, Tensor new_value, {ROTARY}, bool named, str backend) -> ()"
_DECODE = f"decode({DECODE.schema}) -> (Tensor out, Tensor lse)"
register(_APPEND, _append_operator, lambda *_: None, rules.check_append)
register(_DECODE, _decode_operator, _new_decode, _check_decode, decompose=_decompose)


def _run(decode: Decode, need_lse: bool, need_weights: bool, backend: str):
    """Append new keys, and return (output, lse or None, weights or None). The naive path computes weights."""
    call, appends, compiling = decode.call, decode.new_key is not None, torch.compiler.is_compiling()
    if plain((*call, *decode)):
        if appends:
            _append(decode, backend)
        out, lse = _attend(decode, need_lse, backend)
    else:
        caches = decode.key_cache, decode.value_cache, decode.lengths, decode.table
        rotary, options = (decode.cos, decode.sin, decode.interleaved), [getattr(call, name) for name in DECODE.fields]
        flops.offer(OPERATORS.decode)
        with contextlib.nullcontext() if compiling else below_autograd():  # no input requires a gradient
            if appends:
                # If an operator writes to an input that starts inside of its storage, Inductor before torch 2.13 counts
                # that offset twice, and goes past the end. Copies avoid that; for caches without gaps it removes them.
                written = [x.clone() for x in caches[:2]] if compiling and OLD_COMPILER else caches[:2]
                OPERATORS.append(*written, *caches[2:], decode.new_key, decode.new_value, *rotary, call.named, backend)
                for cache, copy in zip(caches[:2], written, strict=True):
                    if copy is not cache:
                        cache.copy_(copy)
            out, lse = OPERATORS.decode(call.query, *caches, decode.added, *rotary, *options, need_lse, backend)
    if appends and not compiling:  # a compiler sees that caches change
        torch.autograd.graph.increment_version((decode.key_cache, decode.value_cache))
    weights = formula.run_padded(naive_decode.dense(decode), False, True)[2] if need_weights else None
    return out, lse if need_lse else None, weights


run_triton, run_hopper, run_cpu = (functools.partial(_run, backend=name) for name in ("triton", "hopper", "cpu"))


def unmappable(decode: Decode) -> list[str]:
    """Return the reasons why the operators cannot take a call under torch.vmap; [] if they can."""
    if decode.new_key is None or torch.compiler.is_compiling() or not transforms_active():
        return []
    if all(unmapped(x) is x for x in decode if isinstance(x, Tensor)):
        return []
    return ["torch.vmap cannot map over an operator that writes, and new_key and new_value are written to caches"]
