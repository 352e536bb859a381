"""Stores and loads a row's softmax statistics, and the rounding error of 16-bit outputs, for the backward.

From the gradient of each weight the backward subtracts the mean of its row, the product of the output and its gradient.
An output of 16 bits has the mean wrong by as much for all keys of a row. Values that have much in common make that
error large, keys that have multiply it: eager PyTorch, whose sums are of what it subtracts from, has no such error.
With eight more bits of the output there is next to none here.
"""

import triton
import triton.language as tl

from . import memory


@triton.constexpr_function
def columns(dtype, DV):
    """How many numbers of float32, or float64, are kept of a row: its row_max, log2_sum, and the bytes."""
    return 2 + (triton.cdiv(DV, 4) if dtype.primitive_bitwidth == 16 else 0)


@triton.constexpr_function
def _shift(dtype):
    """The bits of float32 below a byte that is below the last bit of a 16-bit number."""
    return 5 if dtype == tl.float16 else 8


@triton.jit
def table(Kept, plane, n, dtype: tl.constexpr, DV: tl.constexpr):
    """The matrix of a plane: a row is row_max, log2_sum, and the tail of DV columns of an output of a dtype."""
    return memory.table(Kept, plane, n, columns(dtype, DV))


@triton.jit
def _bytes(m):
    """The bytes of rows of a `table`, a matrix like the output."""
    return memory.View(tl.cast(m.base + 2, tl.pointer_type(tl.int8), bitcast=True), (m.strides[0] * 4, 1))


@triton.jit
def store(m, rows, n, row_max, log2_sum):
    """Write the softmax of rows."""
    memory.store_column(m, rows, n, 0, row_max)
    memory.store_column(m, rows, n, 1, log2_sum)


@triton.jit
def store_tail(m, rows, n, out, c, DV: tl.constexpr, dtype: tl.constexpr):
    """Write what rounding to a dtype takes from a tile (rows, c) of the output, a byte each element, if it has 16 bits.

    Best before the output itself, which then is rounded and takes half the registers.
    """
    if dtype.primitive_bitwidth == 16:
        left: tl.constexpr = _shift(dtype)
        rounded = out.to(dtype).to(tl.float32)
        bits = out.to(tl.int32, bitcast=True) - rounded.to(tl.int32, bitcast=True)
        steps = (bits + (1 << (left - 1))) >> left
        # What overflows, or is subnormal, is further off than a byte can tell.
        tail = tl.where(tl.abs(steps) <= 128, tl.minimum(steps, 127), 0).to(tl.int8)
        r = rows[:, None]
        tl.store(memory.pointers(_bytes(m), r, c), tail, mask=(r < n) & (c < DV))


@triton.jit
def lost(m, rows, n, out, DV: tl.constexpr):
    """What rounding took from a tile of the output, as it was read; zero past the end."""
    left: tl.constexpr = _shift(out.dtype)
    rounded = out.to(tl.float32)
    steps = memory.load(_bytes(m), rows, rows < n, DV).to(tl.int32)
    return (rounded.to(tl.int32, bitcast=True) + (steps << left)).to(tl.float32, bitcast=True) - rounded
