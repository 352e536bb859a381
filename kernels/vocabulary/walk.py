"""The blocks that a kernel's loops (walks) visit: three ranges, or two lists of tiles. Loop 1 needs no mask."""

import triton
import triton.language as tl

from . import memory
from .masks import BLOCK, EMPTY, FULL


@triton.jit
def covered(block_mask, plane, i, j, rows, keys, live, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return (some pair is visible, all are) for row block i and key block j; where `live` is False, (False, True)."""
    view = memory.matrix(block_mask, plane)
    some, every = live & False, live | True
    for a in tl.static_range(max(1, BLOCK_M // BLOCK)):
        for b in tl.static_range(max(1, BLOCK_N // BLOCK)):
            down, right = i * BLOCK_M // BLOCK + a, j * BLOCK_N // BLOCK + b
            exists = live & (down * BLOCK < rows) & (right * BLOCK < keys)
            mark = tl.load(memory.pointers(view, down, right), mask=exists, other=EMPTY)
            some |= mark != EMPTY
            every &= (mark == FULL) | ~exists
    return some, every


@triton.jit
def tile_list(tile_lists, plane, block, N: tl.constexpr):
    """Return a pointer to the list of tiles of a block for loop N, past its count. Only tiles of loop 0 need a mask."""
    place = block if len(plane.packed) == 0 else plane.packed.slot
    return memory.pointers(memory.matrix(tile_lists, plane), place * 2 + N, place * 0) + 1


@triton.jit
def extent(ranges, tile_list, N: tl.constexpr):
    """Return (begin, end) of loop (walk) N: entries of a tile list, or blocks from the ranges of `span.blocks`."""
    if tile_list is None:
        return ranges[N], ranges[N + 1]
    else:
        return 0, tl.load(tile_list - 1).to(tl.int32)


@triton.jit
def first(tile_list, begin):
    """Return the `following` of the first call of `step`: the tile list's first entry, or `begin` without a list."""
    return begin if tile_list is None else tl.load(tile_list)


@triton.jit
def step(tile_list, n, following):
    """Return (tile, query head within its group, entry of step n + 1). `following` is the list's entry of step n."""
    # An entry is read one step ahead, so that loads of tiles start early. Without a list the caller counts the heads.
    if tile_list is None:
        return n, 0, following
    else:
        return following.to(tl.int32), (following >> 32).to(tl.int32), tl.load(tile_list + n + 1)
