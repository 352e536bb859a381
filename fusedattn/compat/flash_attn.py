"""flash-attn 2.8's functions, by the functions of this package: the same names, arguments, defaults and layouts.

    >>> from fusedattn.compat.flash_attn import flash_attn_func
    >>> query = key = value = torch.randn(2, 128, 8, 64)
    >>> flash_attn_func(query, key, value, causal=True).shape
    torch.Size([2, 128, 8, 64])

For code that cannot be changed there is `install()`. What holds for all of them:

- float16, bfloat16, float32 and float64, on a CPU and a GPU, of any strides; head dimensions as in
  `fusedattn.attention`, that of v may be another. Errors name arguments as flash-attn does. The output is contiguous.
- Causality and windows are lower-right: with lengths Sq and Sk query i sees key j where
  i + Sk - Sq - left <= j <= i + Sk - Sq + right; -1 is unbounded. causal makes right 0. A row that sees nothing is 0.
  flash-attn takes a side of Sk or more for unbounded, which differs where Sq > Sk.
- Under autocast float16 and bfloat16 stay what they are; float32, which flash-attn does not take, is cast.
- softcap 0.0 is none. alibi_slopes, floating (H,) or (B, H): slope * |i + Sk - Sq - j| is subtracted from the scores.
- dropout_p always applies. What is dropped is drawn from torch's generator, and is not what flash-attn drops.
- The log-sum-exp is float32 (float64 for float64), natural, -inf for a row that sees nothing; it has a gradient. Where
  flash-attn's own differs: +inf for such a row, and causal alibi without slope * (i + Sk - Sq).
- deterministic: the gradients of this call have the same bits each time.
- return_attn_probs: return (output, log-sum-exp, what flash-attn tests itself with, which is empty here).
"""

import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from ..call.rules import check_flags, fail
from . import _bert_padding
from ._flash_calls import Options, attend, attend_cached, attend_packed, check_packed, scores


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | Any:
    """Attention of q (B, Sq, H, D) to k (B, Sk, Hkv, D) and v (B, Sk, Hkv, Dv); head h reads kv head h // (H // Hkv).

    Returns: output (B, Sq, H, Dv); with return_attn_probs (output, log-sum-exp (B, H, Sq), an empty tensor).
    """
    shared = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    return attend(("q", "k", "v"), q, k, v, Options(*shared))


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | Any:
    """`flash_attn_func` of the three in one tensor (B, S, 3, H, D)."""
    check_packed("qkv", qkv, "(B, S, 3, H, D)")
    shared = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    q, k, v = qkv.unbind(2)
    return attend(("qkv", "qkv", "qkv"), q, k, v, Options(*shared))


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | Any:
    """`flash_attn_func` of q (B, Sq, H, D), and keys and values in one tensor (B, Sk, 2, Hkv, D)."""
    check_packed("kv", kv, "(B, S, 2, H, D)")
    shared = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    k, v = kv.unbind(2)
    return attend(("q", "kv", "kv"), q, k, v, Options(*shared))


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor | Any:
    """Attention within each of B sequences, packed one behind the other: q (Tq, H, D), k (Tk, Hkv, D), v (Tk, Hkv, Dv).

    Args:
        cu_seqlens_q, cu_seqlens_k: int32 (B + 1,): sequence b has rows cu_seqlens_q[b] to cu_seqlens_q[b + 1], and such
            keys. Either may be none, and the one need not be as many as the other.
        max_seqlen_q, max_seqlen_k: the longest lengths, or more.
        block_table: None. Keys in pages are not implemented here: see `flash_attn_with_kvcache`.
    Returns: output (Tq, H, Dv); with return_attn_probs (output, log-sum-exp (H, Tq), an empty tensor).
    """
    if block_table is not None:
        expected = "None, for keys in pages are for flash_attn_with_kvcache"
        fail(NotImplementedError, "block_table", expected, type(block_table).__name__)
    shared = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    offsets = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    return attend_packed(dict(query="q", key="k", value="v"), q, k, v, offsets, Options(*shared))


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | Any:
    """`flash_attn_varlen_func` of the three in one tensor (T, 3, H, D)."""
    check_packed("qkv", qkv, "(T, 3, H, D)")
    shared = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    names = dict.fromkeys(("query", "key", "value"), "qkv")
    names |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), "cu_seqlens")
    names |= dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), "max_seqlen")
    offsets = cu_seqlens, cu_seqlens, max_seqlen, max_seqlen
    q, k, v = qkv.unbind(1)
    return attend_packed(names, q, k, v, offsets, Options(*shared))


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | Any:
    """`flash_attn_varlen_func` of q (Tq, H, D), and keys and values in one tensor (Tk, 2, Hkv, D)."""
    check_packed("kv", kv, "(T, 2, H, D)")
    shared = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    offsets = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    k, v = kv.unbind(1)
    return attend_packed(dict(query="q", key="kv", value="kv"), q, k, v, offsets, Options(*shared))


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | Any:
    """Attention of q (B, Sq, H, D) to caches, which k and v are first written to, in place. There are no gradients.

    Args:
        k_cache, v_cache: (B or more, C, Hkv, D) and (B or more, C, Hkv, Dv), any strides; slots past a length may hold
            anything. Or, with block_table, pages of any size, (pages, page, Hkv, D or Dv).
        k, v: (B, new, Hkv, D) and (B, new, Hkv, Dv), for the slots from cache_seqlens on. new may differ from Sq.
        rotary_cos, rotary_sin: floating (positions, rotary_dim / 2). The first rotary_dim columns of k are turned by
            their slots, those of query i by cache_seqlens + i if causal or in a window, otherwise by cache_seqlens.
            Only with k.
        cache_seqlens: int32 (B,), or an int for all, how many keys there are before the new ones; it is not changed.
            None is the whole cache, to which nothing can be added. Causality aligns the last query with the last key,
            the new ones included.
        cache_batch_idx: int32 (B,), which of the caches is whose.
        cache_leftpad: int32 (B,), how many slots at the start of each cache are not seen.
        block_table: int32 (B, n), the pages of each sequence, in order. Without the two above.
        rotary_interleaved: whether columns 2n and 2n + 1 are a pair, or n and n + rotary_dim / 2.
        num_splits: is not used.
    Returns: output (B, Sq, H, Dv); with return_softmax_lse (output, log-sum-exp (B, H, Sq)).
    Raises: before anything is written. What is not fetched from a GPU is said at `fusedattn.attention_decode`.
    """
    check_flags(return_softmax_lse=return_softmax_lse)
    rotary = rotary_cos, rotary_sin, rotary_interleaved
    where = cache_seqlens, cache_batch_idx, cache_leftpad, block_table
    options = scores(softmax_scale, causal, window_size, softcap, alibi_slopes)
    return attend_cached(q, k_cache, v_cache, k, v, rotary, *where, options, return_softmax_lse)


_FUNCTIONS = (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
_PADDING = (
    _bert_padding.index_first_axis,
    _bert_padding.index_put_first_axis,
    _bert_padding.pad_input,
    _bert_padding.unpad_input,
)
_VERSION = "2.8.4+fusedattn"


def install() -> None:
    """Make `import flash_attn` find these functions, in this process: for code that imports it and cannot be changed.

        >>> fusedattn.compat.flash_attn.install()
        >>> from flash_attn import flash_attn_func
        >>> from flash_attn.bert_padding import pad_input, unpad_input

    sys.modules gets flash_attn, whose __version__ is "2.8.4+fusedattn", flash_attn.flash_attn_interface with the same
    functions, and flash_attn.bert_padding with index_first_axis, index_put_first_axis, pad_input and unpad_input. There
    is nothing else in it: no layers, losses or private functions. A second call does nothing. Call it before what looks
    for flash_attn is imported.

    No package is claimed to be installed: importlib.metadata knows none, and so transformers (5.23) does not see
    it. For its models there is `fusedattn.compat.transformers`.

    Raises: RuntimeError where flash_attn is installed, or imported.
    """
    known = sys.modules.get("flash_attn")
    if known is not None and known is not _MODULES["flash_attn"]:
        raise RuntimeError(f"install: expected a process that has not imported flash_attn, got {known!r}")
    if known is None and (spec := importlib.util.find_spec("flash_attn")) is not None:
        raise RuntimeError(f"install: expected a Python without flash_attn, got one that has it: {spec.origin}")
    sys.modules.update(_MODULES)


def _module(name: str, members: Iterable[Callable[..., Any]], **more: Any) -> types.ModuleType:
    module = types.ModuleType(name, f"{name}, as fusedattn.compat.flash_attn has it.")
    package = "." not in name
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, origin=__name__, is_package=package)
    module.__package__ = module.__spec__.parent
    module.__dict__.update({member.__name__: member for member in members}, **more)
    return module


def _modules() -> dict[str, types.ModuleType]:
    inner = {
        "flash_attn_interface": _module("flash_attn.flash_attn_interface", _FUNCTIONS),
        "bert_padding": _module("flash_attn.bert_padding", _PADDING),
    }
    whole = _module("flash_attn", _FUNCTIONS, **inner, __version__=_VERSION, __path__=[])
    return {"flash_attn": whole} | {module.__name__: module for module in inner.values()}


_MODULES = _modules()
