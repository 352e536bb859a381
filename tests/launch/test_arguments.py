"""Whether threads load a tensor element by element: what kernels are told where Triton copies no wider pieces."""

import pytest
import torch

pytest.importorskip("triton", reason="kernels need Triton")

from fusedattn.launch import arguments

FLAT = torch.zeros(100_000, dtype=torch.float16)


@pytest.mark.parametrize(
    "shape, strides, offset, expected",
    [
        ((2, 2, 9, 64), (1152, 576, 64, 1), 0, False),
        ((2, 2, 9, 64), (1152, 576, 64, 1), 8, False),  # 16 bytes on
        ((2, 2, 9, 64), (1152, 576, 64, 1), 1, True),
        ((2, 2, 9, 64), (1170, 585, 65, 1), 0, True),
        ((2, 2, 9, 8), (144, 72, 8, 1), 0, True),  # of strides Triton knows multiples of 16 elements alone
        ((2, 2, 9, 64), (1152, 576, 1, 9), 0, True),
        ((2, 2, 9, 17), (576, 288, 32, 1), 0, True),
        ((1, 1, 1, 64), (3, 5, 7, 1), 0, False),  # strides of one element mean nothing
        ((1, 1, 1, 1), (1, 1, 1, 1), 0, True),
    ],
)
def test_what_threads_load(shape, strides, offset, expected):
    assert arguments.by_threads(FLAT.as_strided(shape, strides, offset)) is expected
