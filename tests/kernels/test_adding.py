"""Tiles added to memory: what lies before the end of rows and columns, and nothing else."""

import pytest
import torch

triton = pytest.importorskip("triton", reason="kernels need Triton")
import triton.language as tl  # noqa: E402
from fusedattn.kernels.vocabulary import memory, span  # noqa: E402

from fusedattn.launch import arguments, run  # noqa: E402


@triton.jit
def add(Sums, n, D: tl.constexpr, ROWS: tl.constexpr):
    """A tile of ones to the second block of rows of the last head of the last batch."""
    rows = ROWS + tl.arange(0, ROWS)
    plane = span.Plane(tl.program_id(0) + 1, tl.program_id(0) + 2, tl.program_id(0) + 5, ())
    memory.add(Sums, plane, rows, ROWS, n, tl.full([ROWS, memory.width(D)], 1.0, tl.float32), D)


@pytest.mark.parametrize("bulk", [False, True])
@pytest.mark.parametrize("n, dim", [(23, 20), (32, 16), (17, 32), (16, 20)])
def test_nothing_is_added_past_the_end_of_rows_and_columns(n, dim, bulk, device):
    if bulk and device == "cuda" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("before 9.0 there is no copy engine")
    whole = torch.zeros(2, 3, n + 16, dim + 12, device=device)
    sums = whole[:, :, :n, :dim]
    with run.surroundings(whole.device):  # and launch lends the interpreter the sum of descriptors
        add[(1,)](arguments.descriptor(sums, 16) if bulk else arguments.of(sums), n, dim, 16)
    want = torch.zeros_like(whole)
    want[1, 2, 16:n, :dim] = 1.0
    assert torch.equal(whole, want)
