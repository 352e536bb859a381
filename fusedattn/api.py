"""The public functions: attention, attention_varlen, attention_decode, plan and merge."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Proxy
from torch.overrides import handle_torch_function

from .call import jagged
from .call.checks import check_flags, check_floating, check_place, fail, overridable, overriding, value
from .call.decode import CacheArguments, checked as checked_decode
from .call.options import Arguments, Plan, non_default
from .call.plan import make_plan
from .call.varlen import checked_varlen
from .dispatch import backends, replay
from .operators import dtensors


def attention(
    query: Tensor, key: Tensor, value: Tensor, *,
    mask: Tensor | Plan | None = None, bias: Tensor | None = None,
    key_mask: Tensor | None = None, query_mask: Tensor | None = None,
    causal: bool = False, window: tuple[int | None, int | None] | None = None, align: str = "bottom_right",
    scale: float | None = None, softcap: float | None = None,
    alibi_slopes: Tensor | None = None, sinks: Tensor | None = None,
    dropout_p: float = 0.0, seed: int | Tensor | None = None,
    return_lse: bool = False, return_weights: bool = False, backend: str | None = None,
) -> Tensor | Any:  # fmt: skip
    """Compute softmax(scale * query @ key^T) @ value over the visible keys of each row, fused.

    Examples:
        >>> query = key = value = torch.randn(2, 8, 128, 64)
        >>> fusedattn.attention(query, key, value, causal=True).shape
        torch.Size([2, 8, 128, 64])

    Args:
        query, key, value: (B, Hq, Sq, D), (B, Hkv, Sk, D), (B, Hkv, Sk, Dv), of float16, bfloat16, float32 or float64,
            any strides. Hq is a multiple of Hkv; query head h reads kv head h // (Hq // Hkv). Rank 3 (B, S, D) is one
            head, rank 2 (S, D) one head of one batch. Autocast casts them as in torch's SDPA. Nested tensors of
            torch.jagged are (B, ragged, H, D) transposed to (B, H, ragged, D), with the same offsets for key and value.
            They take the options of `attention_varlen`, but key_mask, query_mask and results are nested.
        mask: bool, True = may attend, of rank 2 or query's; broadcasts to (B, Hq, Sq, Sk). Or a `fusedattn.plan`.
            Hidden keys and values must be finite. GPU kernels skip blocks that a mask or a bias of -inf hides. A CPU
            skips only the keys before the first and after the last visible key of a block of rows.
        bias: any floating dtype, added to the scaled scores; rank and broadcasting as for mask. -inf hides.
        key_mask, query_mask: bool (B, Sk) and (B, Sq), True = a real token; B may be 1 or absent. Hidden tokens may
            hold anything, NaN included, and change nothing. Incoming gradients of hidden rows are ignored.
        causal: row i sees no key after its own position. The same as 0 on the right of the window.
        window: (left, right), how many keys a row sees before and after its own position; None is unbounded.
        align: "bottom_right" sets the last row level with the last key, "top_left" the first with the first.
        scale: any finite number; 1 / sqrt(D) by default.
        softcap: scores become softcap * tanh(score / softcap), before bias and slopes.
        alibi_slopes: floating (Hq,) or (B, Hq). slope * |distance of the key to the row's position| is subtracted.
        sinks: floating (Hq,), one more score in the softmax of each row, without a value.
        dropout_p: the share of weights set to 0; the others are scaled by 1 / (1 - dropout_p).
        seed: int from -2**63 to 2**63 - 1, or one int64 on query's device; by default drawn from torch's generator.
            Dropout depends only on its 64 bits, the batch, the head, the row and the key.
        return_lse: also return the log-sum-exp of the visible scores and the sink.
        return_weights: also return the weights, after dropout: output = weights @ value up to rounding.
        backend: "hopper", "triton", "cpu" or "naive"; by default the first of these that takes the call on its device.
            The one that you pass runs or raises.

    Returns:
        output (B, Hq, Sq, Dv) in query's dtype and order of dimensions, or a tuple (output, lse?, weights?): lse
        (B, Hq, Sq) float32 (float64 for float64), natural log; weights (B, Hq, Sq, Sk) in query's dtype. All are
        differentiable. A row that sees nothing: output 0, lse -inf (or the sink), weights 0.

    Query, key, value, bias, slopes and sinks have derivatives by autograd, forward mode and torch.func, also nested.
    Second derivatives follow the formula, a block of rows at a time; packed sequences are padded to the longest. Under
    torch.vmap each call drops different weights; with randomness="same", or mapped seeds, each drops the weights that a
    single call drops.

    Raises:
        TypeError, ValueError: an argument is wrong.
        NotImplementedError: the backend that you passed cannot take the call.

    Source: FlashAttention-2, arXiv:2307.08691.
    """
    given = (
        query, key, value, mask, bias, key_mask, query_mask,
        causal, window, align, scale, softcap, alibi_slopes, sinks, dropout_p, seed,
    )  # fmt: skip
    arguments = tuple.__new__(Arguments, given)  # Arguments(...) would take twice as long, 5 % of a replayed call
    more: dict[str, Any] = dict(return_lse=return_lse, return_weights=return_weights, backend=backend)
    if others := overriding(given):
        return handle_torch_function(attention, others, query, key, value, **non_default(arguments), **more)
    if isinstance(query, Tensor) and query.is_nested:
        return jagged.attend_nested(attention_varlen, arguments, **more)
    return replay.attend(arguments, return_lse, return_weights, backend)


@overridable
def attention_varlen(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
    mask: Tensor | Plan | None = None, bias: Tensor | None = None,
    key_mask: Tensor | None = None, query_mask: Tensor | None = None,
    causal: bool = False, window: tuple[int | None, int | None] | None = None, align: str = "bottom_right",
    scale: float | None = None, softcap: float | None = None,
    alibi_slopes: Tensor | None = None, sinks: Tensor | None = None,
    dropout_p: float = 0.0, seed: int | Tensor | None = None,
    return_lse: bool = False, return_weights: bool = False, backend: str | None = None,
) -> Tensor | Any:  # fmt: skip
    """Compute `attention` within each of n packed sequences of any lengths, without padding.

    Examples:
        >>> query = key = value = torch.randn(100, 8, 64)
        >>> offsets = torch.tensor([0, 30, 30, 100], dtype=torch.int32)  # 30 rows, none, 70
        >>> fusedattn.attention_varlen(query, key, value, offsets, offsets, causal=True).shape
        torch.Size([100, 8, 64])

    Rows and keys are counted from the start of their sequence, in causal, window, alibi_slopes, mask, bias and dropout.

    Args:
        query, key, value: (Tq, Hq, D), (Tk, Hkv, D), (Tk, Hkv, Dv), otherwise as in `attention`.
        cu_seqlens_q, cu_seqlens_k: int32 (n + 1,), on query's device, not decreasing, from 0 to Tq and Tk. Sequence b
            has the rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] - 1, and keys likewise; it may be empty. Offsets on a
            GPU are not checked: wrong ones give wrong results, but no access out of bounds.
        max_seqlen_q, max_seqlen_k: upper bounds of the lengths. Only mask, bias, key_mask, return_weights and the naive
            path need them. If they are absent, the host then reads the lengths, with a GPU sync; under fullgraph=True
            those four options raise. On a GPU, calls that need bounds ignore rows past them.
        mask, bias: as in `attention`, broadcasting to (n, Hq, max_seqlen_q, max_seqlen_k). A plan has no token masks.
        key_mask, query_mask: bool (Tk,) and (Tq,), True = a real token; otherwise as in `attention`.
        alibi_slopes: floating (Hq,) or (n, Hq).
        causal, window, align, scale, softcap, sinks, dropout_p, seed, return_lse, return_weights, backend: as in
            `attention`.

    Returns:
        output (Tq, Hq, Dv) in query's dtype and order of dimensions, or a tuple (output, lse?, weights?): lse
        (Hq, Tq) float32 (float64 for float64); weights (Hq, Tq, max_seqlen_k) in query's dtype, 0 past the end of a
        sequence. All are differentiable.

    Raises:
        TypeError, ValueError: an argument is wrong.
        NotImplementedError: the backend that you passed cannot take the call.
    """
    arguments = Arguments(
        query, key, value, mask, bias, key_mask, query_mask,
        causal, window, align, scale, softcap, alibi_slopes, sinks, dropout_p, seed,
    )  # fmt: skip
    offsets = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    check_flags(return_lse=return_lse, return_weights=return_weights)
    own = dict(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    dtensors.refuse("attention_varlen", arguments._asdict() | own)
    call = checked_varlen(arguments, *offsets, return_weights, backends.named(backend) is not None)
    out, lse, weights = backends.choose(call, return_weights, backend).run(call, return_lse, return_weights)
    lse, weights = (None if x is None else x.squeeze(0) for x in (lse, weights))
    return replay.results(4, out.squeeze(0).transpose(0, 1), lse, weights)


@overridable
def attention_decode(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, *, cache_seqlens: Tensor,
    block_table: Tensor | None = None, new_key: Tensor | None = None, new_value: Tensor | None = None,
    rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None, rotary_interleaved: bool = False,
    mask: Tensor | None = None, bias: Tensor | None = None,
    key_mask: Tensor | None = None, query_mask: Tensor | None = None,
    causal: bool = False, window: tuple[int | None, int | None] | None = None, align: str = "bottom_right",
    scale: float | None = None, softcap: float | None = None,
    alibi_slopes: Tensor | None = None, sinks: Tensor | None = None,
    return_lse: bool = False, return_weights: bool = False, backend: str | None = None,
) -> Tensor | Any:  # fmt: skip
    """Compute attention of new queries to caches of keys and values, after an optional append in place.

    Examples:
        >>> cache, length = torch.zeros(2, 2, 8, 128, 64), torch.zeros(2, dtype=torch.int32)
        >>> query, key, value = torch.randn(2, 8, 1, 64), torch.randn(2, 8, 1, 64), torch.randn(2, 8, 1, 64)
        >>> fusedattn.attention_decode(query, *cache, cache_seqlens=length, new_key=key, new_value=value).shape
        torch.Size([2, 8, 1, 64])
        >>> length += 1

    The capacity is C, or the number of keys in the pages of a sequence. Options are as in `attention` with that many
    keys. Keys beyond a length may hold anything, NaN included. There are no gradients.

    Args:
        query: (B, Hq, Sq, D), of float16, bfloat16, float32 or float64. Autocast casts it as torch's SDPA; caches and
            new keys must have the resulting dtype.
        key_cache, value_cache: (B, Hkv, C, D) and (B, Hkv, C, Dv), or pages of a pool, (pages, Hkv, page, D or Dv). Any
            strides. Values may be the first columns of the keys (latent attention); kernels load both at once. Appends
            then need new_value to be those columns of new_key, and no rotary embedding. They refuse any other overlap
            of caches with equal strides.
        cache_seqlens: int32 (B,), the number of keys of each sequence before the append; it is not changed.
        block_table: int32 (B, n), the pages of each sequence, in order. Entries beyond a length are ignored. Sequences
            may share a page, but not the position of a new key.
        new_key, new_value: (B, Hkv, Sn, D) and (B, Hkv, Sn, Dv), appended in place. They may be views of the caches.
        rotary_cos, rotary_sin: floating (positions, rotary_dim / 2). The first rotary_dim columns of query and new_key
            are rotated in float32: a new key by its position in the cache, which stores it rotated; a query by the
            position it is level with, which may be negative only if causal or a query_mask hides all keys.
        rotary_interleaved: rotate pairs of columns 2n and 2n + 1, instead of n and n + rotary_dim / 2.
        mask, bias, key_mask: mask and bias broadcast to (B, Hq, Sq, capacity), key_mask to (B, capacity).
        causal, window, align, alibi_slopes: with "bottom_right" the last query of a sequence is level with its last
            key after the append, with "top_left" the first with the first.
        return_weights: also return the weights (B, Hq, Sq, capacity), computed by the naive path from a copy of pages.
        backend: as in `attention`. "hopper" takes 128 queries or more, and pages of a multiple of 128 keys (64 for wide
            heads). It takes no mask, bias or key_mask.

    Values of cache_seqlens and block_table on a CPU are checked before anything is written. On a GPU and in compiled
    code they are not read, and CUDA graphs can replay with other values: lengths are clamped to the capacity, pages to
    the pool, positions to the angles; a new key past the capacity or in no page is dropped.

    Returns:
        output (B, Hq, Sq, Dv) in query's dtype and order of dimensions, or a tuple (output, lse?, weights?) as from
        `attention`.

    Raises:
        TypeError, ValueError: an argument is wrong, or requires grad in grad mode.
        NotImplementedError: the backend that you passed cannot take the call.

    Source: Flash-Decoding, pytorch.org/blog/flash-decoding; PagedAttention, arXiv:2309.06180.
    """
    caches = key_cache, value_cache, cache_seqlens, block_table, new_key, new_value
    arguments = CacheArguments(query, *caches, rotary_cos, rotary_sin, rotary_interleaved)
    options = Arguments(
        None, None, None, mask, bias, key_mask, query_mask, causal, window, align, scale, softcap, alibi_slopes, sinks
    )
    check_flags(rotary_interleaved=rotary_interleaved, return_lse=return_lse, return_weights=return_weights)
    dtensors.refuse("attention_decode", options._asdict() | arguments._asdict())
    decode = checked_decode(arguments, options, backends.named(backend) is not None)
    return replay.results(4, *backends.choose(decode, return_weights, backend).run(decode, return_lse, return_weights))


def plan(
    mask: Tensor | Callable[..., Tensor] | None = None, key_mask: Tensor | None = None,
    query_mask: Tensor | None = None, *,
    batch: int = 1, heads: int = 1, rows: int | None = None, keys: int | None = None,
    device: torch.device | str | None = None,
) -> Plan:  # fmt: skip
    """Prepare masks once, to pass as `mask` to many calls: a bool tensor, or a function of positions.

    Examples:
        >>> layers = [fusedattn.MultiHeadAttention(64, 4) for _ in range(2)]
        >>> x, plan = torch.randn(2, 100, 64), fusedattn.plan(torch.rand(100, 100) < 0.5)
        >>> for layer in layers:
        ...     x, _ = layer(x, mask=plan)

        >>> plan = fusedattn.plan(lambda b, h, i, j: (i >= j) | (j < 40), rows=4096, keys=4096)

    A plan keeps 2 bytes for each block of 64 x 64 pairs (4 if over 32,764 differ), and a bit for each pair in a partly
    visible block. Equal blocks are kept once. Under torch.compile or transforms, each block keeps 4 bytes and its bits.

    Args:
        mask, key_mask, query_mask: as in `attention`, at least one. A call with a plan takes no other masks. The plan
            keeps key_mask and query_mask themselves: do not change them later. mask may also have rank 3, (B, Sq, Sk),
            for calls of rank 3 and for `MultiHeadAttention`. Or it is a function of the indices (batch, head, query,
            key) of a pair, 0-d tensors, which returns a 0-d bool tensor, True = may attend, like FlexAttention's
            mask_mod. `fusedattn.masks` has common ones. `torch.vmap` calls it for many pairs at once.
        batch, heads, rows, keys: sizes of a mask that is a function. A size of 1 broadcasts, as in a mask.
        device: the plan's, if mask is a function; by default that of key_mask or query_mask, or else torch's.

    Raises:
        TypeError, ValueError: the masks are wrong, or do not fit together.
    """
    masks: dict[str, Any] = dict(mask=mask, key_mask=key_mask, query_mask=query_mask)
    sizes: dict[str, Any] = dict(batch=batch, heads=heads, rows=rows, keys=keys)
    if any(isinstance(x, Proxy) for x in masks.values()):
        return handle_torch_function(plan, tuple(masks.values()), **masks, **sizes, device=device)
    dtensors.refuse("plan", masks)
    place = next((x.device for x in masks.values() if isinstance(x, Tensor)), None)
    if device is not None or place is None:
        try:
            place = torch.empty(0, device=device).device  # with its index
        except (TypeError, RuntimeError, AssertionError):
            fail(ValueError, "device", "a device that this PyTorch has, or its name", value(device))
    return make_plan(masks, sizes, place, backends.block_size(place))


@overridable
def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Merge the outputs of attention over two disjoint sets of keys into the output over both.

    Examples:
        >>> query, key, value = torch.randn(1, 8, 10, 64), *torch.randn(2, 1, 8, 100, 64)
        >>> first = fusedattn.attention(query, key[:, :, :60], value[:, :, :60], return_lse=True)
        >>> second = fusedattn.attention(query, key[:, :, 60:], value[:, :, 60:], return_lse=True)
        >>> out, lse = fusedattn.merge(*first, *second)  # attention to all 100 keys

    Args:
        out_a, out_b: (B, Hq, Sq, Dv), or any (..., Dv), of one floating dtype.
        lse_a, lse_b: (B, Hq, Sq), or (...), float32 (float64 if the outputs are), natural log; -inf for a row that saw
            nothing.

    Returns:
        (out, lse) of the same shapes and dtypes, differentiable; 0 and -inf for a row that saw nothing in either set.

    Raises:
        ValueError: shapes or devices differ.
        TypeError: dtypes do not fit.

    Source: Online normalizer calculation for softmax, arXiv:1805.02867, section 3.1.
    """
    tensors = dict(out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b)
    check_floating("out_a", out_a, None)
    lse_dtype = torch.promote_types(out_a.dtype, torch.float32)
    for name, x in tensors.items():
        dtype, shape = (lse_dtype, out_a.shape[:-1]) if name.startswith("lse") else (out_a.dtype, out_a.shape)
        check_place(name, x, out_a.device, "out_a")
        if x.dtype != dtype:
            fail(TypeError, name, f"{dtype}, because out_a is {out_a.dtype}", x.dtype)
        if out_a.dim() == 0 or x.shape != shape:
            expected = f"shape {tuple(shape)}, as out_a has {tuple(out_a.shape)}" if out_a.dim() else "rank 1 or more"
            fail(ValueError, name, expected, x.shape)
    # Detached, because the result does not depend on the maximum that is subtracted.
    top = torch.maximum(lse_a, lse_b).detach()
    empty = top == float("-inf")
    top = top.masked_fill(empty, 0.0)
    a, b = torch.exp(lse_a - top), torch.exp(lse_b - top)
    total = (a + b).masked_fill(empty, 1.0)
    lse = (top + torch.log(total)).masked_fill(empty, float("-inf"))
    out = out_a * (a / total)[..., None] + out_b * (b / total)[..., None]
    return out.to(out_a.dtype), lse
