"""Walks the blocks of a kernel's loop: a range of them, or a list of those that masks leave."""

import triton
import triton.language as tl

from . import memory

SOME = tl.constexpr(1)  # bits of a byte of a block mask: some pair of the block is seen
ALL = tl.constexpr(2)  # no pair of it is hidden


@triton.jit
def covered(
    block_mask, plane, i, j, rows, keys, live,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_MASK_SIZE: tl.constexpr,
):  # fmt: skip
    """(some pair is seen, none is hidden) of the tiles (i, j) that are live, by the block mask under them."""
    view = memory.matrix(block_mask, plane)
    some, every = live & False, live | True
    for a in tl.static_range(max(1, BLOCK_M // BLOCK_MASK_SIZE)):
        for b in tl.static_range(max(1, BLOCK_N // BLOCK_MASK_SIZE)):
            down, right = i * BLOCK_M // BLOCK_MASK_SIZE + a, j * BLOCK_N // BLOCK_MASK_SIZE + b
            exists = live & (down * BLOCK_MASK_SIZE < rows) & (right * BLOCK_MASK_SIZE < keys)
            seen = tl.load(memory.pointers(view, down, right), mask=exists, other=ALL)
            some |= (seen & SOME) != 0
            every &= (seen & ALL) != 0
    return some, every


@triton.jit
def tile_list(tile_lists, plane, block, N: tl.constexpr):
    """The list of tiles that walk N visits for a block of a plane: 0 those that take a mask, 1 those that take none."""
    place = block if len(plane.packed) == 0 else plane.packed.slot
    return memory.pointers(memory.matrix(tile_lists, plane), place * 2 + N, place * 0) + 1


@triton.jit
def extent(ranges, tile_list, N: tl.constexpr):
    """(begin, end) of walk N: of a list, or, where that is None, of the three `ranges` of `span.blocks`.

    Walk 1 alone takes no mask.
    """
    if tile_list is None:
        return ranges[N], ranges[N + 1]
    else:
        return 0, tl.load(tile_list - 1).to(tl.int32)


@triton.jit
def first(tile_list, begin):
    """What the first step of a loop visits; without a list a range that starts with begin."""
    return begin if tile_list is None else tl.load(tile_list)


@triton.jit
def step(tile_list, n, following):
    """(tile, member of the group) that step n visits, and the entry of the next one.

    It is read a step ahead, so that loads of tiles can start early. In a range the members are the caller's to count.
    """
    if tile_list is None:
        return n, 0, following
    else:
        return following.to(tl.int32), (following >> 32).to(tl.int32), tl.load(tile_list + n + 1)
