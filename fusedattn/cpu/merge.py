"""Merges partial softmaxes and sinks, from the lse of each."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..call.options import Call
from .value_mean import INFINITE

# From where on the rounding of an lse to float32 shows in what it says that sets of keys weigh; 16 of other dtypes.
LARGE = {torch.bfloat16: 2.0**13}


def exact(call: Call, lse: Tensor, less: float, again: Callable[[Tensor], Tensor]) -> Tensor:
    """An lse less the offset, in float64 where its rounding would show in the shares of sets of keys.

    again: function of an offset of each row, which gives the lse less that: near 0, it is hardly rounded.
    """
    large = LARGE.get(call.query.dtype, 16.0)
    if lse.dtype == torch.float64 or not bool(((lse.abs() > large) & lse.isfinite()).any()):
        return lse
    near = lse.masked_fill(lse.isinf(), 0.0) + less
    return again(near[..., None]).double() + (near.double() - less)


def merged(found: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return (output, lse) over several sets of keys from those of each."""
    shares, total = shares_of([lse for _, lse in found])
    terms = [out * share[..., None].to(wide_of(out)) for (out, _), share in zip(found, shares, strict=True)]
    return torch.stack(terms).sum(0), total


def wide_of(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def shares_of(lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """What sets of keys and sinks have of the weight of all, which adds up to 1 however large lses are, and their lse.

    The shares are (sets, ...), 0 where no set has a weight.
    """
    every = torch.stack(torch.broadcast_tensors(*lses))
    total = every.logsumexp(0)
    return every.softmax(0).masked_fill_(total == -INFINITE, 0.0), total
