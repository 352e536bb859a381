"""The kernels of `attention_decode` as operators of torch: `append`, which writes into the caches, and `decode`.

Neither has a derivative. As in `ops`, a schema, implementations for CUDA and for Triton's interpreter, and a fake one.
"""

import torch
from torch import Tensor

from . import decode_naive, fallback, naive
from .call import Call
from .decode_call import Decode, stand_in
from .failures import Unusable, any_known
from .layout import dense

_LIBRARY = torch.library.Library("fusedattn", "FRAGMENT")
_LIBRARY.define(
    "append(Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor lengths, Tensor? table, Tensor new_key, "
    "Tensor new_value, Tensor? cos, Tensor? sin, bool interleaved, bool named) -> ()"
)
_LIBRARY.define(
    "decode(Tensor query, Tensor key_cache, Tensor value_cache, Tensor lengths, Tensor? table, SymInt added, "
    "Tensor? cos, Tensor? sin, bool interleaved, Tensor? bias, Tensor? alibi_slopes, Tensor? sinks, Tensor? mask, "
    "Tensor? key_mask, Tensor? query_mask, SymInt? left, SymInt? right, bool top_left, float scale, float? softcap, "
    "bool named, bool need_lse) -> (Tensor out, Tensor lse)"
)


def _append(key_cache, value_cache, lengths, table, new_key, new_value, cos, sin, interleaved, named):
    from . import decode_launch

    nothing = dict.fromkeys(Call._fields[3:]) | dict(top_left=False, scale=1.0, dropout_p=0.0, named=named)
    call = Call(new_key, *_stand_ins(key_cache, value_cache, table), **nothing)
    caches = key_cache, value_cache, lengths, table
    decode = Decode(call, *caches, new_key.shape[2], new_key, new_value, cos, sin, interleaved)
    try:
        decode_launch.append(decode)
    except Unusable as why:
        fallback.append(decode, why)


def _stand_ins(key_cache, value_cache, table):
    return stand_in(key_cache, table), stand_in(value_cache, table)


def _new(query, key_cache, value_cache, *rest):
    """Uninitialised (out, lse) of the arguments of `decode`; lse (B, Hq, Sq) is empty unless needed."""
    rows, wide = query.shape[:3], torch.promote_types(query.dtype, torch.float32)
    out = dense(query, (*rows, value_cache.shape[3]))
    return out, query.new_empty(rows if rest[-1] else (0,), dtype=wide)


def _decode(query, key_cache, value_cache, lengths, table, added, cos, sin, interleaved, *rest):
    out, lse = _new(query, key_cache, value_cache, *rest)
    if out.numel():
        from . import decode_launch

        *options, softcap, named, _ = rest
        bias, slopes, sinks, mask, key_mask, query_mask, left, right, top_left, scale = options
        keys = _stand_ins(key_cache, value_cache, table)
        neither = dict.fromkeys(("seed", "marks", "offsets_q", "offsets_k"))
        numbers = dict(left=left, right=right, top_left=top_left, scale=scale, softcap=softcap, dropout_p=0.0)
        numbers["named"] = named
        call = Call(query, *keys, bias, slopes, sinks, mask, key_mask, query_mask, **neither, **numbers)
        turning = cos, sin, interleaved
        decode = Decode(call, key_cache, value_cache, lengths, table, added, None, None, *turning)
        try:
            decode_launch.attend(out, lse, decode)
        except Unusable as why:
            fallback.decode((out, lse), decode, why)
    return out, lse


for _key in ("CUDA", "CPU"):
    _LIBRARY.impl("append", _append, _key)
    _LIBRARY.impl("decode", _decode, _key)
torch.library.register_fake("fusedattn::append", lambda *_: None, lib=_LIBRARY)
torch.library.register_fake("fusedattn::decode", _new, lib=_LIBRARY)


def run(decode: Decode, need_lse: bool, need_weights: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(output, lse or None, weights or None) of a checked call: the backend "triton". Weights are computed naively."""
    call, caches = decode.call, (decode.key_cache, decode.value_cache, decode.lengths, decode.table)
    turning = decode.cos, decode.sin, decode.interleaved
    if decode.new_key is not None:
        torch.ops.fusedattn.append(*caches, decode.new_key, decode.new_value, *turning, call.named)
        if not torch.compiler.is_compiling():  # to a compiler the operator's schema says so
            torch.autograd.graph.increment_version(caches[:2])
    options = (call.bias, call.alibi_slopes, call.sinks, call.mask, call.key_mask, call.query_mask)
    numbers = call.left, call.right, call.top_left, call.scale, call.softcap, call.named
    out, lse = torch.ops.fusedattn.decode(call.query, *caches, decode.added, *turning, *options, *numbers, need_lse)
    weights = naive.run(decode_naive.dense(decode), False, True)[2] if need_weights else None
    return out, lse if need_lse else None, weights


def failed(decode: Decode) -> list[str]:
    """Why a call cannot take kernels that it would launch: those that do not compile or load on this machine."""
    if not any_known() or torch.compiler.is_compiling():
        return []
    from . import decode_launch

    return [str(why)] if (why := decode_launch.failed(decode)) is not None else []
