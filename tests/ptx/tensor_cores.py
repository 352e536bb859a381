"""Emulates sums of tensor cores: groups of products, aligned to the largest exponent and truncated, not rounded.

Products are exact. A group of products and the running sum are aligned to the largest exponent among them; the exponent
of a product is the sum of the exponents of its factors. Bits far below the last bit of float32 are truncated, the rest
is added exactly, and the result is truncated to float32. The next group adds to it.

Source: F. A. Khattak and M. Mikaitis, "Accurate Models of NVIDIA Tensor Cores", arXiv:2512.07004. They compared their
models with GPUs bit by bit: models/A100TC.m and H100TC.m (`fma`, `neab`, `frmode`, `min_exp_limit`) of
github.com/north-numerical-computing/MATLAB-tensor-core. The independent experiments of
github.com/badasherez/gpu-simulator (utils/utils.h) agree for 16 bits, and give the smallest exponent of the A100.
"""

from typing import NamedTuple

import numpy as np

from .ops import F32

NOTHING = -1000  # the exponent of 0, below all others


def _exponents(x):
    return np.where(x == 0, NOTHING, np.frexp(x)[1] - 1).astype(np.int16)


class TensorCore(NamedTuple):
    """Constants of the tensor cores of one GPU; `plus` adds products as they do."""

    terms: int  # products of 16 bits in a group; tf32 has half as many
    extra: int  # bits kept below the last bit of float32
    smallest: int  # smallest exponent to align to

    def plus(self, sums, left, right, kind):
        """Return float32 sums (B, rows, n) plus the products of (B, rows, k) and transposed (B, n, k)."""
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
        rounded_towards_0 = ((total / scale).view(np.int64) & -(1 << 29)).view(np.float64)
        return rounded_towards_0.astype(F32)


MEASURED = {80: TensorCore(8, 1, -132), 90: TensorCore(16, 2, -133)}  # A100, H100
