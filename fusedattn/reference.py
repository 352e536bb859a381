"""The functions of the package, by the naive path alone: in any dtype that computes, and on any device."""

from torch import Tensor

from .call import cached, jagged
from .call.cached import CacheArguments
from .call.form import Arguments, drop
from .call.packed import Packed, checked_packed
from .call.rules import check_flags, checked
from .naive import formula


def results(rank: int, *results: Tensor | None):
    """What the caller of a function of ours gets of (out, lse, weights), None where not asked for: in query's rank."""
    got = [drop(x, rank) for x in results if x is not None]
    return tuple(got) if len(got) > 1 else got[0]


def packed_results(out: Tensor, lse: Tensor | None, weights: Tensor | None):
    """`results` of packed sequences: (T, Hq, Dv), (Hq, T) and (Hq, T, most)."""
    got = [x for x in (out[0].transpose(0, 1), *(None if x is None else x[0] for x in (lse, weights))) if x is not None]
    return tuple(got) if len(got) > 1 else got[0]


def eager(query, key, value, *, return_lse=False, return_weights=False, **options):
    """`attention` with every step in the dtype of the inputs, and for all rows at once: what people write by hand.

    Its error is the unit that errors are measured in, and its time what `naive` means in a benchmark.
    """
    check_flags(return_lse=return_lse, return_weights=return_weights)
    call = checked(Arguments(query, key, value, **options))
    return results(query.dim(), *formula.run_eagerly(call, return_lse, return_weights))


def attention(
    query,
    key,
    value,
    *,
    mask=None,
    bias=None,
    key_mask=None,
    query_mask=None,
    causal=False,
    window=None,
    align="bottom_right",
    scale=None,
    softcap=None,
    alibi_slopes=None,
    sinks=None,
    dropout_p=0.0,
    seed=None,
    return_lse=False,
    return_weights=False,
):
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
    query,
    key,
    value,
    cu_seqlens_q,
    cu_seqlens_k,
    *,
    max_seqlen_q=None,
    max_seqlen_k=None,
    mask=None,
    bias=None,
    key_mask=None,
    query_mask=None,
    causal=False,
    window=None,
    align="bottom_right",
    scale=None,
    softcap=None,
    alibi_slopes=None,
    sinks=None,
    dropout_p=0.0,
    seed=None,
    return_lse=False,
    return_weights=False,
):
    """`fusedattn.attention_varlen`, computed naively, with sequences padded to the longest of those of like lengths."""
    check_flags(return_lse=return_lse, return_weights=return_weights)
    options = dict(mask=mask, bias=bias, causal=causal, window=window, align=align, scale=scale, softcap=softcap)
    options |= dict(alibi_slopes=alibi_slopes, sinks=sinks, dropout_p=dropout_p, seed=seed)
    offsets = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    call = checked_packed(Packed(query, key, value, *offsets, key_mask, query_mask), options, return_weights)
    return packed_results(*formula.run(call, return_lse, return_weights))


def attention_decode(
    query,
    key_cache,
    value_cache,
    *,
    cache_seqlens,
    block_table=None,
    new_key=None,
    new_value=None,
    rotary_cos=None,
    rotary_sin=None,
    rotary_interleaved=False,
    mask=None,
    bias=None,
    key_mask=None,
    query_mask=None,
    causal=False,
    window=None,
    align="bottom_right",
    scale=None,
    softcap=None,
    alibi_slopes=None,
    sinks=None,
    return_lse=False,
    return_weights=False,
):
    """`fusedattn.attention_decode`, computed naively: same arguments, same answers, any device.

    The caches, as far as they have room, are read as one padded call, a copy of them where they are in pages.
    """
    check_flags(return_lse=return_lse, return_weights=return_weights)
    caches = key_cache, value_cache, cache_seqlens, block_table, new_key, new_value
    arguments = CacheArguments(query, *caches, rotary_cos, rotary_sin, rotary_interleaved)
    options = (mask, bias, key_mask, query_mask, causal, window, align, scale, softcap, alibi_slopes, sinks)
    decode = cached.checked(arguments, Arguments(None, None, None, *options))
    return results(4, *formula.run_decode(decode, return_lse, return_weights))
