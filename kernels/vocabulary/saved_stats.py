"""Row statistics that the forward saves for the backward: the softmax, and the rounding error of 16-bit outputs.

The backward subtracts delta, a row's sum of out * grad_out, from the gradient of each weight. Rounding the output to 16
bits shifts delta for all keys of a row. Values with a large common part make that error large, and keys with a common
part multiply it; eager PyTorch has no such error. Eight more bits of the output almost remove it.
"""

import triton
import triton.language as tl

from . import memory, softmax


@triton.constexpr_function
def columns(dtype, DV):
    """Return how many float32 numbers a row saves: row_max, log2_sum and, for a 16-bit output, a byte per column."""
    return 2 + (triton.cdiv(DV, 4) if dtype.primitive_bitwidth == 16 else 0)


@triton.constexpr_function
def _shift(dtype):
    """Return the number of lowest bits of a float32 that neither its 16-bit rounding nor the saved byte keeps."""
    return 5 if dtype == tl.float16 else 8


@triton.jit
def table(Kept, plane, n, dtype: tl.constexpr, DV: tl.constexpr):
    return memory.table(Kept, plane, n, columns(dtype, DV))


@triton.jit
def load(m, rows, n):
    return softmax.row(memory.load_column(m, rows, n, 0), memory.load_column(m, rows, n, 1))


@triton.jit
def errors(m):
    """Return an int8 View of a `table`: the rounding error of each element of the output."""
    return memory.View(tl.cast(m.base + 2, tl.pointer_type(tl.int8), bitcast=True), (m.strides[0] * 4, 1))


@triton.jit
def store(m, rows, n, row_max, log2_sum):
    memory.store_column(m, rows, n, 0, row_max)
    memory.store_column(m, rows, n, 1, log2_sum)


@triton.jit
def store_tail(m, rows, n, out, c, DV: tl.constexpr, dtype: tl.constexpr):
    """Store the rounding error of a tile of the output, one byte per element, if dtype has 16 bits."""
    # Call this before the output is stored. The compiler may then keep only the rounded output, in half the registers.
    if dtype.primitive_bitwidth == 16:
        if dtype == tl.bfloat16:
            # A bfloat16 is the upper half of a float32. The lower half, as a signed number, is the error. If it is half
            # of the last bit, the output was rounded to even, so the last bit decides the sign of the error.
            bits = out.to(tl.int32, bitcast=True)
            error = (bits + ((bits >> 16) & 1) - 1) << 16 >> 16
            tail = (tl.minimum(error + 128, 0x7FFF) >> 8).to(tl.int8)
        else:
            left: tl.constexpr = _shift(dtype)
            rounded = out.to(dtype).to(tl.float32)
            error = out.to(tl.int32, bitcast=True) - rounded.to(tl.int32, bitcast=True)
            steps = (error + (1 << (left - 1))) >> left
            # After overflow, or near subnormals, the error does not fit in a byte.
            tail = tl.where(tl.abs(steps) <= 128, tl.minimum(steps, 127), 0).to(tl.int8)
        r = rows[:, None]
        tl.store(memory.pointers(errors(m), r, c), tail, mask=(r < n) & (c < DV))


@triton.jit
def lost(errors, rows, n, out, DV: tl.constexpr):
    """Return the rounding error of the output tile `out`, from the View `errors`; zero past the end."""
    left: tl.constexpr = _shift(out.dtype)
    rounded = out.to(tl.float32)
    steps = memory.load(errors, rows, rows < n, DV, out.shape[1]).to(tl.int32)
    return (rounded.to(tl.int32, bitcast=True) + (steps << left)).to(tl.float32, bitcast=True) - rounded
