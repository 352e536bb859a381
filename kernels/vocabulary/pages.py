"""Finds the keys of a sequence in a cache: in one piece, or in pages of a pool."""

from typing import NamedTuple

import triton
import triton.language as tl

from . import memory, span


class Cache(NamedTuple):
    """Views of K and V (pages, kv heads, rows, columns), of lengths (B,), and of a table (B, n) of pages.

    Without a table the pages are the sequences. Pages have PAGE rows; it is None where a sequence has one page, by a
    table or without: how long caches are is then no part of what is compiled.
    """

    K: memory.View
    V: memory.View  # `values` is a name of Triton's own
    lengths: memory.View
    table: memory.View


@triton.constexpr_function
def _several(PAGE, BLOCK):
    """Whether a block of keys may lie in several pages."""
    return PAGE is not None and PAGE % BLOCK != 0


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
        column = tl.cast(at * 0 if PAGE is None else at // PAGE, tl.int64) * cache.table.strides[1]
        return tl.load(cache.table.base + row + column, mask=exists, other=0)


@triton.jit
def of_block(cache, plane, j, capacity, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """The page that block j of a sequence lies in, or one of each of its positions, [BLOCK, 1], if it may be several.

    To be read a step ahead, past the last one too, so that loads of tiles can start early.
    """
    if cache.table is None:
        return plane.batch
    elif _several(PAGE, BLOCK):
        at = (j * BLOCK + tl.arange(0, BLOCK))[:, None]
        return number(cache, plane, at, at < capacity, PAGE)
    else:
        return number(cache, plane, j * BLOCK, j * BLOCK < capacity, PAGE)


@triton.jit
def rows(at, PAGE: tl.constexpr):
    """Where in their pages positions lie."""
    return at if PAGE is None else at % PAGE


@triton.jit
def rows_of_block(j, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """`rows` of the positions of block j."""
    if _several(PAGE, BLOCK):
        return rows(j * BLOCK + tl.arange(0, BLOCK), PAGE)
    else:
        return rows(j * BLOCK, PAGE) + tl.arange(0, BLOCK)


@triton.jit
def matrix(view, plane, page, pages):
    """One head of a page, or of a page for each row; page numbers are clamped to the pool."""
    return memory.matrix(view, span.on_page(plane, tl.minimum(tl.maximum(page, 0), pages - 1)))
