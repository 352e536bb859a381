"""Sums by row, or by key, in the backward: for the gradients of a bias, of slopes and of sinks."""

from typing import NamedTuple

import triton
import triton.language as tl


class Sums(NamedTuple):
    """Sums over the keys of a row: of weights and of gradients of scores, plain and times the distance."""

    p: tl.tensor
    ds: tl.tensor
    p_far: tl.tensor
    ds_far: tl.tensor


@triton.jit
def total(x):
    """Sum along axis 1, to the same number in all lanes that hold it.

    An unrounded product would be fused with the first addition of two lanes, differently in each, and their sums would
    differ. LLVM makes one rounding instruction of x * y + 0.
    """
    return tl.sum(x + 0.0, 1)


@triton.jit
def add(sums, p, ds, far):
    return Sums(
        sums.p + tl.sum(p, 1),  # p comes from exp2, so there is no product to fuse
        sums.ds + total(ds),
        sums.p_far + total(p * far),
        sums.ds_far + total(ds * far),
    )


@triton.jit
def mend(sums, delta, dlse):
    """Return (sums, delta) with delta corrected by this pass's products; `preprocess` used the rounded output.

    That error is common to a row. Spread by its weights it is small; summed over them, by distance, it is not.
    """
    error = tl.where(sums.p == 0, 0.0, sums.ds + (sums.p - 1) * delta - dlse)
    return Sums(sums.p, sums.ds - error * sums.p, sums.p_far, sums.ds_far - error * sums.p_far), delta + error
