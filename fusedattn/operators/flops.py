"""FLOP counts of the operators, for `torch.utils.flop_counter.FlopCounterMode`.

A matrix product counts 2 * m * n * k, hidden pairs included, as in torch's own attention. Packed sequences and caches
count with their lengths. Fake ones count with maximum lengths or capacities, or total lengths without a maximum.
"""

import functools
from typing import Any

import torch

from ..call.checks import in_memory
from ..call.decode import stand_in
from ..call.private import argument_names, flop_formulas

# {operator: (number of matrix products over the query's head_dim, number over the value's head_dim)}
PRODUCTS = dict(forward=(1, 1), backward=(3, 2), tangent=(3, 2), decode=(1, 1))


def _pairs(values: dict[str, Any]) -> Any:
    """Return the number of (row, key) pairs of one head over all batches. Keys in a cache include the new ones."""
    query = values["query"]
    batch, _, rows, _ = query.shape
    if "key_cache" in values:
        most, lengths = stand_in(values["key_cache"], values["block_table"]).shape[2], values["cache_seqlens"]
        if not in_memory([lengths]):
            return batch * rows * most
        return rows * sum(min(length + values["added"], most) for length in lengths.tolist())
    keys = values["key"].shape[2]
    cu_seqlens, longest = ((values[f"{name}_q"], values[f"{name}_k"]) for name in ("cu_seqlens", "max_seqlen"))
    if cu_seqlens[0] is None:
        return batch * rows * keys
    if in_memory(cu_seqlens):
        return sum(a * b for a, b in zip(*(offsets.diff().tolist() for offsets in cu_seqlens), strict=True))
    if any(length is None for length in longest):
        return rows * keys
    return (cu_seqlens[0].shape[0] - 1) * longest[0] * longest[1]


def _flops(operator: Any, *arguments: Any, out_val: Any = None, **more: Any) -> Any:
    values = dict(zip(argument_names(operator.default), arguments, strict=False)) | more
    query, value = values["query"], values["value_cache" if "value_cache" in values else "value"]
    like_query, like_value = PRODUCTS[operator.__name__]
    width = like_query * query.shape[3] + like_value * value.shape[3]
    return 2 * _pairs(values) * query.shape[1] * width


def offer(operator: Any) -> None:
    """Add an operator's FLOP formula to torch's active counters. Call this before the operator."""
    # It is not done at import: torch's module imports Triton, and a counter copies the formulas when it is created.
    if torch.compiler.is_compiling() or operator.__name__ not in PRODUCTS:
        return
    for formulas in flop_formulas():
        if operator not in formulas:
            formulas[operator] = functools.partial(_flops, operator)
