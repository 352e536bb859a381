"""What the backwards for Hopper have in common: the blocks of rows that they walk, and the numbers of each row."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ..vocabulary import softmax, span
from . import ring

WARPS = gl.constexpr(4)  # of a warpgroup


@gluon.jit
def extent(band, first, KEYS: gl.constexpr, BLOCK_M: gl.constexpr):
    """(begin, full, full_end, end) of the blocks of rows that see some of the keys; between the middle two all do."""
    ranges = span.blocks(span.flip(band), first, KEYS, BLOCK_M)
    return span.masked_past(ranges, first + KEYS, band.keys)


@gluon.jit
def following(block, member, begin, end, GROUP: gl.constexpr):
    """The block of rows and the query head that come next: all blocks of one head, then those of the next."""
    if GROUP == 1:
        return block + 1, member
    else:
        wrap = block + 1 == end
        return gl.where(wrap, begin, block + 1), member + wrap.to(gl.int32)


@gluon.jit
def across(rows, step, column: gl.constexpr, LAYOUT: gl.constexpr, part: gl.constexpr = 0, PARTS: gl.constexpr = 1):
    """[1, rows]: one of the four numbers of each row, of one part of them."""
    tile = ring.at(rows, step).slice(column, 1, dim=0)
    COUNT: gl.constexpr = tile.shape[1] // PARTS
    return tile.slice(part * COUNT, COUNT, dim=1).load(LAYOUT)


@gluon.jit
def row(rows, step, LAYOUT: gl.constexpr, part: gl.constexpr = 0, PARTS: gl.constexpr = 1):
    """The `softmax.Row` of each row, of one part of them."""
    return softmax.Row(across(rows, step, 0, LAYOUT, part, PARTS), across(rows, step, 1, LAYOUT, part, PARTS))


@gluon.jit
def hide(p, rows, step, earliest, band, part: gl.constexpr = 0, PARTS: gl.constexpr = 1):
    """p, 0 where the band hides a key; earliest is, for each key, `span.first_to_see`."""
    LAYOUT: gl.constexpr = p.type.layout
    r = across(rows, step, 3, LAYOUT, part, PARTS).to(gl.int32, bitcast=True)
    seen = (r - earliest).to(gl.uint32) <= (band.high - band.low).to(gl.uint32)  # an earlier one is huge
    return gl.where(seen, p, 0.0)


@gluon.jit
def leave(g: gl.constexpr, shared, dk, dv, steps):
    """Leave the gradients of keys and values where these lie, when the other warpgroup has read them, too."""
    dtype: gl.constexpr = shared.q.tiles.dtype
    mbarrier.arrive(shared.met, count=1)
    mbarrier.wait(shared.met, steps & 1)
    ring.tile(shared.k, g).store(dk.to(dtype))
    ring.at(shared.v, g).store(dv.to(dtype))
    fence_async_shared()
    mbarrier.arrive(shared.out.index(g), count=1)
