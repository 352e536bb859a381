"""Turns: programs that add to one tile in memory do so one after the other, in an order that is the same each time.

Source: FlashAttention-3, https://github.com/Dao-AILab/flash-attention, whose deterministic backward does so.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def number(numbers):
    """The next number of all programs: those with smaller ones have begun, in whatever order a GPU starts them."""
    return gl.atomic_add(numbers, 1)


@gluon.jit
def wait(counter, turn):
    """Wait until so many have had their turn, and see what they have written."""
    now = gl.load(counter, volatile=True)
    while now != turn:
        now = gl.load(counter, volatile=True)
    _execute("fence.acq_rel.gpu; fence.proxy.async.global;", turn)


@gluon.jit
def end(counter, turn):
    """Give the turn to the next, once what the copy engine was to write for any thread of this warp is written."""
    _execute("cp.async.bulk.wait_group 0; fence.proxy.async.global; bar.warp.sync -1;", turn)
    gl.atomic_add(counter, 1, sem="release", scope="gpu")


@gluon.jit
def _execute(instructions: gl.constexpr, operand):
    gl.inline_asm_elementwise(
        instructions + " mov.b32 $0, $1;", "=r,r", [operand], dtype=gl.int32, is_pure=False, pack=1
    )
