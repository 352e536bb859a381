"""The functions of the package by the naive path, in any floating dtype, on any device; and eager attention."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

from . import api
from .call.form import Arguments, results
from .call.rules import check_flags, checked
from .naive import formula


def _naively(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of the package without its `backend`, computed naively."""

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        return function(*arguments, **options, backend="naive")

    signature = inspect.signature(function)
    parameters = [x for x in signature.parameters.values() if x.name != "backend"]
    vars(call)["__signature__"] = signature.replace(parameters=parameters)
    call.__doc__ = f"`fusedattn.{function.__name__}`, computed naively: same arguments, same answers, any device."
    return call


# Queries are taken in blocks where the score matrix would pass `naive.formula.BUDGET` bytes, in the backward too; but
# for code that is compiled, where all rows are taken at once, and under torch.func, which computes no block again.
attention = _naively(api.attention)
# Sequences are padded to the longest of those of like lengths.
attention_varlen = _naively(api.attention_varlen)
# Caches, as far as they have room, are read as one padded call, a copy of them where they are in pages.
attention_decode = _naively(api.attention_decode)


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
