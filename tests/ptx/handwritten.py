"""Runs short handwritten PTX kernels, which test the emulator instruction by instruction."""

import struct

import numpy as np

from .machine import Machine
from .memory import Memory
from .parse import parse
from .program import Program
from .report import Report

# Registers set before the body: %t, the thread. %smem, the address of shared memory, and %mine, of the thread's word
# there. %x, the address of a tensor, and %x_mine, of the thread's word; likewise y, z and out. %box, the address of a
# descriptor. Registers %r, %f, %d and %p are free.
SOURCE = """.target sm_90a
.visible .entry kernel(
.param .u64 x,
.param .u64 y,
.param .u64 z,
.param .u64 out,
.param .align 64 .b8 box[128]
)
.reqntid {threads}
{{
.reg .b32 %t, %t4, %smem, %mine, %r<40>, %f<40>; .reg .pred %p<8>;
.reg .b64 %offset, %x, %y, %z, %out, %x_mine, %y_mine, %z_mine, %out_mine, %box, %d<8>;
mov.u32 %t, %tid.x; shl.b32 %t4, %t, 2; cvt.u64.u32 %offset, %t4; mov.u64 %box, box;
mov.u32 %smem, global_smem; add.u32 %mine, %smem, %t4;
ld.param.b64 %x, [x]; ld.param.b64 %y, [y]; ld.param.b64 %z, [z]; ld.param.b64 %out, [out];
add.u64 %x_mine, %x, %offset; add.u64 %y_mine, %y, %offset; add.u64 %z_mine, %z, %offset;
add.u64 %out_mine, %out, %offset;
{body}
ret;
}}
"""

FOUR = "{%r1, %r2, %r3, %r4}"
# Threads have 16 bytes each: %r0 is their address in shared memory, %d1 in x, %d2 in out.
ROW = "shl.b32 %r0, %t, 4; cvt.u64.u32 %d0, %r0; add.u32 %r0, %r0, %smem;"
ROW += "add.u64 %d1, %x, %d0; add.u64 %d2, %out, %d0;"


def line_of(body, mark="// here"):
    """Return the line number, in the whole source, of a mark in the kernel's body."""
    return SOURCE[: SOURCE.index("{body}")].count("\n") + body[: body.index(mark)].count("\n") + 1


def execute(body, threads=64, ctas=1, smem=1024, box=None, fresh=(), tensor_core=None, order=None, **tensors):
    """Execute a PTX body on tensors and return the Report. Tensors named in `fresh` count as uninitialised."""
    memory, report = Memory(), Report()
    for name in fresh:
        memory.is_fresh(tensors[name])
    memory.begin(tensors, {} if box is None else dict(box=box))
    params = dict(box=box)
    for name in ("x", "y", "z", "out"):
        params[name] = struct.pack("Q", tensors[name].data_ptr() if name in tensors else 0)
    program = Program(parse(SOURCE.format(threads=threads, body=body)))
    blocks = np.stack((np.arange(ctas), np.zeros(ctas, int), np.zeros(ctas, int)), 1)
    machine = Machine(program, memory, params, blocks, (ctas, 1, 1), smem, report, tensor_core, order=order)
    machine.most_steps = 1000
    machine.run()
    return report
