"""Layouts of a warpgroup's registers: of products, their operands, Philox counters and row statistics."""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..vocabulary import memory

WARPS = gl.constexpr(4)  # warps of a warpgroup


@gluon.jit
def zeros(ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Return zeros in the layout of a wgmma's result."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, COLUMNS, 16])
    return gl.zeros([ROWS, COLUMNS], gl.float32, LAYOUT)


@gluon.jit
def operand(x, sums):
    """Return x in the layout of the left operand of a wgmma that adds to `sums`."""
    LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=sums.type.layout, k_width=2)
    return gl.convert_layout(x, LAYOUT)


@triton.constexpr_function
def of_counters(COLUMNS):
    """Return a layout that gives each thread the Philox counters (`dropout.four`) of its own scores.

    A counter serves 2 x 2 scores. The scores [64, COLUMNS] are a wgmma result of one warpgroup.
    """
    registers = [[0, 1], *([0, 8 << i] for i in range(COLUMNS.bit_length() - 5))]
    lanes, warps = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]], [[8, 0], [16, 0]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [32, COLUMNS // 2])


@triton.constexpr_function
def of_rows(count):
    """Return a layout of [count, 1] row statistics: a thread has those of its columns of scores [keys, rows]."""
    registers = [[1, 0], *([8 << i, 0] for i in range((count // 8).bit_length() - 1))]
    lanes, warps = [[2, 0], [4, 0], [0, 0], [0, 0], [0, 0]], [[0, 0], [0, 0]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [count, 1])


@gluon.jit
def lines(dq):
    """Reorder dq [rows, columns] to [lines, 32], so that each thread's 4 values in 8 columns are adjacent.

    Each thread then stores 16 bytes at a time, straight from registers, without bank conflicts. A line has 8 columns of
    rows r, r + 1, r + 8 and r + 9. The kernel `postprocess` reverses the order.
    """
    ROWS: gl.constexpr = dq.shape[0]
    EIGHTS: gl.constexpr = dq.shape[1] // 8
    parts = dq.reshape([ROWS // 16, 2, 4, 2, EIGHTS, 4, 2]).permute((4, 0, 2, 3, 5, 1, 6))
    return parts.reshape([EIGHTS * ROWS // 4, 32])


@gluon.jit
def store_wide(m, first, n, tile, D: gl.constexpr, column=0):
    """Store a tile at (first, column) of a matrix of float32 with n rows and D columns."""
    LAYOUT: gl.constexpr = tile.type.layout
    r = first + gl.arange(0, tile.shape[0], layout=gl.SliceLayout(1, LAYOUT))[:, None]
    c = column + gl.arange(0, tile.shape[1], layout=gl.SliceLayout(0, LAYOUT))[None, :]
    gl.store(memory.pointers(m, r, c), tile, mask=(r < n) & (c < D))
