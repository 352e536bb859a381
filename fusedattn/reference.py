"""Reference implementations: the naive path (plain PyTorch, any device, any floating dtype), and eager PyTorch."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

from . import api
from .call.checks import check_flags, check_names, overridable
from .call.options import Arguments
from .call.rules import checked
from .dispatch.replay import results
from .naive import formula
from .naive.pairs import prepared


def _naive(function: Callable[..., Any]) -> Callable[..., Any]:

    @functools.wraps(function)
    def naive(*arguments: Any, **options: Any) -> Any:
        if "backend" in options:
            raise TypeError(f"{function.__name__}() got an unexpected keyword argument 'backend'")
        return function(*arguments, backend="naive", **options)

    signature = inspect.signature(function)
    parameters = [x for x in signature.parameters.values() if x.name != "backend"]
    vars(naive)["__signature__"] = signature.replace(parameters=parameters)
    naive.__module__ = __name__  # where pickle finds it
    naive.__doc__ = f"Compute `fusedattn.{function.__name__}` by the naive path: same arguments and results."
    return naive


# The naive path computes scores in blocks, which on a CPU fit a cache. If autograd would save more than
# `naive.formula.BUDGET` bytes of scores, the backward computes them again, except under torch.func. Compiled code
# computes all scores at once. Packed sequences of similar lengths are padded, and caches in pages are copied.
attention = _naive(api.attention)
attention_varlen = _naive(api.attention_varlen)
attention_decode = _naive(api.attention_decode)


@overridable
def eager(
    query: Tensor, key: Tensor, value: Tensor, *, return_lse: bool = False, return_weights: bool = False, **options: Any
) -> Tensor | Any:
    """Compute `attention` by plain PyTorch operations in the dtype of the inputs, for all rows at once.

    Tests allow other paths a multiple of this function's error. Benchmarks call it `naive`.

    Examples:
        >>> query = key = value = torch.randn(2, 8, 128, 64, dtype=torch.bfloat16)
        >>> fusedattn.reference.eager(query, key, value, causal=True).dtype
        torch.bfloat16
    """
    check_flags(return_lse=return_lse, return_weights=return_weights)
    check_names("eager", options, Arguments._fields)
    call = checked(Arguments(query, key, value, **options))
    as_written = formula.of_all(prepared(call, call.query.dtype), return_lse, return_weights, formula.AS_WRITTEN)
    return results(query.dim(), *as_written)
