"""Notes on steps, which the producer of the forward writes into shared memory for the warpgroups that multiply."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

LAYOUT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


class Notes(NamedTuple):
    """Slots for notes. A number has the steps of the block of rows in its upper half; below it, `block * 2 + masked`.

    If there is a key mask, `real` has 1 for each real key of a block that needs a mask, otherwise 0.
    """

    numbers: gl.shared_memory_descriptor
    real: gl.shared_memory_descriptor


@gluon.jit
def notes(STAGES: gl.constexpr, BLOCK_N: gl.constexpr):
    """Return Notes beside a ring of k with STAGES tiles. A note lasts until the k of the next step is given back."""
    numbers = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], LAYOUT)
    return Notes(numbers, gl.allocate_shared_memory(gl.int8, [2 * STAGES, BLOCK_N], LAYOUT))


@gluon.jit
def _slot(slots, step):
    return slots.index(step % slots.shape[0])


@gluon.jit
def write(notes, step, block, masked, count):
    """Write the number of a step, whose k must be free: block of keys, whether it needs a mask, number of steps."""
    number = (count.to(gl.int64) << 32) | (block * 2 + masked.to(gl.int32)).to(gl.int64)
    _slot(notes.numbers, step).store(gl.full([1], number, gl.int64, gl.BlockedLayout([1], [32], [1], [0])))


@gluon.jit
def read(notes, step):
    """Return what `write` wrote."""
    slot = _slot(notes.numbers, step)
    number = gl.max(slot.load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), 0)
    low = number.to(gl.int32)
    return low >> 1, (low & 1) != 0, (number >> 32).to(gl.int32)


@gluon.jit
def real_keys(notes, step):
    return _slot(notes.real, step)
