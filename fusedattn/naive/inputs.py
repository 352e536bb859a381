"""Prepares the inputs of a call for the formula: one dtype, and zeros for hidden rows and keys."""

from typing import Any

import torch
from torch import Tensor

from ..call.options import INPUTS, Call, inputs


def prepared(call: Call, dtype: torch.dtype) -> Call:
    """Return the call in `dtype`, with zeros for rows and keys that query_mask and key_mask hide."""
    if call.key_mask is call.query_mask is None and all(x is None or x.dtype == dtype for x in inputs(call)):
        return call
    learned = [name for name in INPUTS if name not in ("query", "key", "value") and getattr(call, name) is not None]
    fields: dict[str, Any] = {name: cast(getattr(call, name), dtype) for name in learned}
    query, key, value = call.query.to(dtype), call.key.to(dtype), call.value.to(dtype)
    if call.key_mask is not None:
        hidden = ~call.key_mask[:, None, :, None]
        key, value = key.masked_fill(hidden, 0.0), value.masked_fill(hidden, 0.0)
    if call.query_mask is not None:
        query = query.masked_fill(~call.query_mask[:, None, :, None], 0.0)
    return call._replace(**fields | dict(query=query, key=key, value=value))


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor in `dtype`. Finite values stay finite: finfo.min of float64 is a number, not a mask."""
    lowest = torch.finfo(dtype).min
    if torch.finfo(tensor.dtype).min < lowest:
        hidden = tensor == float("-inf")
        finite = tensor.masked_fill(hidden, 0.0)
        clamped = tensor.detach().clamp(lowest, -lowest).masked_fill(hidden, float("-inf"))
        tensor = clamped + (finite - finite.detach())  # a clamp would stop gradients
    return tensor.to(dtype)
