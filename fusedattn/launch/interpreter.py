"""Fixes for Triton's interpreter. It needs NumPy, so only interpreting processes import it.

bfloat16: Triton multiplies and sums its bits as integers, and truncates in casts.
Products: in BLAS the order of sums depends on processor and shapes, on GPUs only on the inner dimension. Kernels rely
on the order of GPUs, which lets delta cancel with dp.
fma: Triton rounds the product, too. A GPU rounds once.
Threads: Triton keeps the running program and its patches of the language in globals, so threads take turns.
"""

import contextlib
import os
import threading

import numpy
import triton.language as tl
from triton.runtime import interpreter as upstream


def _wide(handle):
    """Convert a bfloat16 handle to float32, with its bits as the upper half; return other handles unchanged."""
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    bits = handle.data.view(numpy.uint16).astype(numpy.uint32) << 16
    return upstream.TensorHandle(bits.view(numpy.float32), tl.float32)


def _narrow(handle):
    """Round a float32 or float64 handle to bfloat16, to nearest even."""
    bits = handle.data.astype(numpy.float32).view(numpy.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    nan = numpy.uint32(0x7FC0)
    return upstream.TensorHandle(numpy.where(numpy.isnan(handle.data), nan, rounded).astype(numpy.uint16), tl.bfloat16)


def repair():
    """Patch the interpreter once: its products, its casts, and a lock shared by all copies of this package."""
    builder = upstream.InterpreterBuilder
    if hasattr(builder, "turn"):
        return
    builder.turn = turn = threading.RLock()
    # Otherwise a process forked during another thread's turn would wait for ever.
    os.register_at_fork(before=turn.acquire, after_in_parent=turn.release, after_in_child=turn.release)
    cast = builder.cast_impl

    def create_dot(self, a, b, d, *options):
        # In float64, differences due to the order of sums vanish when rounded to float32.
        product = numpy.matmul(_wide(a).data.astype(numpy.float64), _wide(b).data.astype(numpy.float64))
        return upstream.TensorHandle(product.astype(d.data.dtype) + d.data, d.dtype.scalar)

    def create_fma(self, x, y, z):
        product = x.data.astype(numpy.float64) * y.data  # exact for float32
        return upstream.TensorHandle((product + z.data).astype(z.data.dtype), z.dtype.scalar)

    def cast_impl(self, source, kind):
        if kind.scalar == tl.bfloat16 and source.dtype.scalar in (tl.float32, tl.float64):
            return _narrow(source)
        return cast(self, _wide(source), kind)

    builder.create_dot, builder.create_fma, builder.cast_impl = create_dot, create_fma, cast_impl


@contextlib.contextmanager
def turn():
    """Hold the interpreter's lock, and silence NumPy's warnings."""
    with upstream.InterpreterBuilder.turn, numpy.errstate(all="ignore"):
        yield
