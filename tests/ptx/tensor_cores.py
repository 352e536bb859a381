"""Summation of tensor cores: a few products at once, aligned to the largest, and truncated instead of rounded.

Products are exact. A group of them and the sum so far are aligned to the largest exponent among them, where a product
has the sum of the exponents of its factors. What lies more than a few bits below the last one of float32 is cut off,
the rest is added exactly, and the result cut off to float32. The next group adds to that.

Source: F. A. Khattak and M. Mikaitis, "Accurate Models of NVIDIA Tensor Cores", arXiv:2512.07004, who compared their
models with the GPUs bit by bit; they are models/A100TC.m and H100TC.m (`fma`, `neab`, `frmode`, `min_exp_limit`) of
github.com/north-numerical-computing/MATLAB-tensor-core. github.com/badasherez/gpu-simulator has the same of 16 bits
(utils/utils.h), from experiments of its own, and the smallest exponent of the A100.
"""

from typing import NamedTuple

import numpy as np

from .ops import F32

NOTHING = -1000  # the exponent of 0, to which nobody is aligned


def _exponents(x):
    return np.where(x == 0, NOTHING, np.frexp(x)[1] - 1).astype(np.int16)


def _cut(x):
    """float64 as float32, rounded towards 0."""
    return (x.view(np.int64) & -(1 << 29)).view(np.float64).astype(F32)


class TensorCore(NamedTuple):
    """A GPU's."""

    terms: int  # products of 16 bits that are summed up at once; half as many of tf32
    extra: int  # bits that are kept below the last one of float32
    smallest: int  # exponent that numbers are aligned to

    def plus(self, sums, left, right, kind):
        """(B, rows, n) sums of float32, plus (B, rows, k) @ (B, n, k) transposed."""
        terms = self.terms // 2 if kind == "tf32" else self.terms
        for first in range(0, left.shape[2], terms):
            sums = self._group(sums, left[:, :, None, first : first + terms], right[:, None, :, first : first + terms])
        return sums

    def _group(self, sums, left, right):
        largest, of_left, of_right = _exponents(sums), _exponents(left), _exponents(right)
        for i in range(left.shape[3]):
            np.maximum(largest, of_left[..., i] + of_right[..., i], out=largest)
        scale = np.ldexp(1.0, 23 + self.extra - np.maximum(largest, self.smallest))
        left, right = left.astype(np.float64), right.astype(np.float64)
        total = np.trunc(sums * scale)
        for i in range(left.shape[3]):
            total += np.trunc(left[..., i] * right[..., i] * scale)
        return _cut(total / scale)


MEASURED = {80: TensorCore(8, 1, -132), 90: TensorCore(16, 2, -133)}  # A100, H100
