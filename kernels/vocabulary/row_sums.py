"""Sums by row in the backward: for the gradients of a bias, of slopes and of sinks."""

from typing import NamedTuple

import triton
import triton.language as tl


class Sums(NamedTuple):
    """Sums over the keys of a row: of its weights and of the gradients of its scores, each also times the distance."""

    p: tl.tensor
    ds: tl.tensor
    p_far: tl.tensor
    ds_far: tl.tensor


@triton.jit
def add(sums, p, ds, far):
    return Sums(
        sums.p + tl.sum(p, 1),
        sums.ds + tl.sum(ds, 1),
        sums.p_far + tl.sum(p * far, 1),
        sums.ds_far + tl.sum(ds * far, 1),
    )


@triton.jit
def mend(sums, delta, dlse):
    """(sums, delta) corrected by a delta from this pass's products: `preprocess` had it from the rounded output.

    One such error is common to a row. Spread by its weights it is small; summed over them, by distance, it is not.
    """
    error = tl.where(sums.p == 0, 0.0, sums.ds + (sums.p - 1) * delta - dlse)
    return Sums(sums.p, sums.ds - error * sums.p, sums.p_far, sums.ds_far - error * sums.p_far), delta + error
