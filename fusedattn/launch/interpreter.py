"""Triton's interpreter, made right for bfloat16, which it multiplies and sums as integers and truncates in casts.

And made to multiply alike on every machine: BLAS sums a product of matrices in an order that depends on the processor
and on the shapes, where hardware's goes with the inner dimension alone. Kernels rely on that: delta cancels with dp.

And made safe for threads, which take turns: it has one place for the number of the program that runs, and one for what
it puts in place of the language's functions meanwhile. It needs NumPy, as nothing else does: only what interprets
imports this.
"""

import contextlib
import os
import threading

import numpy
import triton.language as tl
from triton._C.libtriton import ir
from triton.runtime import interpreter as upstream


def _wide(handle):
    """A bfloat16 handle as float32, anything else as it is. Bits of bfloat16 are the upper half of a float32."""
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    bits = handle.data.view(numpy.uint16).astype(numpy.uint32) << 16
    return upstream.TensorHandle(bits.view(numpy.float32), tl.float32)


def _narrow(handle):
    """A handle of float32, or float64, as bfloat16, rounded to nearest even."""
    bits = handle.data.astype(numpy.float32).view(numpy.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    nan = numpy.uint32(0x7FC0)
    return upstream.TensorHandle(numpy.where(numpy.isnan(handle.data), nan, rounded).astype(numpy.uint16), tl.bfloat16)


def repair():
    """Patch the interpreter's product and cast, once, and lend it a sum by descriptor; kernels stay as they are.

    And lend it the lock by which threads take turns: it is one for all copies of this package.
    """
    builder = upstream.InterpreterBuilder
    if not hasattr(builder, "turn"):
        builder.turn = turn = threading.RLock()
        # A process that is forked in another thread's turn would wait for it for ever.
        os.register_at_fork(before=turn.acquire, after_in_parent=turn.release, after_in_child=turn.release)
    if getattr(builder, "knows_bfloat16", False):
        return
    cast = builder.cast_impl

    def create_dot(self, a, b, d, *options):
        # In float64 the order is lost below the rounding to float32.
        product = numpy.matmul(_wide(a).data.astype(numpy.float64), _wide(b).data.astype(numpy.float64))
        return upstream.TensorHandle(product.astype(d.data.dtype) + d.data, d.dtype.scalar)

    def cast_impl(self, source, kind):
        if kind.scalar == tl.bfloat16 and source.dtype.scalar in (tl.float32, tl.float64):
            return _narrow(source)
        return cast(self, _wide(source), kind)

    def create_descriptor_reduce(self, kind, descriptor, value, offsets):
        assert kind == ir.DESCRIPTOR_REDUCE_KIND.ADD, kind
        pointers, inside = descriptor.materialize_pointers(offsets)
        add = ir.ATOMIC_OP.FADD, pointers, value, inside, ir.MEM_SEMANTIC.RELAXED, ir.MEM_SYNC_SCOPE.GPU
        return self.create_atomic_rmw(*add)

    builder.create_dot, builder.cast_impl, builder.knows_bfloat16 = create_dot, cast_impl, True
    builder.create_descriptor_reduce = create_descriptor_reduce


@contextlib.contextmanager
def turn():
    """Inside, this thread alone interprets kernels, without the warnings that NumPy has of every infinity."""
    with upstream.InterpreterBuilder.turn, numpy.errstate(all="ignore"):
        yield
