"""Calls of flash-attn's functions as calls of ours: layouts, options, and errors that name its arguments."""

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..api import attention, attention_decode, attention_varlen
from ..call import cached
from ..call.cached import CacheArguments, is_known
from ..call.form import Arguments, autocast_dtype, autocasting, deterministic
from ..call.rules import check_flags, divides, fail
from ..naive.cached import rotated


class Options(NamedTuple):
    """The options of all functions but flash_attn_with_kvcache."""

    dropout_p: Any
    softmax_scale: Any
    causal: Any
    window_size: Any
    softcap: Any
    alibi_slopes: Any
    deterministic: Any
    return_attn_probs: Any


_OPTIONS = dict(scale="softmax_scale", window="window_size")
_CACHES = dict(query="q", key_cache="k_cache", value_cache="v_cache", new_key="k", new_value="v")
_NAMED = re.compile(r"(^|\b(?:of|as in|as|in|beside|for) )(\w+)")  # where an error names an argument


def _ask(names: Mapping[str, str], function: Callable[..., Any], *tensors: Any, **options: Any) -> Any:
    """function(*tensors, **options); its errors name the arguments as the caller knows them."""
    try:
        return function(*tensors, **options)
    except (ValueError, TypeError, NotImplementedError) as error:
        text = _NAMED.sub(lambda match: match[1] + names.get(match[2], match[2]), str(error))
        if text == str(error):
            raise
        raise type(error)(text) from error


def _check_tensor(name: str, x: Any, rank: int, layout: str) -> None:
    if not isinstance(x, Tensor):
        fail(TypeError, name, "a tensor", type(x).__name__)
    if x.is_nested or x.layout != torch.strided:
        fail(TypeError, name, "a strided tensor", "a nested tensor" if x.is_nested else x.layout)
    if x.dim() != rank:
        fail(ValueError, name, f"rank {rank}, {layout}", tuple(x.shape))


def check_packed(name: str, x: Tensor, layout: str) -> None:
    """Check a tensor of queries, keys and values, or of two of these: as many as its name has letters."""
    rank = layout.count(",") + 1
    _check_tensor(name, x, rank, layout)
    if x.shape[rank - 3] != len(name):
        fail(ValueError, name, f"shape {layout}", tuple(x.shape))


def _check_heads(names: Sequence[str], q: Tensor, k: Tensor, v: Tensor, same_batch: bool = True) -> None:
    """Check (B, S, H, D) tensors here: errors of `attention` would show the shapes of its (B, H, S, D) views."""
    for name, x in zip(names, (q, k, v), strict=True):
        _check_tensor(name, x, 4, "(B, S, H, D)")
    for name, x in ((names[0], q), (names[2], v)):
        if x.shape[3] == 0:
            fail(ValueError, name, "a head dimension of 1 or more", tuple(x.shape))
    if k.shape[3] != q.shape[3]:
        fail(ValueError, names[1], f"the head dimension of {names[0]}, {q.shape[3]}", tuple(k.shape))
    if same_batch and k.shape[0] != q.shape[0]:
        fail(ValueError, names[1], f"the batch size of {names[0]}, {q.shape[0]}", tuple(k.shape))
    if not divides(q.shape[2], k.shape[2]):
        expected = f"a number of heads that divides the {q.shape[2]} of {names[0]}"
        fail(ValueError, names[1], expected, f"{k.shape[2]} heads")
    if v.shape[:3] != k.shape[:3]:
        expected = f"all but the last dimension as in {names[1]}, {tuple(k.shape)}"
        fail(ValueError, names[2], expected, tuple(v.shape))


def _window(window_size: Any) -> tuple[int | None, ...]:
    """window_size as `attention` takes it: None for -1."""
    sides = window_size if isinstance(window_size, tuple | list) else ()
    if len(sides) != 2 or any(not isinstance(side, int | torch.SymInt) or isinstance(side, bool) for side in sides):
        fail(TypeError, "window_size", "(left, right), each an int", repr(window_size))
    if any(side < -1 for side in sides):
        fail(ValueError, "window_size", "no side below -1, which is unbounded", window_size)
    return tuple(None if side == -1 else side for side in sides)


def scores(softmax_scale: Any, causal: Any, window_size: Any, softcap: Any, alibi_slopes: Any) -> dict[str, Any]:
    """The options of the scores, as `attention` takes them."""
    softcap = None if isinstance(softcap, int | float) and softcap == 0 else softcap
    named = dict(scale=softmax_scale, causal=causal, window=_window(window_size), softcap=softcap)
    return named | dict(alibi_slopes=alibi_slopes)


def _as_they_are(q: Any) -> contextlib.AbstractContextManager[Any]:
    """No autocast for float16 and bfloat16, which flash-attn leaves as they are; float32 is cast as elsewhere."""
    half = isinstance(q, Tensor) and q.dtype in (torch.float16, torch.bfloat16)
    return torch.autocast(q.device.type, enabled=False) if half and autocasting(q) else contextlib.nullcontext()


def _run(
    names: dict[str, str], function: Callable[..., Any], tensors: Sequence[Any], options: Options, **more: Any
) -> tuple[Tensor, tuple[Any, ...]]:
    """(output of `attention` or `attention_varlen`, what return_attn_probs returns behind it)."""
    query, *_ = tensors
    check_flags(deterministic=options.deterministic, return_attn_probs=options.return_attn_probs)
    with deterministic(options.deterministic), _as_they_are(query):
        results = _ask(
            _OPTIONS | names,
            function,
            *tensors,
            **more,
            **scores(*options[1:6]),
            dropout_p=options.dropout_p,
            return_lse=options.return_attn_probs,
        )
    return (results[0], (results[1], query.new_empty(0))) if options.return_attn_probs else (results, ())


def attend(names: Sequence[str], q: Tensor, k: Tensor, v: Tensor, options: Options) -> Tensor | Any:
    """`attention` of (B, S, H, D); names are those that the caller has for q, k and v."""
    _check_heads(names, q, k, v)
    by_head = [x.transpose(1, 2) for x in (q, k, v)]
    out, more = _run(dict(zip(("query", "key", "value"), names, strict=True)), attention, by_head, options)
    out = out.transpose(1, 2).contiguous()
    return (out, *more) if more else out


def attend_packed(
    names: dict[str, str], q: Tensor, k: Tensor, v: Tensor, offsets: tuple[Tensor, Tensor, Any, Any], options: Options
) -> Tensor | Any:
    """`attention_varlen`; names are those that the caller has for its arguments."""
    # Some take the longest of the lengths, and leave it a tensor.
    max_seqlen_q, max_seqlen_k = (x.item() if isinstance(x, Tensor) and x.dim() == 0 else x for x in offsets[2:])
    tensors = q, k, v, *offsets[:2]
    out, more = _run(names, attention_varlen, tensors, options, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)
    return (out.contiguous(), *more) if more else out.contiguous()


def _check_row(name: str, x: Tensor, q: Tensor, least: int, most: int) -> None:
    """Check an int32 tensor (B,) of numbers from least to most; values on a GPU are not read."""
    _check_tensor(name, x, 1, "(B,)")
    if x.dtype != torch.int32:
        fail(TypeError, name, "an int32 tensor", x.dtype)
    if x.device != q.device:
        fail(ValueError, name, f"the device of q, {q.device}", x.device)
    if x.shape[0] != q.shape[0]:
        fail(ValueError, name, f"shape ({q.shape[0]},)", tuple(x.shape))
    if is_known(x):
        wrong = x[(x < least) | (x > most)]
        if wrong.numel():
            fail(ValueError, name, f"numbers from {least} to {most}", int(wrong[0]))


def _check_new(q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Any, v: Any) -> None:
    """Check new keys and values, (B, new, Hkv, D or Dv)."""
    for name, x, other in (("k", k, "v"), ("v", v, "k")):
        if x is None:
            fail(ValueError, name, f"a tensor beside {other}", None)
        _check_tensor(name, x, 4, "(B, S, H, D)")
    batch, new = q.shape[0], k.shape[1]
    if (k.shape[0], *k.shape[2:]) != (batch, *k_cache.shape[2:]):
        fail(ValueError, "k", f"shape ({batch}, new, {k_cache.shape[2]}, {k_cache.shape[3]})", tuple(k.shape))
    if v.shape != (batch, new, *v_cache.shape[2:]):
        expected = f"shape ({batch}, {new}, {v_cache.shape[2]}, {v_cache.shape[3]}), as many as k"
        fail(ValueError, "v", expected, tuple(v.shape))


def _lengths(cache_seqlens: Any, q: Tensor, k: Tensor | None, room: int) -> Tensor:
    """cache_seqlens as a tensor (B,), whatever the caller wrote."""
    if isinstance(cache_seqlens, Tensor):
        return cache_seqlens
    if cache_seqlens is None:
        if k is not None:
            fail(ValueError, "cache_seqlens", "an int or a tensor beside k", None)
        cache_seqlens = room
    if not isinstance(cache_seqlens, int | torch.SymInt) or isinstance(cache_seqlens, bool):
        fail(TypeError, "cache_seqlens", "an int, a tensor or None", type(cache_seqlens).__name__)
    if not 0 <= cache_seqlens <= room:
        fail(ValueError, "cache_seqlens", f"a length from 0 to the capacity, {room}", cache_seqlens)
    if k is not None and cache_seqlens + k.shape[1] > room:
        expected = f"at most {room - cache_seqlens} rows after the {cache_seqlens} of a sequence of {room}"
        fail(ValueError, "k", expected, k.shape[1])
    length: Any = cache_seqlens
    return torch.full((q.shape[0],), length, dtype=torch.int32, device=q.device)


def _rotated(names: dict[str, str], caches: CacheArguments, options: dict[str, Any], spread: bool) -> CacheArguments:
    """caches whose query and new_key are rotated as flash-attn does, where `attention_decode` would do it otherwise.

    A new key is rotated by its slot; query i by the length before the append, plus i if spread.
    """
    # All is checked before any of it is computed with. With "top_left" nothing is said of where queries stand.
    everything = Arguments(None, None, None, align="top_left", **options)
    _ask(names, cached.checked, caches, everything)
    start, device = caches.cache_seqlens.long()[:, None], caches.query.device
    rows, new = (torch.arange(x.shape[2], device=device) for x in (caches.query, caches.new_key))
    places = start + (rows if spread else torch.zeros_like(rows))
    cos, sin, interleaved = caches.rotary_cos, caches.rotary_sin, caches.rotary_interleaved
    if places.numel() and is_known(places):
        needed = int(places.max()) + 1
        if needed > cos.shape[0]:
            fail(ValueError, "rotary_cos", f"a row for each of {needed} positions", f"{cos.shape[0]} rows")
    query = caches.query.to(autocast_dtype(caches.query))
    return caches._replace(
        query=rotated(query, places, cos, sin, interleaved),
        new_key=rotated(caches.new_key, start + new, cos, sin, interleaved),
        rotary_cos=None,
        rotary_sin=None,
    )


def attend_cached(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    rotary: tuple[Tensor | None, Tensor | None, bool],
    cache_seqlens: int | Tensor | None,
    cache_batch_idx: Tensor | None,
    cache_leftpad: Tensor | None,
    block_table: Tensor | None,
    options: dict[str, Any],
    need_lse: bool,
) -> Tensor | Any:
    """`attention_decode` of (B, S, H, D), options being those of `scores`; rotary is (cos, sin, interleaved)."""
    _check_heads(("q", "k_cache", "v_cache"), q, k_cache, v_cache, same_batch=False)
    names, batch, room = _OPTIONS | _CACHES, q.shape[0], k_cache.shape[1]
    names["attention_decode"] = "flash_attn_with_kvcache"
    if block_table is not None:
        for name, x in (("cache_batch_idx", cache_batch_idx), ("cache_leftpad", cache_leftpad)):
            if x is not None:
                fail(ValueError, name, "None beside a block_table", type(x).__name__)
        _check_tensor("block_table", block_table, 2, "(B, pages of a sequence)")
        room *= block_table.shape[1]
    elif cache_batch_idx is not None:
        _check_row("cache_batch_idx", cache_batch_idx, q, 0, k_cache.shape[0] - 1)
        names["block_table"] = "cache_batch_idx"
        block_table = cache_batch_idx[:, None]  # a cache is a page
    elif k_cache.shape[0] < batch:
        fail(ValueError, "k_cache", f"the batch size of q, {batch}, or more", tuple(k_cache.shape))
    else:
        k_cache, v_cache = k_cache[:batch], v_cache[:batch]
    if k is not None or v is not None:
        _check_new(q, k_cache, v_cache, k, v)
    lengths = _lengths(cache_seqlens, q, k, room)
    if cache_leftpad is not None:
        _check_row("cache_leftpad", cache_leftpad, q, 0, room)
        key_mask = torch.arange(room, device=q.device) >= cache_leftpad[:, None]
        options = options | dict(key_mask=key_mask)

    by_head = [None if x is None else x.transpose(1, 2) for x in (q, k_cache, v_cache, k, v)]
    query, key, value, new_key, new_value = by_head
    caches = CacheArguments(query, key, value, lengths, block_table, new_key, new_value)
    if rotary[0] is not None or rotary[1] is not None:
        if k is None:
            fail(ValueError, "rotary_cos", "None without k, which it is to turn", "a tensor")
        caches = caches._replace(rotary_cos=rotary[0], rotary_sin=rotary[1], rotary_interleaved=rotary[2])
        # A side of the window that is as long as the cache bounds nothing, for flash-attn.
        spread = options["causal"] or any(side is not None and side < room for side in options["window"])
        if q.shape[1] != k.shape[1] or not (spread or q.shape[1] == 1):
            with _as_they_are(q):
                caches = _rotated(names, caches, options, spread)
    with _as_they_are(q):
        results = _ask(names, attention_decode, **caches._asdict(), **options, return_lse=need_lse)
    if need_lse:
        return results[0].transpose(1, 2).contiguous(), results[1]
    return results.transpose(1, 2).contiguous()
