"""The functions of the package by the naive path, in any floating dtype, on any device; and eager attention."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

from . import api
from .call.options import Arguments, check_names, results
from .call.overrides import overridable
from .call.rules import check_flags, checked
from .naive import formula


def _naive(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of api with backend="naive", which it then is not asked for."""

    @functools.wraps(function)
    def naive(*arguments: Any, **options: Any) -> Any:
        if "backend" in options:
            raise TypeError(f"{function.__name__}() got an unexpected keyword argument 'backend'")
        return function(*arguments, backend="naive", **options)

    signature = inspect.signature(function)
    parameters = [x for x in signature.parameters.values() if x.name != "backend"]
    vars(naive)["__signature__"] = signature.replace(parameters=parameters)
    naive.__doc__ = f"`fusedattn.{function.__name__}`, computed naively: same arguments, same answers, any device."
    return naive


# Scores are taken in blocks that fit a cache, and computed again in the backward where they would pass
# `naive.formula.BUDGET` bytes; in code that is compiled all are taken at once, and torch.func computes no block again.
# Packed sequences are padded to the longest of those of like lengths, and caches in pages are copied.
attention = _naive(api.attention)
attention_varlen = _naive(api.attention_varlen)
attention_decode = _naive(api.attention_decode)


@overridable
def eager(
    query: Tensor, key: Tensor, value: Tensor, *, return_lse: bool = False, return_weights: bool = False, **options: Any
) -> Tensor | Any:
    """`attention` with every step in the dtype of the inputs, and for all rows at once: what people write by hand.

    Examples:
        >>> query = key = value = torch.randn(2, 8, 128, 64, dtype=torch.bfloat16)
        >>> fusedattn.reference.eager(query, key, value, causal=True).dtype
        torch.bfloat16

    Its error is the unit that errors are measured in, and its time what `naive` means in a benchmark.
    """
    check_flags(return_lse=return_lse, return_weights=return_weights)
    check_names("eager", options, Arguments._fields)
    call = checked(Arguments(query, key, value, **options))
    return results(query.dim(), *formula.run_eagerly(call, return_lse, return_weights))
