"""Merges attention over disjoint sets of keys, and sinks, by their lse."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..call.options import Call
from .value_mean import INFINITE

LARGE = {torch.bfloat16: 2.0**13}  # lse above which float32 is too inaccurate for merging; 16 for other dtypes


def exact(call: Call, lse: Tensor, less: float, again: Callable[[Tensor], Tensor]) -> Tensor:
    """Return an lse minus the offset `less`, in float64 if its rounding error would be visible in the merged result."""
    # again(near): recomputes the lse minus `near`. That is close to 0, where the rounding error is small.
    large = LARGE.get(call.query.dtype, 16.0)
    if lse.dtype == torch.float64 or not bool(((lse.abs() > large) & lse.isfinite()).any()):
        return lse
    near = lse.masked_fill(lse.isinf(), 0.0) + less
    return again(near[..., None]).double() + (near.double() - less)


def merged(results: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Merge (output, lse) over each of several sets of keys into (output, lse) over all keys."""
    shares, total = shares_of([lse for _, lse in results])
    shares = shares.to(torch.promote_types(results[0][0].dtype, torch.float32))
    terms = [out * share[..., None] for (out, _), share in zip(results, shares, strict=True)]
    return torch.stack(terms).sum(0), total


def shares_of(lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return (share of each set of keys in the softmax over all, 0 if every lse is -inf; lse over all)."""
    every = torch.stack(torch.broadcast_tensors(*lses))
    total = every.logsumexp(0)
    return every.softmax(0).masked_fill_(total == -INFINITE, 0.0), total
