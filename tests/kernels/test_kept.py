"""What rounding takes from a 16-bit output comes back, to eight bits below its last; what is too far off stays."""

import pytest
import torch

pytest.importorskip("triton", reason="kernels need Triton")

import triton
import triton.language as tl
from fusedattn.kernels.vocabulary import kept, span, tiles

from fusedattn.launch import run

ROWS, COLUMNS = 16, 21


@triton.jit
def round_trip(X, Rounded, Stats, Lost, DV: tl.constexpr):
    """Rounded and Lost, from X: contiguous matrices of 16 rows, DV columns each."""
    plane = span.Plane(tl.program_id(0), tl.program_id(0), tl.program_id(0), ())
    rows, c = tl.arange(0, 16), tl.arange(0, tiles.width(DV))[None, :]
    dtype: tl.constexpr = Rounded.dtype.element_ty
    x = tiles.load(tiles.View(X, (DV, 1)), rows, rows < 16, DV)
    m = kept.table(Stats, plane, 16, dtype, DV)
    kept.store(m, rows, 16, rows * 0 + 5.0, rows * 0 + 7.0)
    kept.store_tail(m, rows, 16, x, c, DV, dtype)
    tiles.store(tiles.View(Rounded, (DV, 1)), rows, 16, x, DV)
    rounded = tiles.load(tiles.View(Rounded, (DV, 1)), rows, rows < 16, DV)
    tiles.store(tiles.View(Lost, (DV, 1)), rows, 16, kept.lost(m, rows, 16, rounded, DV), DV)


def lost(x, dtype):
    """(x rounded, what that took as the kernels know it, the table)"""
    rounded, back = x.to(dtype), torch.full_like(x, float("nan"))
    stats = x.new_full((ROWS, kept.columns.fn(getattr(tl, str(dtype).removeprefix("torch.")), COLUMNS)), 3.0)
    with run.surroundings(x.device):
        round_trip[(1,)](x, rounded, stats, back, DV=COLUMNS)
    assert torch.equal(rounded, x.to(dtype))
    return rounded, back, stats


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_eight_bits_come_back(dtype, device):
    for size in (1.0, 1e-3, 1e3):
        x = torch.randn(ROWS, COLUMNS, device=device) * size
        x[0, 0] = 0.0
        rounded, back, stats = lost(x, dtype)
        left = (x.double() - rounded.double() - back.double()).abs()
        last = torch.finfo(dtype).eps * 2.0 ** x.abs().log2().floor()
        assert ((left <= last / 256)[x.abs() >= torch.finfo(dtype).tiny]).all() and back[0, 0] == 0
        assert stats.shape[1] == 2 + (COLUMNS + 3) // 4 and (stats[:, 0] == 5).all() and (stats[:, 1] == 7).all()


def test_what_overflows_or_is_subnormal_is_as_it_was_rounded(device):
    x = torch.zeros(ROWS, COLUMNS, device=device)
    x[0, :6] = torch.tensor([7e4, -7e4, 1e-9, -1e-9, 65519.0, float("inf")])
    rounded, back, _ = lost(x, torch.float16)
    assert rounded[0, :2].isinf().all() and not back[0, 2:4].any() and back[0, 4] == 15.0
    assert not (rounded[0, [0, 1, 5]].float() + back[0, [0, 1, 5]]).isfinite().any()  # no number is made of infinity
