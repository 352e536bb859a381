"""The functions of the package by the naive path, in any floating dtype, on any device; and eager attention.

Tests hold backends to these functions, so they call the formula, and no table of backends.
"""

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

from . import api
from .call import cached, jagged
from .call.cached import CacheArguments
from .call.form import Arguments, packed_results, results
from .call.packed import Packed, checked_packed
from .call.rules import check_flags, checked
from .naive import formula

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _signature_of(function: Callable[..., Any]) -> Callable[[_Function], _Function]:
    """Give a function the signature of one of api, without `backend`."""
    signature = inspect.signature(function)
    parameters = [x for x in signature.parameters.values() if x.name != "backend"]

    def give(naive: _Function) -> _Function:
        vars(naive)["__signature__"] = signature.replace(parameters=parameters)
        return naive

    return give


@_signature_of(api.attention)
def attention(
    query: Tensor, key: Tensor, value: Tensor, *, return_lse: bool = False, return_weights: bool = False, **options: Any
) -> Tensor | Any:
    """`fusedattn.attention`, computed naively: same arguments, same answers, any device.

    Queries are taken in blocks where the score matrix would pass `naive.formula.BUDGET` bytes, in the backward too; but
    for code that is compiled, where all rows are taken at once, and under torch.func, which computes no block again.
    """
    check_flags(return_lse=return_lse, return_weights=return_weights)
    arguments = Arguments(query, key, value, **options)
    if jagged.is_jagged(query):
        return jagged.attend(attention_varlen, arguments, return_lse=return_lse, return_weights=return_weights)
    call = checked(arguments)
    return results(query.dim(), *formula.run(call, return_lse, return_weights))


@_signature_of(api.attention_varlen)
def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    key_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    return_lse: bool = False,
    return_weights: bool = False,
    **options: Any,
) -> Tensor | Any:
    """`fusedattn.attention_varlen`, computed naively, with sequences padded to the longest of those of like lengths."""
    check_flags(return_lse=return_lse, return_weights=return_weights)
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    call = checked_packed(Packed(query, key, value, *lengths, key_mask, query_mask), options, return_weights)
    return packed_results(*formula.run(call, return_lse, return_weights))


@_signature_of(api.attention_decode)
def attention_decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    *,
    return_lse: bool = False,
    return_weights: bool = False,
    **options: Any,
) -> Tensor | Any:
    """`fusedattn.attention_decode`, computed naively: same arguments, same answers, any device.

    The caches, as far as they have room, are read as one padded call, a copy of them where they are in pages.
    """
    check_flags(return_lse=return_lse, return_weights=return_weights)
    caches = {name: options.pop(name) for name in CacheArguments._fields if name in options}
    for name in ("dropout_p", "seed"):
        if name in options:
            raise TypeError(f"attention_decode() got an unexpected keyword argument {name!r}")
    arguments = CacheArguments(query, key_cache, value_cache, **caches)
    decode = cached.checked(arguments, Arguments(None, None, None, **options))
    return results(4, *formula.run_decode(decode, return_lse, return_weights))


def eager(
    query: Tensor, key: Tensor, value: Tensor, *, return_lse: bool = False, return_weights: bool = False, **options: Any
) -> Tensor | Any:
    """`attention` with every step in the dtype of the inputs, and for all rows at once: what people write by hand.

    Its error is the unit that errors are measured in, and its time what `naive` means in a benchmark.
    """
    check_flags(return_lse=return_lse, return_weights=return_weights)
    call = checked(Arguments(query, key, value, **options))
    return results(query.dim(), *formula.run_eagerly(call, return_lse, return_weights))
