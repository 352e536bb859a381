"""Translation of calls of flash-attn's functions: layouts, options, and names of arguments in errors."""

import contextlib
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..api import attention, attention_varlen
from ..call import checks, decode, rules
from ..call.checks import as_python, check_dtype, check_place, check_rank, check_shape, fail, type_name
from ..call.decode import CacheArguments
from ..call.options import Arguments, is_known, override
from ..call.padding import longest, padding
from ..naive.decode import rotated

_PACKED = "query", "key", "value", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"
# An error names an argument at its beginning or after one of these words.
_NAMED = re.compile(r"(^|\b(?:of|as in|as|in|with|for|because|multiply) )(\w+)")
_SHAPE = re.compile(r"\((\w+), (\w+), (\w+), (\w+)\)")


def ask(names: Mapping[str, str], function: Callable[..., Any], *tensors: Any, **options: Any) -> Any:
    """Call a function, and put the caller's layout and argument names into its errors. names: {ours: the caller's}."""
    try:
        return function(*tensors, **options)
    except (ValueError, TypeError, NotImplementedError) as error:
        names = dict(scale="softmax_scale", window="window_size") | dict(names)
        text = _NAMED.sub(lambda match: match[1] + names.get(match[2], match[2]), str(error))
        text = _SHAPE.sub(r"(\1, \3, \2, \4)", text) if function is not attention_varlen and "query" in names else text
        if text == str(error):
            raise
        raise type(error)(text) from error


def check_tensor(name: str, x: Any, layout: str) -> None:
    check_place(name, x)
    check_rank(name, x, layout)


def unpacked(name: str, x: Tensor, layout: str) -> tuple[Tensor, ...]:
    """Check a packed tensor, and split it into q, k and v if `name` is "qkv", or k and v if it is "kv"."""
    check_tensor(name, x, layout)
    if x.shape[-3] != len(name):
        fail(ValueError, name, f"shape {layout}", x.shape)
    return x.unbind(-3)


def scores(softmax_scale: Any, causal: Any, window_size: Any, softcap: Any, alibi_slopes: Any) -> dict[str, Any]:
    """Convert flash-attn's options to keyword arguments of `attention`."""
    sides = window_size
    if isinstance(sides, Tensor):
        check_place("window_size", sides)
    if type(sides).__module__ == "numpy" or isinstance(sides, Tensor) and not sides.is_meta:
        sides = sides.tolist()
    sides = tuple(map(as_python, sides)) if isinstance(sides, tuple | list) else ()
    if len(sides) != 2 or not all(map(checks.is_int, sides)):
        fail(TypeError, "window_size", "(left, right), each an int (-1 for unbounded)", checks.value(window_size))
    if min(sides) < -1:
        fail(ValueError, "window_size", "sides of 0 or more, or -1 for unbounded", sides)
    window = tuple(None if side == -1 else side for side in sides)
    softcap = None if checks.is_number(softcap) and softcap == 0 else as_python(softcap)
    scale = as_python(softmax_scale)
    return dict(scale=scale, causal=causal, window=window, softcap=softcap, alibi_slopes=alibi_slopes)


def without_autocast_of_half(q: Any) -> contextlib.AbstractContextManager[Any]:
    """Return a context that disables autocast if q is float16 or bfloat16, which flash-attn does not cast."""
    half = isinstance(q, Tensor) and q.dtype in (torch.float16, torch.bfloat16)
    return torch.autocast(q.device.type, enabled=False) if half and rules.autocasting(q) else contextlib.nullcontext()


def attend(names: Sequence[str], options: Sequence[Any], q: Any, k: Any, v: Any, *lengths: Any) -> Tensor | Any:
    """Compute `attention` of q, k and v (B, S, H, D), or `attention_varlen` of packed tensors (T, H, D)."""
    # names: the caller's names for q, k, v and, if they differ, for the lengths. options: the options of
    # `flash_attn_func`, in its order. lengths: cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, or none.
    dropout_p, *of_scores, deterministic, return_attn_probs = options
    checks.check_flags(deterministic=deterministic, return_attn_probs=return_attn_probs)
    keywords = dict(scores(*of_scores), dropout_p=as_python(dropout_p), return_lse=return_attn_probs)
    translate = functools.partial(ask, dict(zip(_PACKED, names, strict=False)))
    with override(deterministic=deterministic), without_autocast_of_half(q):
        if lengths:
            *offsets, max_q, max_k = (x.item() if isinstance(x, Tensor) and x.dim() == 0 else x for x in lengths)
            keywords |= dict(max_seqlen_q=as_python(max_q), max_seqlen_k=as_python(max_k))
            results = translate(attention_varlen, q, k, v, *offsets, **keywords)
        else:
            for name, x in zip(names, (q, k, v), strict=True):
                check_tensor(name, x, "(B, S, H, D)")
            results = translate(attention, *(x.transpose(1, 2) for x in (q, k, v)), **keywords)
    out = results[0] if return_attn_probs else results
    out = (out if lengths else out.transpose(1, 2)).contiguous()
    return (out, results[1], q.new_empty(0)) if return_attn_probs else out


def check_range(name: str, x: Tensor, what: str, most: int) -> None:
    if len(wrong := x[(x < 0) | (x > most)]):
        fail(ValueError, name, f"{what} from 0 to {most}", int(wrong[0]))


def gather_pages(
    k: Tensor, v: Tensor, cu_seqlens_k: Tensor, max_seqlen_k: Any, block_table: Tensor
) -> tuple[Tensor, ...]:
    """Return packed keys and values (Tk, Hkv, D or Dv), gathered from the pages k and v, differentiably."""
    # Values on a GPU are not read. Tk is then an upper bound of the total length, and the last rows are 0. A wrong
    # offset or page reads another row of k and v, never memory outside them.
    for name, x in (("k", k), ("v", v)):
        check_tensor(name, x, "(pages, page, Hkv, D)")
    for name, x, layout in (("cu_seqlens_k", cu_seqlens_k, "(B + 1,)"), ("block_table", block_table, "(B, n)")):
        check_dtype(name, x, torch.int32, k.device, "k")
        check_rank(name, x, layout)
    (pages, page), count = k.shape[:2], cu_seqlens_k.shape[0] - 1
    check_shape("v", v, (pages, page, *v.shape[2:]), why="with as many pages and keys as k")
    checks.check_place("v", v, k.device, "k")
    check_shape("block_table", block_table, (count, block_table.shape[1]), why="one row for each sequence")
    capacity = block_table.shape[1] * page if pages else 0
    if is_known(cu_seqlens_k):
        most, total = longest(cu_seqlens_k, "max_seqlen_k"), max(0, int(cu_seqlens_k[-1] - cu_seqlens_k[0]))
        if most > capacity:
            fail(ValueError, "cu_seqlens_k", f"sequences of at most {capacity} keys, to fit into their pages", most)
        if is_known(block_table):
            starts = torch.arange(block_table.shape[1], device=block_table.device) * page
            check_range("block_table", block_table[starts < cu_seqlens_k.diff()[:, None]], "pages", pages - 1)
    else:
        most = max(0, min(capacity, max_seqlen_k)) if checks.is_int(max_seqlen_k) else capacity
        total = count * most
    table = block_table[:, : -(-most // max(page, 1))].clamp(0, max(pages - 1, 0)).long()
    packed = padding(cu_seqlens_k, total, most)
    return tuple(packed.unpad(x[table].flatten(1, 2)) for x in (k, v))


def check_numbers(name: str, x: Any, q: Tensor, most: int) -> None:
    check_dtype(name, x, torch.int32, q.device, "q")
    check_rank(name, x, "(B,)")
    check_shape(name, x, (q.shape[0],), why="one number for each sequence of q")
    if is_known(x):
        check_range(name, x, "numbers", most)


def lengths_of(cache_seqlens: Any, q: Tensor, k: Tensor | None, capacity: int) -> Tensor:
    """Convert cache_seqlens to a tensor (B,). An int holds for all sequences, and None means `capacity`."""
    if isinstance(cache_seqlens, Tensor):
        return cache_seqlens
    if cache_seqlens is None and k is not None:
        fail(ValueError, "cache_seqlens", "an int or a tensor, because k is given", None)
    length = capacity if cache_seqlens is None else as_python(cache_seqlens)
    if not checks.is_int(length):
        fail(TypeError, "cache_seqlens", "an int, a tensor or None", type_name(length))
    if not 0 <= length <= capacity:
        fail(ValueError, "cache_seqlens", f"a length from 0 to the capacity, {capacity}", length)
    if k is not None and length + k.shape[1] > capacity:
        fail(ValueError, "k", f"at most {capacity - length} rows, after {length} of {capacity} keys", k.shape[1])
    return torch.full((q.shape[0],), length, dtype=torch.int32, device=q.device)


def rotate_as_flash_attn(caches: CacheArguments, options: dict[str, Any], spread: bool) -> CacheArguments:
    """Check the arguments; rotate new key j by cache_seqlens + j, and query i by cache_seqlens, plus i if `spread`."""
    # Check all arguments before computing. With "top_left", queries at negative positions do not raise.
    decode.checked(caches, Arguments(None, None, None, align="top_left", **options))
    start, device = caches.cache_seqlens.long()[:, None], caches.query.device
    rows, new = (torch.arange(x.shape[2], device=device) for x in (caches.query, caches.new_key))
    positions = start + (rows if spread else torch.zeros_like(rows))
    angles = caches.rotary_cos, caches.rotary_sin, caches.rotary_interleaved
    if positions.numel() and is_known(positions) and (needed := int(positions.max()) + 1) > len(angles[0]):
        fail(ValueError, "rotary_cos", f"{needed} rows, one for each position", f"{len(angles[0])} rows")
    query = rotated(caches.query.to(rules.autocast_dtype(caches.query)), positions, *angles)
    new_key = rotated(caches.new_key, start + new, *angles)
    return caches._replace(query=query, new_key=new_key, rotary_cos=None, rotary_sin=None)
