"""Subtracts a common mean from the values, so that bfloat16 outputs keep their differences.

The gradient of a score is a difference of products with the values. A mean shared by all values cancels there, but its
rounding error stays. That mean is called the centre. If a backward follows, the forward also saves output - centre.
"""

from typing import Any

import torch
from torch import Tensor

from ..naive.formula import grouped, repeated

INFINITE = float("inf")
OFF_CENTRE = 0.5  # values are centred if mean / root mean square exceeds this


def centre(value: Tensor, mask: Tensor | None = None) -> Tensor | None:
    """Return the mean of values over keys, (B, Hkv, 1, Dv), with 0 for small means; None if all are small.

    mask: the key_mask, (1 or B, keys); values that it hides must be 0.
    """
    # A head's mean depends on its values alone: under vmap, forward and backward may get different batches.
    count: Any = value.shape[2] if mask is None else mask.sum(1).clamp_min(1)[:, None, None, None]
    mean = value.sum(2, keepdim=True, dtype=torch.float32) / count
    square = value.float().square_().sum(2, keepdim=True) / count  # vector_norm takes up to 12 times as long
    # Do not subtract a mean that a few large values dominate: it would round all other values like the large ones.
    large = (mean.abs() > OFF_CENTRE * square.sqrt()) & mean.isfinite()
    large &= mean.abs().amax(3, True) > OFF_CENTRE * square.mean(3, True).sqrt()  # of the whole head
    return mean.to(value.dtype).masked_fill_(~large, 0.0) if bool(large.any()) else None


def with_centre(out: Tensor, kept: Tensor, lse: Tensor, common: Tensor) -> tuple[Tensor, Tensor]:
    """Return (output to save, its subtracted mean), per head: (`kept`, `common`), or (`out`, 0) if out is small."""
    # Outputs much smaller than the centre lose digits when it is subtracted, as in rows that see few keys with small
    # values. If most rows of a head are like that, its whole output is saved, and its centre is 0.
    outputs, seen = (grouped(x, common.shape[1]) for x in (out, (lse != -INFINITE)[..., None]))
    mean = outputs.abs().sum((1, 2), dtype=torch.float32) / (seen.sum((1, 2)).clamp_min(1) * out.shape[3])
    small = mean.view(*common.shape[:2], 1, 1) < common.abs().mean((2, 3), True, dtype=torch.float32) / 2
    return torch.where(repeated(small, out.shape[1]), out, kept), common.masked_fill(small, 0.0)
