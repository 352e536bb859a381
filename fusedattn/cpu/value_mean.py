"""Subtracts a common mean from the values, so that bfloat16 outputs keep their differences.

The gradient of a score is a difference of products with the values. A mean shared by all values cancels there, but its
rounding error stays. So a forward with a backward also computes and saves the output less that mean, the centre.
"""

import torch
from torch import Tensor

INFINITE = float("inf")
SAMPLE = 64  # keys read for a first guess
OFF_CENTRE = 0.5  # values are centred if mean / root mean square exceeds this


def centre(value: Tensor) -> Tensor | None:
    """Return the mean over keys of bfloat16 values, (B, Hkv, 1, Dv), 0 where small; None if small everywhere.

    A head's mean depends on its values alone: under vmap, forward and backward may get different batches.
    """
    if value.dtype != torch.bfloat16:
        return None
    value = value.detach()
    # A sample can show that the mean is small. In a short call each operator takes 20 microseconds.
    some = value if value.shape[2] <= 4 * SAMPLE else value[:, :, :SAMPLE]
    keys, columns = some.shape[2:]
    sums, share = some.sum(2, keepdim=True), OFF_CENTRE * (keys / max(1, columns)) ** 0.5
    norm, most = (torch.linalg.vector_norm(x, order, (2, 3)) for x, order in ((some, 2), (sums, INFINITE)))
    heads_of = zip(most.tolist(), norm.tolist(), strict=True)
    if all(a <= share * b for heads in heads_of for a, b in zip(*heads, strict=True)):
        return None
    mean = value.mean(2, keepdim=True, dtype=torch.float32)
    size = torch.linalg.vector_norm(value, dim=2, keepdim=True, dtype=torch.float32) / value.shape[2] ** 0.5
    # Not if a few large values dominate the mean: subtracting it would round all others like these.
    common = (most > share * norm)[..., None, None] & (mean.abs() > OFF_CENTRE * size) & mean.isfinite()
    return mean.to(value.dtype).masked_fill_(~common, 0.0)


def to_heads(x: Tensor, heads: int) -> Tensor:
    """Repeat each key head for its query heads."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def in_groups(x: Tensor, kv_heads: int) -> Tensor:
    """Return (B, Hq, S, D) as (B, Hkv, Hq // Hkv * S, D): one group of rows for each key head."""
    return x.reshape(x.shape[0], kv_heads, -1, x.shape[3])


def with_centre(out: Tensor, kept: Tensor, lse: Tensor, common: Tensor) -> tuple[Tensor, Tensor]:
    """Return (the output to save, the centre) of each head.

    Args:
        kept: the output less the centre. Outputs much smaller than the centre lose digits there, as in rows that see
            few keys with small values. If most rows of a head do, save `out`, and make the head's centre 0.
    """
    small = _mostly_small(out, lse != -INFINITE, common)
    return torch.where(to_heads(small, out.shape[1]), out, kept), common.masked_fill(small, 0.0)


def _mostly_small(out: Tensor, seen: Tensor, common: Tensor) -> Tensor:
    """Return, as (B, Hkv, 1, 1), whether a head's outputs are much smaller than its centre on average."""
    out, seen = (in_groups(x, common.shape[1]) for x in (out, seen[..., None]))
    mean = out.abs().sum((2, 3), dtype=torch.float32) / (seen.sum((2, 3)).clamp_min(1) * out.shape[3])
    return (mean < common.abs().mean((2, 3), dtype=torch.float32) / 2)[..., None, None]
