"""Sums by row, or by key, in the backward: for the gradients of a bias, of slopes and of sinks."""

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
def total(x):
    """Sums along axis 1: one number in all lanes that hold it.

    A product that is not yet rounded would be fused with the first addition of two lanes, in each with its own, and
    they would come to two numbers. Of x * y + 0 LLVM makes one instruction, which rounds.
    """
    return tl.sum(x + 0.0, 1)


@triton.jit
def add(sums, p, ds, far):
    return Sums(
        sums.p + tl.sum(p, 1),  # of powers of 2: there is no product
        sums.ds + total(ds),
        sums.p_far + total(p * far),
        sums.ds_far + total(ds * far),
    )


@triton.jit
def mend(sums, delta, dlse):
    """(sums, delta) corrected by a delta from this pass's products: `preprocess` had it from the rounded output.

    One such error is common to a row. Spread by its weights it is small; summed over them, by distance, it is not.
    """
    error = tl.where(sums.p == 0, 0.0, sums.ds + (sums.p - 1) * delta - dlse)
    return Sums(sums.p, sums.ds - error * sums.p, sums.p_far, sums.ds_far - error * sums.p_far), delta + error
