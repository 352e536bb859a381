"""The functions of the package, by the naive path alone: in any dtype that computes, and on any device."""

from typing import Any

from torch import Tensor

from .call import cached, jagged
from .call.cached import CacheArguments
from .call.form import Arguments, Plan, drop
from .call.packed import Packed, checked_packed
from .call.rules import check_flags, checked
from .naive import formula


def results(rank: int, *results: Tensor | None) -> Tensor | Any:
    """What the caller of a function of ours gets of (out, lse, weights), None where not asked for: in query's rank."""
    got = [drop(x, rank) for x in results if x is not None]
    return tuple(got) if len(got) > 1 else got[0]


def packed_results(out: Tensor, lse: Tensor | None, weights: Tensor | None) -> Tensor | Any:
    """`results` of packed sequences: (T, Hq, Dv), (Hq, T) and (Hq, T, most)."""
    got = [x for x in (out[0].transpose(0, 1), *(None if x is None else x[0] for x in (lse, weights))) if x is not None]
    return tuple(got) if len(got) > 1 else got[0]


def eager(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    return_lse: bool = False,
    return_weights: bool = False,
    **options: Any,
) -> Tensor | Any:
    """`attention` with every step in the dtype of the inputs, and for all rows at once: what people write by hand.

    Its error is the unit that errors are measured in, and its time what `naive` means in a benchmark.
    """
    check_flags(return_lse=return_lse, return_weights=return_weights)
    call = checked(Arguments(query, key, value, **options))
    return results(query.dim(), *formula.run_eagerly(call, return_lse, return_weights))


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | Plan | None = None,
    bias: Tensor | None = None,
    key_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    align: str = "bottom_right",
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    return_lse: bool = False,
    return_weights: bool = False,
) -> Tensor | Any:
    """`fusedattn.attention`, computed naively: same arguments, same answers, any device.

    Queries are taken in blocks where the score matrix would pass `naive.BUDGET` bytes, in the backward too; but for
    code that is compiled, where all rows are taken at once, and under torch.func, where blocks are not computed again.
    """
    check_flags(return_lse=return_lse, return_weights=return_weights)
    options = (mask, bias, key_mask, query_mask, causal, window, align, scale, softcap, alibi_slopes, sinks)
    arguments = Arguments(query, key, value, *options, dropout_p, seed)
    if jagged.is_jagged(query):
        return jagged.attend(attention_varlen, arguments, return_lse=return_lse, return_weights=return_weights)
    call = checked(arguments)
    return results(query.dim(), *formula.run(call, return_lse, return_weights))


def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    mask: Tensor | Plan | None = None,
    bias: Tensor | None = None,
    key_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    align: str = "bottom_right",
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    return_lse: bool = False,
    return_weights: bool = False,
) -> Tensor | Any:
    """`fusedattn.attention_varlen`, computed naively, with sequences padded to the longest of those of like lengths."""
    check_flags(return_lse=return_lse, return_weights=return_weights)
    options = dict(mask=mask, bias=bias, causal=causal, window=window, align=align, scale=scale, softcap=softcap)
    options |= dict(alibi_slopes=alibi_slopes, sinks=sinks, dropout_p=dropout_p, seed=seed)
    offsets = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    call = checked_packed(Packed(query, key, value, *offsets, key_mask, query_mask), options, return_weights)
    return packed_results(*formula.run(call, return_lse, return_weights))


def attention_decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    *,
    cache_seqlens: Tensor,
    block_table: Tensor | None = None,
    new_key: Tensor | None = None,
    new_value: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = False,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    key_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    align: str = "bottom_right",
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    return_weights: bool = False,
) -> Tensor | Any:
    """`fusedattn.attention_decode`, computed naively: same arguments, same answers, any device.

    The caches, as far as they have room, are read as one padded call, a copy of them where they are in pages.
    """
    check_flags(return_lse=return_lse, return_weights=return_weights)
    caches = key_cache, value_cache, cache_seqlens, block_table, new_key, new_value
    arguments = CacheArguments(query, *caches, rotary_cos, rotary_sin, rotary_interleaved)
    options = (mask, bias, key_mask, query_mask, causal, window, align, scale, softcap, alibi_slopes, sinks)
    decode = cached.checked(arguments, Arguments(None, None, None, *options))
    return results(4, *formula.run_decode(decode, return_lse, return_weights))
