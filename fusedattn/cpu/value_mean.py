"""Subtracts a common mean from the values, so that bfloat16 outputs keep their differences.

Gradients of scores are differences of products of the values, and what all values share adds nothing to these but its
rounding. So a forward with a backward also computes the output less that, which is the centre, and keeps it so.
"""

import torch
from torch import Tensor

INFINITE = float("inf")
SAMPLE = 64  # keys whose values are looked at before all are
OFF_CENTRE = 0.5  # values whose mean is more than this share of their size are centred


def centre(value: Tensor) -> Tensor | None:
    """(B, Hkv, 1, Dv): what values of bfloat16 have in common, 0 where that is little; None if it is everywhere.

    That of a head depends on its values alone, so that forward and backward, which vmap may hand other batches, agree.
    """
    if value.dtype != torch.bfloat16:
        return None
    value = value.detach()
    # Enough to see that there is nothing in common. In a short call each operator takes twenty microseconds.
    some = value if value.shape[2] <= 4 * SAMPLE else value[:, :, :SAMPLE]
    keys, columns = some.shape[2:]
    sums, share = some.sum(2, keepdim=True), OFF_CENTRE * (keys / max(1, columns)) ** 0.5
    norm, most = (torch.linalg.vector_norm(x, order, (2, 3)) for x, order in ((some, 2), (sums, INFINITE)))
    heads_of = zip(most.tolist(), norm.tolist(), strict=True)
    if all(a <= share * b for heads in heads_of for a, b in zip(*heads, strict=True)):
        return None
    mean = value.mean(2, keepdim=True, dtype=torch.float32)
    size = torch.linalg.vector_norm(value, dim=2, keepdim=True, dtype=torch.float32) / value.shape[2] ** 0.5
    # Not what a few large values make of a mean: less that, all others would be rounded like them.
    common = (most > share * norm)[..., None, None] & (mean.abs() > OFF_CENTRE * size) & mean.isfinite()
    return mean.to(value.dtype).masked_fill_(~common, 0.0)


def to_heads(x: Tensor, heads: int) -> Tensor:
    """Repeat each key head for its query heads."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def in_groups(x: Tensor, kv_heads: int) -> Tensor:
    """Return (B, Hq, S, D) as (B, Hkv, Hq // Hkv * S, D): one group of rows for each key head."""
    return x.reshape(x.shape[0], kv_heads, -1, x.shape[3])


def with_centre(out: Tensor, kept: Tensor, lse: Tensor, common: Tensor) -> tuple[Tensor, Tensor]:
    """Return (what a backward takes of an output, the centre).

    kept is the output of values less the centre. An output that is much smaller than the centre loses its digits there:
    so it is in rows that see few keys, with small values. If most rows of a head are such, the head's centre is 0.
    """
    small = _mostly_small(out, lse != -INFINITE, common)
    return torch.where(to_heads(small, out.shape[1]), out, kept), common.masked_fill(small, 0.0)


def _mostly_small(out: Tensor, seen: Tensor, common: Tensor) -> Tensor:
    """Return, as (B, Hkv, 1, 1), whether a head's outputs are much smaller than its centre on average."""
    out, seen = (in_groups(x, common.shape[1]) for x in (out, seen[..., None]))
    mean = out.abs().sum((2, 3), dtype=torch.float32) / (seen.sum((2, 3)).clamp_min(1) * out.shape[3])
    return (mean < common.abs().mean((2, 3), dtype=torch.float32) / 2)[..., None, None]
