"""Where the keys of a sequence lie: in one piece, or in pages of a pool."""

from typing import NamedTuple

import triton
import triton.language as tl

from . import span, tiles


class Cache(NamedTuple):
    """Views of K and V (pages, kv heads, PAGE, columns), of lengths (B,), and of a table (B, n) of pages.

    Without a table the pages are the sequences.
    """

    K: tiles.View
    V: tiles.View  # `values` is a name of Triton's own
    lengths: tiles.View
    table: tiles.View


@triton.jit
def length(cache, plane, capacity):
    """How many keys the sequence of a plane has; what nobody could check lies between 0 and the capacity."""
    n = tl.load(cache.lengths.base + tl.cast(plane.batch, tl.int64) * cache.lengths.strides[0])
    return tl.minimum(tl.maximum(n, 0), capacity)


@triton.jit
def number(cache, plane, at, exists, PAGE: tl.constexpr):
    """The page of each position of a sequence, as the table has it; 0 where they do not exist."""
    if cache.table is None:
        return plane.batch + at * 0
    else:
        row = tl.cast(plane.batch, tl.int64) * cache.table.strides[0]
        column = tl.cast(at // PAGE, tl.int64) * cache.table.strides[1]
        return tl.load(cache.table.base + row + column, mask=exists, other=0)


@triton.jit
def of_block(cache, plane, j, capacity, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """The page that block j of a sequence lies in, or one of each of its positions, [BLOCK, 1], if it may be several.

    To be read a turn ahead, past the last one too, so that loads of tiles can start early.
    """
    if cache.table is None:
        return plane.batch
    elif PAGE % BLOCK == 0:
        return number(cache, plane, j * BLOCK, j * BLOCK < capacity, PAGE)
    else:
        at = (j * BLOCK + tl.arange(0, BLOCK))[:, None]
        return number(cache, plane, at, at < capacity, PAGE)


@triton.jit
def slots(cache, j, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """Where in their pages the positions of block j lie."""
    if cache.table is None:
        return j * BLOCK + tl.arange(0, BLOCK)
    elif PAGE % BLOCK == 0:
        return j * BLOCK % PAGE + tl.arange(0, BLOCK)
    else:
        return (j * BLOCK + tl.arange(0, BLOCK)) % PAGE


@triton.jit
def matrix(view, plane, page, pages):
    """One head of a page, or of one of each row; a number of no page is taken for that of another."""
    return tiles.matrix(view, span.moved(plane, tl.minimum(tl.maximum(page, 0), pages - 1)))
