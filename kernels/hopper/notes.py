"""Notes on the steps of a loop: the copying warp writes them into shared memory, and the other warps read them."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..vocabulary.masks import BLOCK
from . import ring
from .copies import async_load

LAYOUT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


class Notes(NamedTuple):
    """Slots for notes: a 64-bit number for each step. Its lower half is `block * 2 + masked`.

    In the forward, `block` is a block of keys, and the upper half is the number of steps. In the backward, `block` is a
    block of rows, and the upper half is the query head in its group. `real`, with a key mask in the forward, is 1
    for each key of the block that this mask leaves visible. It is all 0 in blocks that need no mask.
    """

    numbers: gl.shared_memory_descriptor
    real: gl.shared_memory_descriptor


@gluon.jit
def notes(STAGES: gl.constexpr, BLOCK_N: gl.constexpr):
    """Return Notes of 2 * STAGES slots. With STAGES tiles, note s is valid until step s + STAGES releases its tile."""
    numbers = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], LAYOUT)
    return Notes(numbers, gl.allocate_shared_memory(gl.int8, [2 * STAGES, BLOCK_N], LAYOUT))


@gluon.jit
def words(Words, STAGES: gl.constexpr, COUNT: gl.constexpr):
    """Return slots for mask words: COUNT blocks of the descriptor `Words` a step, valid as long as the step's note."""
    return gl.allocate_shared_memory(Words.dtype, [2 * STAGES * COUNT] + Words.block_type.shape, Words.layout)


@gluon.jit
def write(notes, tiles, at, step, block, masked, count):
    """Write a step's note once its tile `at` of a ring is free: block, whether to mask, and count in the upper half."""
    ring.claim(tiles, at)
    number = (count.to(gl.int64) << 32) | (block * 2 + masked.to(gl.int32)).to(gl.int64)
    ring.slot(notes.numbers, step).store(gl.full([1], number, gl.int64, gl.BlockedLayout([1], [32], [1], [0])))


@gluon.jit
def read(notes, step):
    """Return the (block, whether it needs a mask, upper half) that `write` wrote."""
    slot = ring.slot(notes.numbers, step)
    number = gl.max(slot.load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), 0)
    low = number.to(gl.int32)
    return low >> 1, (low & 1) != 0, (number >> 32).to(gl.int32)


@gluon.jit
def words_of(notes, words, step, n: gl.constexpr):
    """Return the mask words of block n of a step in shared memory: int32 [1, 2 * BLOCK], low and high half in turn."""
    SLOTS: gl.constexpr = notes.numbers.shape[0]
    return words.index(step % SLOTS * (words.shape[0] // SLOTS) + n)


@gluon.jit
def load_words(halves, LAYOUT: gl.constexpr):
    """Load mask words as int64 [BLOCK, 1]. halves: a result of `words_of`, or a pointer to words in global memory."""
    if isinstance(halves, gl.tensor):
        return gl.load(halves + gl.arange(0, BLOCK, layout=gl.SliceLayout(1, LAYOUT))[:, None])
    else:
        halves = halves.reshape([BLOCK, 2])
        low, high = halves.slice(0, 1, dim=1).load(LAYOUT), halves.slice(1, 1, dim=1).load(LAYOUT)
        return (high.to(gl.int64) << 32) | low.to(gl.uint32, bitcast=True).to(gl.int64)


@gluon.jit
def reserve(notes, words, Words, tiles, at, step, masked, numbers, NBYTES: gl.constexpr):
    """Reserve tile `at` of a ring. If the step is masked, also begin to copy its mask words, at indices `numbers`."""
    if words is None:
        ring.reserve(tiles, at, NBYTES)
    else:
        if masked:
            ring.reserve(tiles, at, NBYTES + len(numbers) * Words.block_type.nbytes)
            ready = ring.slot(tiles.ready, at)
            for n in gl.static_range(len(numbers)):
                async_load(Words, [numbers[n].to(gl.int32), 0], ready, words_of(notes, words, step, n))
        else:
            ring.reserve(tiles, at, NBYTES)
