"""The functions of flash-attn 2.8: the same names, arguments, defaults and layouts.

Examples:
    >>> from fusedattn.compat.flash_attn import flash_attn_func
    >>> query = key = value = torch.randn(2, 128, 8, 64)
    >>> out = flash_attn_func(query, key, value, causal=True)  # (2, 128, 8, 64)

For code that you cannot change, call `install()`. All functions:

- take float16, bfloat16, float32 and float64, on CPUs and GPUs, with any strides and all head dimensions that
  `fusedattn.attention` takes; v may have its own. Errors name flash-attn's arguments. The output is contiguous.
- align causality and windows lower-right: with lengths Sq and Sk, query i sees key j if
  i + Sk - Sq - left <= j <= i + Sk - Sq + right. -1 is unbounded; causal makes right 0. A row that sees nothing is 0.
  flash-attn also treats a side of Sk or more as unbounded; results differ if Sq > Sk.
- under autocast keep float16 and bfloat16, and cast float32, which flash-attn does not take.
- take window_size as a tuple, list, tensor or NumPy array of two ints, and softcap 0.0 as none.
- subtract slope * |i + Sk - Sq - j| from scores for alibi_slopes, floating (H,) or (B, H).
- always apply dropout_p, but do not drop the same weights as flash-attn.
- return the log-sum-exp as float32 (float64 for float64), in natural logarithms, with a gradient. It is -inf for a row
  that sees nothing; flash-attn returns +inf. For causal ALiBi flash-attn's is larger by slope * (i + Sk - Sq).
- compute bitwise reproducible gradients if deterministic is True.
"""

import importlib.machinery
import importlib.util
import sys
import types
from typing import Any

import torch
from torch import Tensor

from ..api import attention_decode
from ..call.checks import check_flags, fail, overridable
from ..call.decode import CacheArguments, check_inputs
from ..call.rules import autocast_dtype
from . import _bert_padding, _flash


@overridable
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False,
) -> Tensor | Any:  # fmt: skip
    """Compute attention of q (B, Sq, H, D) to k (B, Sk, Hkv, D) and v (B, Sk, Hkv, Dv), with GQA if Hkv < H.

    Examples:
        >>> q = k = v = torch.randn(2, 128, 8, 64)
        >>> out, lse, _ = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)

    Returns:
        output (B, Sq, H, Dv); with return_attn_probs (output, log-sum-exp (B, H, Sq), an empty tensor).
    """
    options = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    return _flash.attend(("q", "k", "v"), options, q, k, v)


@overridable
def flash_attn_qkvpacked_func(
    qkv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False,
) -> Tensor | Any:  # fmt: skip
    """Compute `flash_attn_func` of q, k and v in one tensor (B, S, 3, H, D).

    Examples:
        >>> out = flash_attn_qkvpacked_func(torch.randn(2, 128, 3, 8, 64), causal=True)  # (2, 128, 8, 64)
    """
    options = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    return _flash.attend(["qkv"] * 3, options, *_flash.unpacked("qkv", qkv, "(B, S, 3, H, D)"))


@overridable
def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False,
) -> Tensor | Any:  # fmt: skip
    """Compute `flash_attn_func` of q (B, Sq, H, D) and keys and values in one tensor (B, Sk, 2, Hkv, D).

    Examples:
        >>> out = flash_attn_kvpacked_func(torch.randn(2, 128, 8, 64), torch.randn(2, 128, 2, 2, 64))  # (2, 128, 8, 64)
    """
    options = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    return _flash.attend(("q", "kv", "kv"), options, q, *_flash.unpacked("kv", kv, "(B, S, 2, H, D)"))


@overridable
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    max_seqlen_q: int, max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor | Any:  # fmt: skip
    """Compute attention within each of B packed sequences: q (Tq, H, D), k (Tk, Hkv, D), v (Tk, Hkv, Dv).

    Examples:
        >>> q = k = v = torch.randn(100, 8, 64)
        >>> offsets = torch.tensor([0, 30, 100], dtype=torch.int32)  # 30 tokens, and 70
        >>> out = flash_attn_varlen_func(q, k, v, offsets, offsets, 70, 70, causal=True)  # (100, 8, 64)

    Args:
        cu_seqlens_q, cu_seqlens_k: int32 (B + 1,): sequence b has rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] - 1, and
            keys likewise. A length may be 0.
        max_seqlen_q, max_seqlen_k: the longest lengths, or upper bounds.
        block_table: int32 (B, n), the pages of each sequence, in order. k and v are then (pages, page size, Hkv, D or
            Dv), and are copied into packed tensors. Pages get gradients; in flash-attn they get none.

    Returns:
        output (Tq, H, Dv); with return_attn_probs (output, log-sum-exp (H, Tq), an empty tensor).
    """
    options = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    if block_table is not None:
        k, v = _flash.gather_pages(k, v, cu_seqlens_k, max_seqlen_k, block_table)
    return _flash.attend(("q", "k", "v"), options, q, k, v, *lengths)


@overridable
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False,
) -> Tensor | Any:  # fmt: skip
    """Compute `flash_attn_varlen_func` of q, k and v in one tensor (T, 3, H, D).

    Examples:
        >>> offsets = torch.tensor([0, 30, 100], dtype=torch.int32)
        >>> out = flash_attn_varlen_qkvpacked_func(torch.randn(100, 3, 8, 64), offsets, 70)  # (100, 8, 64)
    """
    options = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    names = "qkv", "qkv", "qkv", "cu_seqlens", "cu_seqlens", "max_seqlen", "max_seqlen"
    lengths = cu_seqlens, cu_seqlens, max_seqlen, max_seqlen
    return _flash.attend(names, options, *_flash.unpacked("qkv", qkv, "(T, 3, H, D)"), *lengths)


@overridable
def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    max_seqlen_q: int, max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False,
) -> Tensor | Any:  # fmt: skip
    """Compute `flash_attn_varlen_func` of q (Tq, H, D) and keys and values in one tensor (Tk, 2, Hkv, D).

    Examples:
        >>> q, kv, offsets = torch.randn(100, 8, 64), torch.randn(100, 2, 2, 64), torch.tensor([0, 30, 100]).int()
        >>> out = flash_attn_varlen_kvpacked_func(q, kv, offsets, offsets, 70, 70)  # (100, 8, 64)
    """
    options = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    return _flash.attend(("q", "kv", "kv"), options, q, *_flash.unpacked("kv", kv, "(T, 2, H, D)"), *lengths)


@overridable
def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
    rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None, cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None, cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    rotary_interleaved: bool = True, alibi_slopes: Tensor | None = None, num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | Any:  # fmt: skip
    """Append k and v to the caches in place, and return attention of q (B, Sq, H, D) to the caches, without gradients.

    Examples:
        >>> k_cache, v_cache = torch.zeros(2, 2, 128, 8, 64)
        >>> q = k = v = torch.randn(2, 1, 8, 64)
        >>> out = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=10, causal=True)  # (2, 1, 8, 64)

    Args:
        k_cache, v_cache: (B or more, C, Hkv, D) and (B or more, C, Hkv, Dv) with C slots, any strides. Unused slots may
            hold anything. With block_table, pages of any size, (pages, page size, Hkv, D or Dv).
        k, v: (B, new, Hkv, D) and (B, new, Hkv, Dv), for the slots from cache_seqlens on; new may differ from Sq.
        rotary_cos, rotary_sin: floating (positions, rotary_dim / 2); they need k. They rotate the first rotary_dim
            columns: of a new key by its slot, of query i by cache_seqlens, plus i if causal or in a window.
        rotary_interleaved: True pairs columns 2n and 2n + 1, False n and n + rotary_dim / 2.
        cache_seqlens: int32 (B,), or an int for all: the number of keys before the new ones; it is not changed. None,
            only without k and v, means the whole cache. Causality aligns the last query with the last (new) key.
        cache_batch_idx: int32 (B,), the index of each sequence's cache; not with block_table.
        num_splits: ignored.
        cache_leftpad: int32 (B,), the number of hidden slots at the start of each cache; not with block_table.
        block_table: int32 (B, n), the pages of each sequence, in order.

    Returns:
        output (B, Sq, H, Dv); with return_softmax_lse (output, log-sum-exp (B, H, Sq)).

    Raises:
        TypeError, ValueError: before anything is written. Values on a GPU are not checked.
    """
    check_flags(return_softmax_lse=return_softmax_lse, rotary_interleaved=rotary_interleaved)
    new = {name: x for name, x in dict(k=k, v=v).items() if x is not None}
    for name, x in dict(q=q, k_cache=k_cache, v_cache=v_cache, **new).items():
        _flash.check_tensor(name, x, "(B, S, H, D)")
    options = _flash.scores(softmax_scale, causal, window_size, softcap, alibi_slopes)
    names = dict(query="q", key_cache="k_cache", value_cache="v_cache", new_key="k", new_value="v")
    names |= dict(attention_decode="flash_attn_with_kvcache")
    capacity = k_cache.shape[1]
    if block_table is not None:
        for name, numbers in (("cache_batch_idx", cache_batch_idx), ("cache_leftpad", cache_leftpad)):
            if numbers is not None:
                fail(ValueError, name, "None, because block_table is given", type(numbers).__name__)
        _flash.check_tensor("block_table", block_table, "(B, pages of a sequence)")
        capacity *= block_table.shape[1]
    elif cache_batch_idx is not None:
        _flash.check_numbers("cache_batch_idx", cache_batch_idx, q, k_cache.shape[0] - 1)
        names["block_table"] = "cache_batch_idx"
        block_table = cache_batch_idx[:, None]  # each cache is one page
    elif k_cache.shape[0] < q.shape[0]:
        got = f"shape {tuple(k_cache.shape)}: pass cache_batch_idx or block_table to share caches"
        fail(ValueError, "k_cache", f"a batch size of {q.shape[0]} or more, as q has", got)
    lengths = _flash.lengths_of(cache_seqlens, q, k, capacity)
    if cache_leftpad is not None:
        _flash.check_numbers("cache_leftpad", cache_leftpad, q, capacity)
        options |= dict(key_mask=torch.arange(capacity, device=q.device) >= cache_leftpad[:, None])
    tensors = [x if x is None else x.transpose(1, 2) for x in (q, k_cache, v_cache, k, v)]
    rotary = rotary_cos, rotary_sin, rotary_interleaved
    caches = CacheArguments(*[*tensors[:3], lengths, block_table, *tensors[3:], *rotary])
    with _flash.without_autocast_of_half(q):
        if block_table is None and k_cache.shape[0] > q.shape[0]:
            # Check before slicing the caches, so that errors show the caller's shapes.
            _flash.ask(names, check_inputs, caches._replace(query=caches.query.to(autocast_dtype(q))))
            own = {name: getattr(caches, name)[: q.shape[0]] for name in ("key_cache", "value_cache")}
            caches = caches._replace(**own)
        if rotary_cos is not None or rotary_sin is not None:
            if k is None:
                fail(ValueError, "rotary_cos", "None, because there are no new keys k to rotate", "a tensor")
            # flash-attn treats a side of the window that is as long as the cache as unbounded.
            spread = causal or any(side is not None and side < capacity for side in options["window"])
            if q.shape[1] != k.shape[1] or not (spread or q.shape[1] == 1):
                caches = _flash.ask(names, _flash.rotate_as_flash_attn, caches, options, spread)
        results = _flash.ask(names, attention_decode, **caches._asdict(), **options, return_lse=return_softmax_lse)
    out, *lse = results if return_softmax_lse else (results,)
    out = out.transpose(1, 2).contiguous()
    return (out, *lse) if lse else out


def install() -> None:
    """Make `import flash_attn` find these functions, for code that you cannot change.

    Examples:
        >>> fusedattn.compat.flash_attn.install()
        >>> from flash_attn import flash_attn_func
        >>> from flash_attn.bert_padding import pad_input, unpad_input

    sys.modules gets flash_attn with version "2.8.4+fusedattn", flash_attn.flash_attn_interface with the same functions,
    and flash_attn.bert_padding with index_first_axis, index_put_first_axis, pad_input and unpad_input. There are no
    layers, losses or private functions. Call it before importing code that looks for flash_attn; a second call does
    nothing. transformers (5.23) does not use it: see `fusedattn.compat.transformers`.

    Raises:
        RuntimeError: if flash_attn is installed or imported.
    """
    known = sys.modules.get("flash_attn")
    if known is not None and known is not _MODULES["flash_attn"]:
        raise RuntimeError(f"install: expected a process that has not imported flash_attn yet, got {known!r}")
    if known is None and (spec := importlib.util.find_spec("flash_attn")) is not None:
        raise RuntimeError(f"install: expected a Python without flash_attn, got {spec.origin}: import it instead")
    sys.modules.update(_MODULES)


def _module(name: str, members: dict[str, Any]) -> types.ModuleType:
    spec = importlib.machinery.ModuleSpec(name, None, origin=__name__, is_package="." not in name)
    module = importlib.util.module_from_spec(spec)
    vars(module).update(members, __file__=__file__)  # programs ask for the folder of flash_attn
    return module


_FUNCTIONS = {name: x for name, x in globals().items() if name.startswith("flash_attn_")}
_PADDING = {name: x for name, x in vars(_bert_padding).items() if name.startswith(("index_", "pad_", "unpad_"))}
_MEMBERS = dict(flash_attn_interface=_FUNCTIONS, bert_padding=_PADDING)
_INNER = {name: _module(f"flash_attn.{name}", members) for name, members in _MEMBERS.items()}
_PACKAGE = dict(_FUNCTIONS, **_INNER, __version__="2.8.4+fusedattn")
_MODULES = {module.__name__: module for module in (_module("flash_attn", _PACKAGE), *_INNER.values())}
