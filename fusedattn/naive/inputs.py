"""Prepares the inputs of a call for the formula: one dtype, and zeros for hidden rows and keys."""

from typing import Any

import torch
from torch import Tensor

from ..call.options import INPUTS, Call, inputs


def prepared(call: Call, dtype: torch.dtype) -> Call:
    """Return the call in `dtype`, with zeros for rows and keys that query_mask and key_mask hide."""
    if call.key_mask is call.query_mask is None and all(x is None or x.dtype == dtype for x in inputs(call)):
        return call
    present = [name for name in INPUTS if getattr(call, name) is not None]
    fields: dict[str, Any] = {name: cast(getattr(call, name), dtype) for name in present}
    for name, mask in dict(query=call.query_mask, key=call.key_mask, value=call.key_mask).items():
        if mask is not None:
            fields[name] = fields[name].masked_fill(~mask[:, None, :, None], 0.0)
    return call._replace(**fields)


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor in `dtype`. Finite values beyond its range are clamped: as -inf, they would hide the score."""
    lowest = torch.finfo(dtype).min
    if torch.finfo(tensor.dtype).min < lowest:
        hidden = tensor == float("-inf")
        finite = tensor.masked_fill(hidden, 0.0)
        clamped = tensor.detach().clamp(lowest, -lowest).masked_fill(hidden, float("-inf"))
        tensor = clamped + (finite - finite.detach())  # a plain clamp would stop gradients
    return tensor.to(dtype)
