"""Which blocks of the grid of pairs the caller's masks leave: marked once, then listed for each kernel's own tiles."""

import triton
import triton.language as tl

from . import masks as hidden
from . import span, tiles

SOME = tl.constexpr(1)  # bits of a mark: some pair of the block is seen
ALL = tl.constexpr(2)  # no pair of it is hidden


@triton.jit(do_not_specialize=["rows", "keys"])
def mark(Marks, extents, masks, bias, rows, keys, HEADS: tl.constexpr, GRAIN: tl.constexpr):
    """Marks (B, H, blocks of rows, blocks of keys), one byte for GRAIN x GRAIN pairs, contiguous. One program a block.

    Sizes are those along which masks, and bias (None, or a View: -inf hides), differ; the others are 1. A row that
    masks.rows hides sees nothing, and does not keep a block from being all seen: nobody reads what becomes of it.
    With extents, of `sequences`, sizes are those of the longest, and what is past the end of one is not there.
    """
    down, right, plane = span.place_tile(tl.program_id(0), rows, keys, HEADS, GRAIN, GRAIN)
    r = down * GRAIN + tl.arange(0, GRAIN)[:, None]
    c = right * GRAIN + tl.arange(0, GRAIN)[None, :]
    plane, own_rows, own_keys = span.within(extents, plane, rows, keys, ())
    own_rows, own_keys = tl.minimum(own_rows, rows), tl.minimum(own_keys, keys)
    exists = (r < own_rows) & (c < own_keys)
    real = hidden.real_rows(masks, plane, r, own_rows)
    seen = exists & hidden.real_keys(masks, plane, c, own_keys)
    if masks.pairs is not None:
        seen &= tiles.load_pairs(tiles.matrix(masks.pairs, plane), r, c, rows, keys, CHECK=True) != 0
    every = tl.min(tl.min((seen | ~exists | ~real).to(tl.int32), 1), 0)
    seen &= real
    if bias is not None:
        b = tiles.load_pairs(tiles.matrix(bias, plane), r, c, rows, keys, CHECK=True)
        seen &= tiles.cast(b, tl.float32) > float("-inf")
    some = tl.max(tl.max(seen.to(tl.int32), 1), 0)
    tl.store(Marks + tl.program_id(0), (some * SOME + every * ALL).to(tl.uint8))


@triton.jit
def covered(marks, plane, i, j, rows, keys, live, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GRAIN: tl.constexpr):
    """(some pair is seen, none is hidden) of the tiles (i, j) that are live, from the marks that they cover."""
    view = tiles.matrix(marks, plane)
    some, every = live & False, live | True
    for a in tl.static_range(max(1, BLOCK_M // GRAIN)):
        for b in tl.static_range(max(1, BLOCK_N // GRAIN)):
            down, right = i * BLOCK_M // GRAIN + a, j * BLOCK_N // GRAIN + b
            exists = live & (down * GRAIN < rows) & (right * GRAIN < keys)
            seen = tl.load(tiles.pointers(view, down, right), mask=exists, other=ALL)
            some |= (seen & SOME) != 0
            every &= (seen & ALL) != 0
    return some, every


@triton.jit(do_not_specialize=["q_len", "k_len", "turns", "left", "right"])
def list_blocks(
    Lists,
    sequences,
    marks,
    q_len,
    k_len,
    turns,
    left,
    right,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TOP_LEFT: tl.constexpr,
    GRAIN: tl.constexpr,
    BY_KEYS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Lists (B, H, blocks, 2, 1 + most + 1) of int64, contiguous: for each block the tiles to compute, each in turn.

    First those that take a mask, then those that take none: how many, what they are, and one number that a loop may
    read ahead. Blocks are of rows and tiles of keys; BY_KEYS the other way round, for the rows of each of GROUP query
    heads, and H counts kv heads. marks is the View that `mark` filled; the band counts as a mask. There are `turns`
    tiles to a head. With sequences B is 1, and their turns are the blocks.
    """
    pid, programs = tl.program_id(0), tl.num_programs(0)
    BLOCK: tl.constexpr = BLOCK_N if BY_KEYS else BLOCK_M
    block, plane, q_len, k_len = span.place_in(sequences, pid, programs, q_len, k_len, HEADS, BLOCK, BY_KEYS)
    if sequences is not None and not BY_KEYS:
        block = span.latest_first(block, q_len, BLOCK_M) // BLOCK_M  # that is how turns are taken
    band = span.band(q_len, k_len, left, right, TOP_LEFT)
    if BY_KEYS:
        ranges = span.blocks(span.flip(band), block * BLOCK_N, BLOCK_N, BLOCK_M)
        begin, full, rest, end = span.masked_past(ranges, (block + 1) * BLOCK_N, k_len)
    else:
        begin, full, rest, end = span.blocks(band, block * BLOCK_M, BLOCK_M, BLOCK_N)
    most = turns * GROUP
    partly = Lists + tl.program_id(0).to(tl.int64) * 2 * (most + 2)
    fully = partly + most + 2
    masked, bare = begin * 0, begin * 0
    for start in tl.range(0, most, CHUNK):
        n = start + tl.arange(0, CHUNK)
        tile, member = n % turns, n // turns
        live = (n < most) & (tile >= begin) & (tile < end)
        i, j = (tile, tile * 0 + block) if BY_KEYS else (tile * 0 + block, tile)
        head = span.member(plane, member, GROUP)
        some, every = covered(marks, head, i, j, q_len, k_len, live, BLOCK_M, BLOCK_N, GRAIN)
        every &= (tile >= full) & (tile < rest)
        entry = (member.to(tl.int64) << 32) | tile
        takes, bears = (some & ~every).to(tl.int32), (some & every).to(tl.int32)
        tl.store(partly + masked + tl.cumsum(takes, 0), entry, mask=takes != 0)
        tl.store(fully + bare + tl.cumsum(bears, 0), entry, mask=bears != 0)
        masked += tl.sum(takes, 0)
        bare += tl.sum(bears, 0)
    tl.store(partly, masked.to(tl.int64))
    tl.store(fully, bare.to(tl.int64))


@triton.jit
def order(lists, plane, block, N: tl.constexpr):
    """What walk N visits for a block of a plane, in turn: 0 those tiles that take a mask, 1 those that take none."""
    place = block if len(plane.packed) == 0 else plane.packed.turn
    return tiles.pointers(tiles.matrix(lists, plane), place * 2 + N, place * 0) + 1


@triton.jit
def extent(ranges, order, N: tl.constexpr):
    """(begin, end) of walk N: of an order, or, where that is None, of the three `ranges` of `span.blocks`.

    Walk 1 alone takes no mask.
    """
    if order is None:
        return ranges[N], ranges[N + 1]
    else:
        return 0, tl.load(order - 1).to(tl.int32)


@triton.jit
def first(order, begin):
    """What the first turn of a loop visits; order None is a range that starts with begin."""
    return begin if order is None else tl.load(order)


@triton.jit
def turn(order, n, following):
    """(tile, member of the group) that turn n visits, and the entry of the next one.

    It is read a turn ahead, so that loads of tiles can start early. In a range the members are the caller's to count.
    """
    if order is None:
        return n, 0, following
    else:
        return following.to(tl.int32), (following >> 32).to(tl.int32), tl.load(order + n + 1)
