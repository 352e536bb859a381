"""Makes the inputs of a call such that the formula may compute with all of them: one dtype, nothing that is hidden."""

import torch
from torch import Tensor

from ..call.form import Call


def prepared(call: Call, dtype: torch.dtype) -> Call:
    """The call in `dtype`, with zeros where key_mask and query_mask say that anything may stand."""
    floating = (call.query, call.bias, call.alibi_slopes, call.sinks)
    if call.key_mask is None and call.query_mask is None and all(x is None or x.dtype == dtype for x in floating):
        return call
    query, key, value = call.query.to(dtype), call.key.to(dtype), call.value.to(dtype)
    if call.key_mask is not None:
        hidden = ~call.key_mask[:, None, :, None]
        key, value = key.masked_fill(hidden, 0.0), value.masked_fill(hidden, 0.0)
    if call.query_mask is not None:
        query = query.masked_fill(~call.query_mask[:, None, :, None], 0.0)
    bias, slopes, sinks = (None if x is None else cast(x, dtype) for x in (call.bias, call.alibi_slopes, call.sinks))
    return call._replace(query=query, key=key, value=value, bias=bias, alibi_slopes=slopes, sinks=sinks)


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """`tensor` in `dtype`, where what is finite stays so: float64's finfo.min is a number, not a mask."""
    lowest = torch.finfo(dtype).min
    if torch.finfo(tensor.dtype).min < lowest:
        hidden = tensor == float("-inf")
        finite = tensor.masked_fill(hidden, 0.0)
        clamped = tensor.detach().clamp(lowest, -lowest).masked_fill(hidden, float("-inf"))
        tensor = clamped + (finite - finite.detach())  # a clamp would have no gradient where it clamps
    return tensor.to(dtype)
