"""Attention of nested tensors in the layout torch.jagged: packs them for `attention_varlen`, and nests the results."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .checks import MASK, check_tensors, fail, got_for_mask
from .options import Arguments
from .private import eager, longest, ragged_dim


def _check(query: Any, key: Any, value: Any) -> None:
    check_tensors(key=key, value=value)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.layout != torch.jagged:
            expected = "a nested tensor of layout torch.jagged" + ", as query is" * (name != "query")
            fail(TypeError, name, expected, tensor.layout)
        if tensor.dim() != 4 or ragged_dim(tensor) != 2:
            expected = "shape (B, H, ragged, D), transposed from (B, ragged, H, D)"
            fail(ValueError, name, expected, tensor.shape)
        if tensor.shape[0] != query.shape[0]:
            fail(ValueError, name, f"a batch size of {query.shape[0]}, as query has", tensor.shape)
    if value.shape[2] != key.shape[2]:
        got = f"{value.shape[2]}: make both from the same offsets tensor"
        fail(ValueError, "value", f"the ragged dimension of key, {key.shape[2]}", got)


def _tokens(name: str, mask: Any, like: Tensor) -> Tensor | None:
    """Check a jagged token mask (B, ragged) against `like` (B, H, ragged, D), and return it packed as (T,)."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        fail(TypeError, name, MASK, got_for_mask(mask))
    jagged = mask.layout == torch.jagged
    if not jagged or mask.dim() != 2 or mask.shape[1] != like.shape[2]:
        got = mask.shape if jagged or not mask.is_nested else "a nested tensor of another layout"
        fail(ValueError, name, f"a nested (B, {like.shape[2]}), made from the same offsets tensor", got)
    return mask.contiguous().values()


def pack(arguments: Arguments) -> tuple[Arguments, tuple[Any, ...], Tensor]:
    """Return (Arguments of `attention_varlen`, its offsets and maximum lengths, offsets of nested results)."""
    query, key, value, *_ = arguments
    _check(query, key, value)
    masks = dict(key_mask=_tokens("key_mask", arguments.key_mask, key))
    masks |= dict(query_mask=_tokens("query_mask", arguments.query_mask, query))
    query, key, value = (x.transpose(1, 2).contiguous() for x in (query, key, value))  # (B, ragged, H, D)
    lengths = query.offsets().int(), key.offsets().int(), longest(query), longest(key)
    packed = dict(query=query.values(), key=key.values(), value=value.values(), **masks)
    return arguments._replace(**packed), lengths, query.offsets()


def attend_nested(function: Callable[..., Any], arguments: Arguments, **more: Any) -> Tensor | Any:
    """Compute `attention` of nested tensors; the results are nested. function takes what `attention_varlen` takes."""
    # Query, key and value are (B, H, ragged, D), transposed from (B, ragged, H, D); key and value share offsets. Token
    # masks are nested bool (B, ragged), or None.
    packed, (*offsets, max_seqlen_q, max_seqlen_k), of_query = pack(arguments)
    options = packed._asdict()
    needed = more.get("return_weights") or any(options[name] is not None for name in ("mask", "bias", "key_mask"))
    if needed and torch.compiler.is_compiling() and (max_seqlen_q is None or max_seqlen_k is None):
        # The lengths are unknown, so break the graph. If this raised, code that catches errors would change its result.
        return _attend_eagerly(function, arguments, **more)
    tensors = [options.pop(name) for name in ("query", "key", "value")]
    more |= dict(max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)
    results = function(*tensors, *offsets, **options, **more)

    def nested(packed: Tensor) -> Tensor:
        return torch.nested.nested_tensor_from_jagged(packed, of_query).transpose(1, 2)

    if not isinstance(results, tuple):
        return nested(results)
    out, *others = results
    return (nested(out), *(nested(x.transpose(0, 1)) for x in others))


_WHY = "a whole graph with masks, bias or return_weights needs nested tensors made with min_seqlen and max_seqlen"
_attend_eagerly = eager(attend_nested, _WHY)
