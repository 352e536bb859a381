"""The functions that users call: attention, attention_varlen, attention_decode, plan and merge."""

from typing import Any

import torch
from torch import Tensor
from torch.fx import Proxy
from torch.overrides import handle_torch_function

from .call import decode as cached, jagged
from .call.decode import CacheArguments
from .call.options import Arguments, Plan, add_batch_dim, add_head_dim, packed_results, results
from .call.overrides import overridable
from .call.plan import check_plan
from .call.rules import FLOATING, check_flags, check_strided, fail
from .call.varlen import VarlenArguments, checked_varlen
from .dispatch import backends, replay
from .operators import dtensors
from .operators.attention import block_mask_or_none


@overridable
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
    """softmax(scale * query @ key^T) @ value over the visible keys of each row, fused.

    Examples:
        >>> query = key = value = torch.randn(2, 8, 128, 64)
        >>> fusedattn.attention(query, key, value, causal=True).shape
        torch.Size([2, 8, 128, 64])

    Args:
        query, key, value: (B, Hq, Sq, D), (B, Hkv, Sk, D), (B, Hkv, Sk, Dv), of float16, bfloat16, float32 or float64,
            any strides. Hq is a multiple of Hkv; query head h reads kv head h // (Hq // Hkv). Rank 3 (B, S, D) is one
            head, rank 2 (S, D) one head of one batch. Under autocast they are cast as torch's SDPA casts them. Or
            nested tensors of torch.jagged, (B, ragged, H, D) transposed to (B, H, ragged, D), key and value of the same
            offsets: `attention_varlen` then says what the options are, key_mask and query_mask are nested (B, ragged),
            and what is returned is nested.
        mask: bool, True = may attend, of rank 2 or query's; broadcasts to (B, Hq, Sq, Sk). What it hides is finite.
            Or what `fusedattn.plan` made of masks. Blocks of pairs that masks hide, or -inf, cost no time;
            on a CPU those left and right of all that masks leave a block of rows.
        bias: any floating dtype, added to the scaled scores; rank and broadcasting as of mask. -inf hides.
        key_mask, query_mask: bool (B, Sk) and (B, Sq), True = a real token; B may be 1 or absent. What they hide may
            hold anything, NaN included, and changes nothing. Of rows that query_mask hides all incoming gradients are
            ignored, NaN included: those of output, lse and weights, and with lse's what would reach the sinks.
        causal: row i sees no key after its own position. The same as 0 on the right of the window.
        window: (left, right), how many keys a row sees before and after its own position; None is unbounded.
        align: "bottom_right" sets the last row level with the last key, "top_left" the first with the first.
        scale: any finite number; 1 / sqrt(D) by default.
        softcap: scores become softcap * tanh(score / softcap), before anything is added to them.
        alibi_slopes: floating (Hq,) or (B, Hq); slope * distance is subtracted from the scores, the distance being that
            of a key to the row's own position.
        sinks: floating (Hq,), a score that each row of the head also attends to, and that has no value.
        dropout_p: the share of weights set to 0, the rest being scaled by 1 / (1 - dropout_p).
        seed: int or one int64 on query's device; what is dropped depends on it, the head and the place alone. Drawn
            from torch's generator of the device by default.
        return_lse: also return the log-sum-exp of the visible scores, the sink's included.
        return_weights: also return the weights, after dropout: output = weights @ value to rounding.
        backend: "hopper", "triton", "cpu" or "naive"; by default the fastest that takes the call. One that is named
            runs or raises.

    Returns:
        output (B, Hq, Sq, Dv) in query's dtype and order of dimensions; with return_lse or return_weights a tuple
        (output, lse, weights) of what is asked for: lse (B, Hq, Sq) float32 (float64 for float64), natural log; weights
        (B, Hq, Sq, Sk) in query's dtype; both differentiable. A row that sees nothing: 0, -inf (or the sink) and 0.

    Derivatives: of query, key, value, bias, slopes and sinks, by autograd, by forward mode and by torch.func, one
    transform inside the other too. Gradients and tangents are kernels of their own; derivatives of these are the
    formula's, a block of rows at a time. Under torch.vmap dropout is that of one call with all batches: of n calls each
    has bits of its own. It is that of each call alone with randomness="same", and where seeds are mapped.

    Raises:
        TypeError, ValueError: for wrong arguments.
        NotImplementedError: if the backend named cannot take the call.

    Source: FlashAttention-2, arXiv:2307.08691.
    """
    arguments = Arguments(
        query, key, value, mask, bias, key_mask, query_mask,
        causal, window, align, scale, softcap, alibi_slopes, sinks, dropout_p, seed,
    )  # fmt: skip
    if isinstance(query, Tensor) and query.is_nested:
        more = dict(return_lse=return_lse, return_weights=return_weights, backend=backend)
        return jagged.attend(attention_varlen, arguments, **more)
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
    """`attention` within each of n sequences of any lengths, that lie one behind the other: nothing is padded.

    Examples:
        >>> query = key = value = torch.randn(100, 8, 64)
        >>> offsets = torch.tensor([0, 30, 30, 100], dtype=torch.int32)  # 30 rows, none, 70
        >>> fusedattn.attention_varlen(query, key, value, offsets, offsets, causal=True).shape
        torch.Size([100, 8, 64])

    Rows and keys are counted from the start of their sequence, in causal, window, alibi_slopes, mask, bias and dropout.

    Args:
        query, key, value: (Tq, Hq, D), (Tk, Hkv, D), (Tk, Hkv, Dv), otherwise as in `attention`.
        cu_seqlens_q, cu_seqlens_k: int32 (n + 1,), on query's device: sequence b has the rows cu_seqlens_q[b] to
            cu_seqlens_q[b + 1] and the keys cu_seqlens_k[b] to cu_seqlens_k[b + 1]. From 0 to Tq and Tk, never falling;
            a sequence may have no rows, or no keys. On a GPU nobody looks: offsets that are wrong give results that
            are, but nothing is read or written outside of the tensors.
        max_seqlen_q, max_seqlen_k: the longest lengths, or more. mask, bias, key_mask, return_weights and the naive
            path need them. If they are missing, the host reads the lengths, and waits for the GPU to do so; a call that
            is compiled with fullgraph=True then raises, unless it takes the naive path. On a GPU, calls that need them
            leave out the rows of a sequence past the longest length.
        mask, bias: as in `attention`, broadcasting to (n, Hq, max_seqlen_q, max_seqlen_k). A plan is of a mask alone.
        key_mask, query_mask: bool (Tk,) and (Tq,), True = a real token; otherwise as in `attention`, incoming gradients
            included.
        alibi_slopes: floating (Hq,) or (n, Hq).
        causal, window, align, scale, softcap, sinks, dropout_p, seed, return_lse, return_weights: as in `attention`.
        backend: "triton", "cpu" or "naive"; by default the fastest that takes the call. One that is named runs or
            raises.

    Returns:
        output (Tq, Hq, Dv) in query's dtype and order of dimensions; with return_lse or return_weights a tuple (output,
        lse, weights) of what is asked for: lse (Hq, Tq) float32 (float64 for float64); weights (Hq, Tq, max_seqlen_k)
        in query's dtype, 0 past the end of a sequence; both differentiable.

    Raises:
        TypeError, ValueError: for wrong arguments.
        NotImplementedError: if the backend named cannot take the call.
    """
    options = dict(
        mask=mask, bias=bias, causal=causal, window=window, align=align, scale=scale, softcap=softcap,
        alibi_slopes=alibi_slopes, sinks=sinks, dropout_p=dropout_p, seed=seed,
    )  # fmt: skip
    offsets = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    packed = VarlenArguments(query, key, value, *offsets, key_mask, query_mask)
    check_flags(return_lse=return_lse, return_weights=return_weights)
    dtensors.refuse("attention_varlen", options | packed._asdict())
    call = checked_varlen(packed, options, return_weights, backends.named(backend) is not None)
    out, lse, weights = backends.choose(call, return_weights, backend).run(call, return_lse, return_weights)
    return packed_results(out, lse if return_lse else None, weights)


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
    """Attention of new queries to caches of keys and values, which may first be extended in place.

    Examples:
        >>> cache, length = torch.zeros(2, 2, 8, 128, 64), torch.zeros(2, dtype=torch.int32)
        >>> query, key, value = torch.randn(2, 8, 1, 64), torch.randn(2, 8, 1, 64), torch.randn(2, 8, 1, 64)
        >>> fusedattn.attention_decode(query, *cache, cache_seqlens=length, new_key=key, new_value=value).shape
        torch.Size([2, 8, 1, 64])
        >>> length += 1

    Options that are not named here are those of `attention`, which sees as many keys as the capacity: C of a cache, or
    as many as the pages of a sequence hold. What lies beyond a length may hold anything, NaN included. There are no
    gradients.

    Args:
        query: (B, Hq, Sq, D), of float16, bfloat16, float32 or float64. Under autocast it is cast, as torch's SDPA
            casts it; caches and what is new have its dtype then.
        key_cache, value_cache: (B, Hkv, C, D) and (B, Hkv, C, Dv), or pages of a pool, (pages, Hkv, page, D or Dv). Any
            strides. Written to in place, where something is new, and nowhere but there; so they share no memory then,
            unless values are the first columns of keys that are not turned.
        cache_seqlens: int32 (B,), how many keys each sequence has, before the new ones; it is not changed.
        block_table: int32 (B, n), the pages of each sequence, in order. What stands beyond a length is not used.
            Sequences may share a page, but no place that a new key goes to.
        new_key, new_value: (B, Hkv, Sn, D) and (B, Hkv, Sn, Dv), appended to the caches, of which they may be views.
            Sn may differ from Sq.
        rotary_cos, rotary_sin: floating (positions, rotary_dim / 2). The first rotary_dim columns of query and new_key
            are turned, in float32: a new key by its place in the cache, a query by the place that it is level with. A
            turned key is what the cache keeps. No query may stand before position 0, unless causal or a query_mask
            hides all keys from it.
        rotary_interleaved: whether columns 2n and 2n + 1 are a pair that is turned, or n and n + rotary_dim / 2.
        mask, bias: broadcast to (B, Hq, Sq, capacity).
        key_mask: (B, capacity).
        causal, window, align, alibi_slopes: with "bottom_right" the last query of a sequence is level with its last
            key, the new ones included, with "top_left" the first with the first.
        return_weights: also return the weights (B, Hq, Sq, capacity). They are computed naively, from a copy of caches
            in pages.
        backend: "triton", "cpu" or "naive".

    Values of cache_seqlens and block_table on a CPU are checked before anything is written. On a GPU, and in code that
    is compiled, they are not fetched: lengths are taken to lie between 0 and the capacity, pages that are not in the
    pool for some that are; a new key past the capacity or in no page is dropped; a position outside of the angles takes
    the nearest. So a CUDA graph of a call replays with other lengths and pages.

    Returns:
        output (B, Hq, Sq, Dv) in query's dtype and order of dimensions; with return_lse or return_weights a tuple
        (output, lse, weights) of what is asked for, as `attention` has them.

    Raises:
        TypeError, ValueError: for wrong arguments, also for one that requires a gradient in grad mode.
        NotImplementedError: if the backend named cannot take the call.

    Source: Flash-Decoding, pytorch.org/blog/flash-decoding; PagedAttention, arXiv:2309.06180.
    """
    caches = key_cache, value_cache, cache_seqlens, block_table, new_key, new_value
    arguments = CacheArguments(query, *caches, rotary_cos, rotary_sin, rotary_interleaved)
    options = Arguments(
        None, None, None, mask, bias, key_mask, query_mask, causal, window, align, scale, softcap, alibi_slopes, sinks
    )
    check_flags(return_lse=return_lse, return_weights=return_weights)
    dtensors.refuse("attention_decode", options._asdict() | arguments._asdict())
    decode = cached.checked(arguments, options, backends.named(backend) is not None)
    out, lse, weights = backends.choose(decode, return_weights, backend).run(decode, return_lse, return_weights)
    return results(4, out, lse if return_lse else None, weights)


def plan(mask: Tensor | None = None, key_mask: Tensor | None = None, query_mask: Tensor | None = None) -> Plan:
    """Find out once which blocks of pairs some masks leave; pass the result as `mask` to call after call.

    Examples:
        >>> layers = [fusedattn.MultiHeadAttention(64, 4) for _ in range(2)]
        >>> x, plan = torch.randn(2, 100, 64), fusedattn.plan(torch.rand(100, 100) < 0.5)
        >>> for layer in layers:
        ...     x, _ = layer(x, mask=plan)

    A call without a plan looks at its masks itself: what a plan saves is one read of them in each call. The caller
    keeps it, nobody else does; while it is in use the masks must not change.

    Args:
        mask, key_mask, query_mask: as in `attention`, at least one. A call that gets the plan takes all of them from
            it, and neither key_mask nor query_mask beside it. mask may also have rank 3, (B, Sq, Sk), for calls of rank
            3 and for `MultiHeadAttention`.

    Returns:
        a Plan. Where no kernel could read it, such as on a CPU, it holds the masks and nothing else.

    Raises:
        TypeError, ValueError: for masks that do not go together.
    """
    given = mask, key_mask, query_mask
    if any(isinstance(x, Proxy) for x in given):
        return handle_torch_function(plan, given, *given)
    check_plan(Plan(*given, None))
    device = next(x.device for x in given if x is not None)
    masks = add_head_dim(mask), add_batch_dim(key_mask), add_batch_dim(query_mask), None
    return Plan(*given, None if backends.machine_reasons(device) else block_mask_or_none(masks))


@overridable
def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two disjoint sets of keys, from the attention over each.

    Examples:
        >>> query, key, value = torch.randn(1, 8, 10, 64), *torch.randn(2, 1, 8, 100, 64)
        >>> first = fusedattn.attention(query, key[:, :, :60], value[:, :, :60], return_lse=True)
        >>> second = fusedattn.attention(query, key[:, :, 60:], value[:, :, 60:], return_lse=True)
        >>> out, lse = fusedattn.merge(*first, *second)  # attention to all 100 keys

    Args:
        out_a, out_b: (B, Hq, Sq, Dv), or any (..., Dv), of one floating dtype.
        lse_a, lse_b: (B, Hq, Sq), or (...), float32 (float64 if the outputs are), natural log; -inf where a row saw
            nothing.

    Returns:
        (out, lse) of the same shapes and dtypes, differentiable. What saw nothing on either side is 0 and -inf.

    Raises:
        ValueError: for shapes or devices that differ.
        TypeError: for dtypes.

    Source: Online normalizer calculation for softmax, arXiv:1805.02867, section 3.1.
    """
    _check_merge(out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b)
    # Where the larger lies is no business of the gradient: the result does not depend on it.
    top = torch.maximum(lse_a, lse_b).detach()
    empty = top == float("-inf")
    top = top.masked_fill(empty, 0.0)
    a, b = torch.exp(lse_a - top), torch.exp(lse_b - top)
    total = (a + b).masked_fill(empty, 1.0)
    lse = (top + torch.log(total)).masked_fill(empty, float("-inf"))
    out = out_a * (a / total)[..., None] + out_b * (b / total)[..., None]
    return out.to(out_a.dtype), lse


def _check_merge(**tensors: Any) -> None:
    """Raise for what does not go with out_a, which comes first."""
    check_strided(**tensors)
    out = tensors["out_a"]
    if out.dtype not in FLOATING:
        fail(TypeError, "out_a", "float16, bfloat16, float32 or float64", out.dtype)
    for name, x in tensors.items():
        dtype, shape = out.dtype, out.shape
        if name.startswith("lse"):
            dtype, shape = torch.promote_types(dtype, torch.float32), shape[:-1]
        if x.device != out.device:
            fail(ValueError, name, f"the device of out_a, {out.device}", x.device)
        if x.dtype != dtype:
            fail(TypeError, name, f"{dtype}, as out_a is {out.dtype}", x.dtype)
        if out.dim() == 0 or x.shape != shape:
            fail(ValueError, name, f"shape {tuple(shape)}, as out_a has {tuple(out.shape)}", tuple(x.shape))
