"""Calls of flash-attn's functions as calls of ours: layouts, options, and errors that name its arguments."""

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..api import attention, attention_varlen
from ..call import decode
from ..call.decode import CacheArguments
from ..call.numbers import as_python, is_int, is_number
from ..call.options import Arguments, autocast_dtype, autocasting, is_known, override
from ..call.rules import check_flags, check_strided, fail, type_name
from ..naive.decode import rotated

_NAMED = re.compile(r"(^|\b(?:of|as in|as|in|beside|for|because) )(\w+)")  # where an error names an argument
_SHAPE = re.compile(r"\((\w+), (\w+), (\w+), (\w+)\)")


def ask(names: Mapping[str, str], function: Callable[..., Any], *tensors: Any, **options: Any) -> Any:
    """Call a function; its errors get the caller's names and layout of arguments."""
    try:
        return function(*tensors, **options)
    except (ValueError, TypeError, NotImplementedError) as error:
        names = dict(scale="softmax_scale", window="window_size", **names)
        text = _NAMED.sub(lambda match: match[1] + names.get(match[2], match[2]), str(error))
        if function is not attention_varlen:
            text = _SHAPE.sub(r"(\1, \3, \2, \4)", text)
        if text == str(error):
            raise
        raise type(error)(text) from error


def check_tensor(name: str, x: Any, layout: str) -> None:
    """Raise unless x is a strided tensor with as many dimensions as a layout, say "(B, S, H, D)"."""
    check_strided(**{name: x})
    rank = len(layout.split(", "))
    if x.dim() != rank:
        fail(ValueError, name, f"rank {rank}, {layout}", tuple(x.shape))


def unpacked(name: str, x: Tensor, layout: str) -> tuple[Tensor, ...]:
    """Split a tensor named qkv or kv into queries, keys and values, or keys and values."""
    check_tensor(name, x, layout)
    if x.shape[-3] != len(name):
        fail(ValueError, name, f"shape {layout}", tuple(x.shape))
    return x.unbind(-3)


def scores(softmax_scale: Any, causal: Any, window_size: Any, softcap: Any, alibi_slopes: Any) -> dict[str, Any]:
    """Return the options of the scores as `attention` takes them."""
    if isinstance(window_size, Tensor):
        check_strided(window_size=window_size)
    is_array = type(window_size).__module__ == "numpy" or isinstance(window_size, Tensor) and not window_size.is_meta
    sides = window_size.tolist() if is_array else window_size
    sides = tuple(map(as_python, sides)) if isinstance(sides, tuple | list) else ()
    if len(sides) != 2 or not all(map(is_int, sides)):
        fail(TypeError, "window_size", "(left, right), each an int", repr(window_size))
    if min(sides) < -1:
        fail(ValueError, "window_size", "no side below -1, which is unbounded", sides)
    window = tuple(None if side == -1 else side for side in sides)
    softcap = as_python(softcap)
    softcap = None if is_number(softcap) and softcap == 0 else softcap
    softmax_scale = as_python(softmax_scale)
    return dict(scale=softmax_scale, causal=causal, window=window, softcap=softcap, alibi_slopes=alibi_slopes)


def half_kept(q: Any) -> contextlib.AbstractContextManager[Any]:
    """Turn autocast off for float16 and bfloat16, which flash-attn does not cast; float32 is cast as elsewhere."""
    half = isinstance(q, Tensor) and q.dtype in (torch.float16, torch.bfloat16)
    return torch.autocast(q.device.type, enabled=False) if half and autocasting(q) else contextlib.nullcontext()


def _run(
    names: Mapping[str, str], function: Callable[..., Any], tensors: Sequence[Any], options: Sequence[Any], **more: Any
) -> tuple[Tensor, ...]:
    """Return (output,), or with return_attn_probs (output, log-sum-exp, an empty tensor)."""
    dropout_p, *of_scores, repeatable, return_attn_probs = options
    check_flags(deterministic=repeatable, return_attn_probs=return_attn_probs)
    more |= dict(scores(*of_scores), dropout_p=as_python(dropout_p), return_lse=return_attn_probs)
    with override(deterministic=repeatable), half_kept(tensors[0]):
        results = ask(names, function, *tensors, **more)
    return (*results, tensors[0].new_empty(0)) if return_attn_probs else (results,)


def attend(names: Sequence[str], tensors: Sequence[Any], options: Sequence[Any]) -> Tensor | Any:
    """Compute `attention` of q, k and v (B, S, H, D); names are the caller's names for them."""
    for name, x in zip(names, tensors, strict=True):
        check_tensor(name, x, "(B, S, H, D)")
    by_head = [x.transpose(1, 2) for x in tensors]
    out, *more = _run(dict(zip(("query", "key", "value"), names, strict=True)), attention, by_head, options)
    out = out.transpose(1, 2).contiguous()
    return (out, *more) if more else out


def attend_packed(
    names: Mapping[str, str], tensors: Sequence[Any], max_seqlen_q: Any, max_seqlen_k: Any, options: Sequence[Any]
) -> Tensor | Any:
    """Compute `attention_varlen` of its first five arguments; names are {its name: the caller's}."""
    longest = dict(max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)
    for name, x in longest.items():  # some callers leave them a tensor
        longest[name] = x.item() if isinstance(x, Tensor) and x.dim() == 0 else as_python(x)
    out, *more = _run(names, attention_varlen, tensors, options, **longest)
    return (out.contiguous(), *more) if more else out.contiguous()


def check_pages(k: Any, v: Any, cu_seqlens_k: Any, block_table: Any) -> None:
    """Check keys in pages (pages, page, Hkv, D) and their block_table; values on a GPU are not read."""
    for name, x in (("k", k), ("v", v)):
        check_tensor(name, x, "(pages, page, Hkv, D)")
    for name, x, layout in (("cu_seqlens_k", cu_seqlens_k, "(B + 1,)"), ("block_table", block_table, "(B, n)")):
        check_tensor(name, x, layout)
        if x.dtype != torch.int32:
            fail(TypeError, name, "an int32 tensor", x.dtype)
        if x.device != k.device:
            fail(ValueError, name, f"the device of k, {k.device}", x.device)
    if v.shape[:2] != k.shape[:2]:
        fail(ValueError, "v", f"the pages of k, {tuple(k.shape[:2])}", tuple(v.shape))
    if v.device != k.device:
        fail(ValueError, "v", f"the device of k, {k.device}", v.device)
    if block_table.shape[0] != cu_seqlens_k.shape[0] - 1:
        expected = f"a row for each of {cu_seqlens_k.shape[0] - 1} sequences"
        fail(ValueError, "block_table", expected, tuple(block_table.shape))
    if not is_known(cu_seqlens_k):
        return
    lengths = cu_seqlens_k.diff()
    if cu_seqlens_k[0] != 0 or (lengths < 0).any():
        fail(ValueError, "cu_seqlens_k", "offsets that begin with 0 and do not decrease", cu_seqlens_k.tolist())
    room = block_table.shape[1] * k.shape[1]
    if (lengths > room).any():
        fail(ValueError, "cu_seqlens_k", f"at most {room} keys in the pages of a sequence", int(lengths.max()))
    if is_known(block_table):
        starts = torch.arange(block_table.shape[1]) * k.shape[1]
        used = block_table[starts < lengths[:, None]]
        if len(wrong := used[(used < 0) | (used >= k.shape[0])]):
            fail(ValueError, "block_table", f"pages from 0 to {k.shape[0] - 1}", int(wrong[0]))


def out_of_pages(
    k: Tensor, v: Tensor, cu_seqlens_k: Tensor, max_seqlen_k: Any, block_table: Tensor
) -> tuple[Tensor, Tensor]:
    """Return packed keys and values (Tk, Hkv, D), gathered from pages (pages, page, Hkv, D); gradients reach the pages.

    If reading the lengths would wait for a GPU, Tk is a bound of their sum, and the last rows are 0.
    """
    check_pages(k, v, cu_seqlens_k, block_table)
    (count, most), (pages, page) = block_table.shape, k.shape[:2]
    room = most * page if pages else 0
    if is_known(cu_seqlens_k):
        total = int(cu_seqlens_k[-1])
    else:
        total = count * (min(room, max_seqlen_k) if is_int(max_seqlen_k) else room)
    row = torch.arange(total, device=k.device)
    # A wrong offset or page on a GPU reads another row of the pool, and nothing outside.
    sequence = torch.searchsorted(cu_seqlens_k[1:].contiguous(), row, right=True).clamp(max=count - 1)
    place = (row - cu_seqlens_k[sequence]).clamp(0, max(room - 1, 0))
    chosen = block_table[sequence, place // max(page, 1)].clamp(0, max(pages - 1, 0)).long()
    there = (row < cu_seqlens_k[-1])[:, None, None]
    packed_k, packed_v = (torch.where(there, x[chosen, place % max(page, 1)], 0) for x in (k, v))
    return packed_k, packed_v


def check_numbers(name: str, x: Any, q: Tensor, most: int) -> None:
    """Check an int32 tensor (B,) of numbers from 0 to most; values on a GPU are not read."""
    check_tensor(name, x, "(B,)")
    if x.dtype != torch.int32:
        fail(TypeError, name, "an int32 tensor", x.dtype)
    if x.device != q.device:
        fail(ValueError, name, f"the device of q, {q.device}", x.device)
    if x.shape[0] != q.shape[0]:
        fail(ValueError, name, f"shape ({q.shape[0]},)", tuple(x.shape))
    if is_known(x) and len(wrong := x[(x < 0) | (x > most)]):
        fail(ValueError, name, f"numbers from 0 to {most}", int(wrong[0]))


def lengths_of(cache_seqlens: Any, q: Tensor, k: Tensor | None, room: int) -> Tensor:
    """Return cache_seqlens as a tensor (B,); room is the capacity of a sequence."""
    if isinstance(cache_seqlens, Tensor):
        return cache_seqlens
    if cache_seqlens is None:
        if k is not None:
            fail(ValueError, "cache_seqlens", "an int or a tensor beside k", None)
        cache_seqlens = room
    cache_seqlens = as_python(cache_seqlens)
    if not is_int(cache_seqlens):
        fail(TypeError, "cache_seqlens", "an int, a tensor or None", type_name(cache_seqlens))
    if not 0 <= cache_seqlens <= room:
        fail(ValueError, "cache_seqlens", f"a length from 0 to the capacity, {room}", cache_seqlens)
    if k is not None and cache_seqlens + k.shape[1] > room:
        expected = f"at most {room - cache_seqlens} rows after the {cache_seqlens} of a sequence of {room}"
        fail(ValueError, "k", expected, k.shape[1])
    return torch.full((q.shape[0],), cache_seqlens, dtype=torch.int32, device=q.device)


def rotated_as_theirs(caches: CacheArguments, options: dict[str, Any], spread: bool) -> CacheArguments:
    """Check caches, and rotate query and new_key as flash-attn does where `attention_decode` does not.

    A new key is rotated by its slot; query i by the length before the append, plus i if spread.
    """
    # All is checked before anything is computed. With "top_left" no rule is about the positions of queries.
    decode.checked(caches, Arguments(None, None, None, align="top_left", **options))
    start, device = caches.cache_seqlens.long()[:, None], caches.query.device
    rows, new = (torch.arange(x.shape[2], device=device) for x in (caches.query, caches.new_key))
    positions = start + (rows if spread else torch.zeros_like(rows))
    angles = caches.rotary_cos, caches.rotary_sin, caches.rotary_interleaved
    if positions.numel() and is_known(positions) and (needed := int(positions.max()) + 1) > len(angles[0]):
        fail(ValueError, "rotary_cos", f"a row for each of {needed} positions", f"{len(angles[0])} rows")
    query = rotated(caches.query.to(autocast_dtype(caches.query)), positions, *angles)
    new_key = rotated(caches.new_key, start + new, *angles)
    return caches._replace(query=query, new_key=new_key, rotary_cos=None, rotary_sin=None)
