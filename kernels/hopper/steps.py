"""What the backwards for Hopper have in common: the blocks of rows that they walk, and the numbers of each row."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma

from ..vocabulary import softmax, span
from . import ring
from .copies import async_load

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


NUMBERS = gl.constexpr(3)  # tables of a head: what is added to scores, twice, and to dp


@gluon.jit
def ones(KEYS: gl.constexpr):
    """A left operand in shared memory, [keys, 16], that adds up the three columns of a table: the others are zeros.

    In registers it would be four that most kernels have not, or be copied there for each product, as Triton 3.9 does.
    """
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, 16], gl.bfloat16)
    return gl.allocate_shared_memory(gl.bfloat16, [KEYS, 16], LAYOUT, _one(KEYS))


@gluon.jit
def _one(KEYS: gl.constexpr):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [WARPS, 1], [1, 0])
    return gl.full([KEYS, 16], 1.0, gl.bfloat16, LAYOUT)


@gluon.jit
def copy_numbers(ring_of_q, rows, step, Rows, plane, row):
    """Begin to copy the tables of the rows of a block, with q."""
    STAGES: gl.constexpr = ring_of_q.tiles.shape[0]
    for which in gl.static_range(NUMBERS):
        place = [plane.batch, plane.head * NUMBERS + which, row, 0]
        tile = rows.index(step % STAGES * NUMBERS + which)
        async_load(Rows, place, ring_of_q.ready.index(step % STAGES), tile)


@gluon.jit
def numbers(rows, step, which: gl.constexpr, part: gl.constexpr = 0, PARTS: gl.constexpr = 1):
    """[16, rows]: of each row three numbers, whose sum one table adds; of one part of the rows."""
    STAGES: gl.constexpr = rows.shape[0] // NUMBERS
    COUNT: gl.constexpr = rows.shape[3] // PARTS
    tile = rows.index(step % STAGES * NUMBERS + which).reshape([rows.shape[3], 16])
    return tile.slice(part * COUNT, COUNT, dim=0).permute((1, 0))


@gluon.jit
def begin_scores(k, q, one, rows, step, zero, part: gl.constexpr = 0, PARTS: gl.constexpr = 1):
    """Scores, [keys, rows], less the pivots of their rows, and what makes them exponents of weights, begun.

    The pivot goes first, alone: where scores are large, their sum with the logarithm would lose it.
    """
    s = warpgroup_mma(k, q, zero, use_acc=False, is_async=True)
    s = warpgroup_mma(one, numbers(rows, step, 0, part, PARTS), s, is_async=True)
    return warpgroup_mma(one, numbers(rows, step, 1, part, PARTS), s, is_async=True)


@gluon.jit
def begin_dp(v, do, one, rows, step, zero, part: gl.constexpr = 0, PARTS: gl.constexpr = 1):
    """What ds divided by p is, dp - delta, [keys, rows], begun."""
    dp = warpgroup_mma(v, do, zero, use_acc=False, is_async=True)
    return warpgroup_mma(one, numbers(rows, step, 2, part, PARTS), dp, is_async=True)


@gluon.jit
def cover(p, first, earliest, band):
    """p, [keys, rows from `first` on], 0 where the band hides a key; earliest is, for each, `span.first_to_see`."""
    r = first + gl.arange(0, p.shape[1], layout=gl.SliceLayout(0, p.type.layout))[None, :]
    # What has an effect: what has none would be computed in each step, without a branch.
    r = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [r], dtype=gl.int32, is_pure=False, pack=1)
    seen = (r - earliest).to(gl.uint32) <= (band.high - band.low).to(gl.uint32)  # an earlier one is huge
    return gl.where(seen, p, 0.0)


@gluon.jit
def lines(dq):
    """[rows, columns] of dq in another order, [lines, 32]: what a thread has of 8 columns lies side by side.

    So it is stored 16 bytes at a time, from registers as they are, and no two threads in one bank. A line has 8 columns
    of 4 rows: two neighbours, and those 8 below. `_ordered` of `preprocess` has the way back.
    """
    ROWS: gl.constexpr = dq.shape[0]
    EIGHTS: gl.constexpr = dq.shape[1] // 8
    parts = dq.reshape([ROWS // 16, 2, 4, 2, EIGHTS, 4, 2]).permute((4, 0, 2, 3, 5, 1, 6))
    return parts.reshape([EIGHTS * ROWS // 4, 32])


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
