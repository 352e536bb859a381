"""Triton's interpreter, made right for bfloat16: it multiplies and sums the bits as integers, and truncates casts.

It needs NumPy, as nothing else does: only what interprets imports this.
"""

import numpy
import triton.language as tl
from triton.runtime import interpreter as upstream


def _wide(handle):
    """A bfloat16 handle as float32, anything else as it is. Bits of bfloat16 are the upper half of a float32."""
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    bits = handle.data.view(numpy.uint16).astype(numpy.uint32) << 16
    return upstream.TensorHandle(bits.view(numpy.float32), tl.float32)


def _narrow(handle):
    """A float32 handle as bfloat16, rounded to nearest even."""
    bits = handle.data.astype(numpy.float32).view(numpy.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    nan = numpy.uint32(0x7FC0)
    return upstream.TensorHandle(numpy.where(numpy.isnan(handle.data), nan, rounded).astype(numpy.uint16), tl.bfloat16)


def repair():
    """Patch the interpreter's product and cast, once; kernels stay as they are."""
    builder = upstream.InterpreterBuilder
    if getattr(builder, "knows_bfloat16", False):
        return
    dot, cast = builder.create_dot, builder.cast_impl

    def create_dot(self, a, b, d, *options):
        return dot(self, _wide(a), _wide(b), d, *options)

    def cast_impl(self, source, kind):
        if kind.scalar == tl.bfloat16 and source.dtype.scalar == tl.float32:
            return _narrow(source)
        return cast(self, _wide(source), kind)

    builder.create_dot, builder.cast_impl, builder.knows_bfloat16 = create_dot, cast_impl, True


def quiet():
    """A context without NumPy's warnings, which it has of every infinity: the interpreter computes with NumPy."""
    return numpy.errstate(all="ignore")
