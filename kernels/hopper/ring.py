"""Ring of tiles in shared memory: the producer waits until a tile is free, consumers wait until it is filled.

Step i of a ring of n tiles is use i // n of tile i % n; the phase of its barriers is the parity of the use.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ..vocabulary import memory
from ..vocabulary.span import Plane
from .copies import async_load

# Rows of a ragged descriptor, and the coordinate at which 64-bit addresses wrap around (launch/hopper.py).
ROWS = gl.constexpr(2**30)
# Layout in which one warp sets rows of a tile to 0: a thread has 16 bytes of a row, and swizzling prevents conflicts.
LINES = gl.constexpr(gl.BlockedLayout([1, 8], [32, 1], [1, 1], [1, 0]))


class Ring(NamedTuple):
    """Tiles [tiles, 1, 1, rows, columns] of a (B, H, S, D) tensor, and two mbarriers for each tile.

    Tiles of packed sequences have one more dimension, as their descriptors have. A descriptor's block has 2**n columns.
    So a tile may have several parts, side by side: [tiles * parts, 1, 1, rows, columns].
    """

    tiles: gl.shared_memory_descriptor
    ready: gl.shared_memory_descriptor
    free: gl.shared_memory_descriptor


class Ragged(NamedTuple):
    """First row or key of a packed sequence, and its number of rows or keys; replaces `packed` of a Plane."""

    first: gl.tensor
    length: gl.tensor


@gluon.jit
def ring(desc, TILES: gl.constexpr, READERS: gl.constexpr, PARTS: gl.constexpr = 1):
    """Return a Ring of TILES tiles of PARTS blocks of a TMA descriptor; READERS warpgroups read each tile."""
    tiles = gl.allocate_shared_memory(desc.dtype, [TILES * PARTS] + desc.block_type.shape, desc.layout)
    return ring_of(tiles, TILES, READERS)


@gluon.jit
def ring_of(tiles, TILES: gl.constexpr, READERS: gl.constexpr):
    ready = gl.allocate_shared_memory(gl.int64, [TILES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [TILES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(TILES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=READERS)
    return Ring(tiles, ready, free)


@gluon.jit
def barriers(COUNT: gl.constexpr):
    """Return COUNT mbarriers, each for one arrival."""
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(made.index(i), count=1)
    return made


@gluon.jit
def slot(slots, step):
    """Return the slot of a step: its tile, barrier or note. Steps use the slots in turn."""
    return slots.index(step % slots.shape[0])


@gluon.jit
def claim(ring, step):
    TILES: gl.constexpr = ring.ready.shape[0]
    mbarrier.wait(slot(ring.free, step), step // TILES & 1 ^ 1)


@gluon.jit
def put(ring, step, value):
    """Wait until the tile of a step is free, store `value` in it, and signal asynchronous readers such as TMA."""
    claim(ring, step)
    tile(ring, step).store(value)
    fence_async_shared()
    mbarrier.arrive(slot(ring.ready, step), count=1)


@gluon.jit
def reserve(ring, step, nbytes: gl.constexpr):
    """Wait until the tile of a step is free, and let its barrier expect nbytes, for all tiles that share it."""
    claim(ring, step)
    mbarrier.expect(slot(ring.ready, step), nbytes)


@gluon.jit
def of_rows(plane, band):
    """Return the Plane that `place` needs for rows: if packed, with the sequence's first row and number of rows."""
    packed = () if len(plane.packed) == 0 else Ragged(plane.packed.row, band.rows)
    return Plane(plane.batch, plane.head, plane.index, packed)


@gluon.jit
def of_keys(plane, band):
    """Return the Plane that `place` needs for keys: if packed, with the sequence's first key and number of keys."""
    packed = () if len(plane.packed) == 0 else Ragged(plane.packed.key, band.keys)
    return Plane(plane.batch, plane.head, plane.index, packed)


@gluon.jit
def place(plane, row, column):
    """Return the TMA coordinates of (row, column) of one head; for packed sequences, in a ragged descriptor.

    TMA then loads zeros past the end of the sequence, and stores nothing there.
    """
    if len(plane.packed) == 0:
        return [plane.batch, plane.head, row, column]
    else:
        end, length = plane.packed.first + plane.packed.length, plane.packed.length
        return [ROWS, end, plane.head, ROWS - length + row, column]


@gluon.jit
def copy(ring, tiles, step, desc, plane, row, column=0):
    """Begin the TMA copy from (row, column) of one head into the step's tile of `tiles`, on the ring's barrier."""
    TILES: gl.constexpr = ring.ready.shape[0]
    PARTS: gl.constexpr = tiles.shape[0] // TILES
    for i in gl.static_range(PARTS):
        where = place(plane, row, column + i * desc.block_type.shape[-1])
        async_load(desc, where, slot(ring.ready, step), tiles.index(step % TILES * PARTS + i))


@gluon.jit
def fill(ring, step, desc, plane, row, column=0):
    """Wait until the tile of a step is free, and begin the TMA copy from (row, column) of one head into it."""
    PARTS: gl.constexpr = ring.tiles.shape[0] // ring.ready.shape[0]
    reserve(ring, step, PARTS * desc.block_type.nbytes)
    copy(ring, ring.tiles, step, desc, plane, row, column)


@gluon.jit
def put_bias(ring, step, bias, band, plane, row):
    """Load a bias that is equal for all keys, for rows from `row` on, into the tile of a step, without TMA."""
    r = row + gl.arange(0, ring.tiles.shape[1], layout=gl.BlockedLayout([1], [32], [1], [0]))
    x = memory.load_column(memory.matrix(bias, plane), r, band.rows, 0)
    claim(ring, step)
    slot(ring.tiles, step).store(x)
    mbarrier.arrive(slot(ring.ready, step), count=1)


@gluon.jit
def fill_bias(ring, step, Bias, plane, row, column):
    """Begin the TMA copy of a tile of a bias. The descriptor has size 1 where the bias broadcasts."""
    batch, head = gl.minimum(plane.batch, Bias.shape[0] - 1), gl.minimum(plane.head, Bias.shape[1] - 1)
    row = 0 if Bias.block_type.shape[-2] == 1 else row
    fill(ring, step, Bias, Plane(batch, head, plane.index, ()), row, column)


@gluon.jit
def wait(ring, step, pred=True):
    TILES: gl.constexpr = ring.ready.shape[0]
    mbarrier.wait(slot(ring.ready, step), step // TILES & 1, pred=pred)


@gluon.jit
def landing(ring):
    """Return a Ring of the same tiles with barriers at which the producer itself awaits copies, before `pass_on`."""
    return Ring(ring.tiles, barriers(ring.tiles.shape[0]), ring.free)


@gluon.jit
def pass_on(landed, ring, step, hides, real):
    """Give a tile to its readers once its copy has arrived. If `hides`, first set rows to 0 where `real` is 0.

    Hidden rows may be NaN, and 0 * NaN is NaN. One warp does this. real: int8 [rows] in shared memory.
    """
    wait(landed, step)
    if hides:
        whole = tile(ring, step)
        WIDTH: gl.constexpr = min(whole.shape[1], 16)  # columns that a thread holds in registers at a time
        for i in gl.static_range(whole.shape[0] // 32):
            seen = real.slice(32 * i, 32).load(gl.SliceLayout(1, LINES)) != 0
            for j in gl.static_range(whole.shape[1] // WIDTH):
                part = whole.slice(32 * i, 32).slice(WIDTH * j, WIDTH, dim=1)
                part.store(gl.where(seen[:, None], part.load(LINES), 0.0))
        fence_async_shared()
    mbarrier.arrive(slot(ring.ready, step), count=1)


@gluon.jit
def at(tiles, step):
    """Return the tile of a step as a matrix in shared memory."""
    return slot(tiles, step).reshape([tiles.shape[-2], tiles.shape[-1]])


@gluon.jit
def tile(ring, step):
    return at(ring.tiles, step)


@gluon.jit
def parts(ring, step):
    """Return the parts of the tile of a step."""
    TILES: gl.constexpr = ring.ready.shape[0]
    PARTS: gl.constexpr = ring.tiles.shape[0] // TILES
    found = ()
    for i in gl.static_range(PARTS):
        part = ring.tiles.index(step % TILES * PARTS + i)
        found += (part.reshape([part.shape[-2], part.shape[-1]]),)
    return found


@gluon.jit
def release(ring, step, pred=True):
    """Tell the producer that one reader has finished with the tile of a step."""
    mbarrier.arrive(slot(ring.free, step), count=1, pred=pred)
