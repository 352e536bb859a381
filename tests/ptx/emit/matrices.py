"""Translates matrix products, by a warp or asynchronously by a warpgroup, and loads and stores of their operands."""

import re

import numpy as np

from ..ops import F32, U32, U64
from .operands import literal, vector
from .registry import instruction

MMA = [(16, "bf16"), (16, "f16"), (8, "tf32")]  # (k, type) of the m16n8 products
FRAGMENTS = "x1 x2 x4 trans shared"
SHAPES = " ".join(f"m64n{n}k{k}" for n in range(8, 257, 8) for k in (8, 16))  # shapes of warpgroup products
_ROWS = re.compile(r"m64n(\d+)k")


@instruction("ldmatrix.sync.aligned.m8n8", "b16", FRAGMENTS)
def ldmatrix(e, op, d, address):
    registers = vector(d)
    e.require(op.words[0] == f"x{len(registers)}")
    source = e.call("ldmatrix", *e.pointer(address), len(registers), "trans" in op.words)
    e.write_all(registers, source, U32)


@instruction("stmatrix.sync.aligned.m8n8", "b16", FRAGMENTS)
def stmatrix(e, op, address, a):
    registers = vector(a)
    e.require(op.words[0] == f"x{len(registers)}")
    e.line(e.call("stmatrix", *e.pointer(address), e.arrays(registers, U32), "trans" in op.words))


@instruction(" ".join(f"mma.sync.aligned.m16n8k{k}.row.col.f32.{kind}.{kind}.f32" for k, kind in MMA))
def mma(e, op, d, a, b, c):
    shape, kind = op.name.split(".")[3], op.name.split(".")[7]
    operands = [e.arrays(vector(x), dtype) for x, dtype in ((a, U32), (b, U32), (c, F32))]
    e.write_all(vector(d), e.call("mma", repr(shape), repr(kind), *operands), F32)


@instruction("wgmma.mma_async.sync.aligned", "bf16 f16 tf32", f"f32 bf16 f16 tf32 {SHAPES}")
def wgmma(e, op, d, a, b, scale, scale_a, scale_b, *transposed):
    """Emit the start of a warpgroup's product d = a b, plus d if `scale` is set.

    b is a descriptor of shared memory, a is another or a list of registers. `transposed` has a flag for each
    descriptor of 16-bit numbers.
    """
    e.require(op.words[1:] == ("f32", op.kind) and literal(scale_a) == literal(scale_b) == 1)
    e.require(len(transposed) <= 2)
    rows = int(_ROWS.match(op.words[0])[1])
    transposed = (0,) * (2 - len(transposed)) + tuple(literal(x) for x in transposed)
    e.require(all(e.home(register) == F32 for register in vector(d)))  # the machine writes sums into R directly
    in_registers = a.startswith("{")
    left = e.arrays(vector(a), U32 if in_registers else U64)
    names = tuple(e.program.index[register] for register in vector(a)) if in_registers else None
    sums = tuple(e.program.index[register] for register in vector(d))
    e.everyone()
    right, scale = e.read(b, U64), e.read(scale, np.bool_)
    e.line(e.call("wgmma", rows, repr(op.kind), sums, left, names, right, scale, transposed))


@instruction("wgmma.wait_group.sync.aligned")
def wgmma_wait(e, op, count):
    e.everyone()
    e.line(e.call("wgmma_wait", literal(count)))
