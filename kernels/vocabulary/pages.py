"""Memory of a key-value cache, which is contiguous or consists of pages of a shared pool."""

from typing import NamedTuple

import triton
import triton.language as tl

from . import memory, span


class Cache(NamedTuple):
    """Views of K and V (pages, Hkv, rows, columns), of lengths (B,), and of table, the page numbers (B, n).

    V is None if the values are the first columns of the keys. Without a table, page b has all keys of sequence b. PAGE,
    in the functions below, is the number of rows of a page, or None if a sequence has only one page.
    """

    K: memory.View
    V: memory.View  # not `values`, which is an attribute of Triton's tuples
    lengths: memory.View
    table: memory.View


@triton.constexpr_function
def _several(PAGE, BLOCK):
    """Return True if a block of keys may span several pages."""
    return PAGE is not None and PAGE % BLOCK != 0


@triton.jit
def length(cache, plane, capacity):
    """Return the cached length of a plane's sequence, clamped to 0 .. capacity."""
    n = tl.load(cache.lengths.base + tl.cast(plane.batch, tl.int64) * cache.lengths.strides[0])
    return tl.minimum(tl.maximum(n, 0), capacity)


@triton.jit
def number(cache, plane, at, exists, PAGE: tl.constexpr):
    """Return the page number of each position `at` of a sequence; from a table, 0 where `exists` is False."""
    if cache.table is None:
        return plane.batch + at * 0
    else:
        row = tl.cast(plane.batch, tl.int64) * cache.table.strides[0]
        column = tl.cast(at * 0 if PAGE is None else at // PAGE, tl.int64) * cache.table.strides[1]
        return tl.load(cache.table.base + row + column, mask=exists, other=0)


@triton.jit
def of_block(cache, plane, j, capacity, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """Return the page number of a sequence's block j of BLOCK keys, or of each key [BLOCK, 1] if blocks span pages."""
    # Loops call this one step ahead, so that loads of tiles start early; j may be past the last block.
    if cache.table is None:
        return plane.batch
    elif _several(PAGE, BLOCK):
        at = (j * BLOCK + tl.arange(0, BLOCK))[:, None]
        return number(cache, plane, at, at < capacity, PAGE)
    else:
        return number(cache, plane, j * BLOCK, j * BLOCK < capacity, PAGE)


@triton.jit
def rows(at, PAGE: tl.constexpr):
    """Return, for each position `at` of a sequence, its row within its page."""
    return at if PAGE is None else at % PAGE


@triton.jit
def rows_of_block(j, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    if _several(PAGE, BLOCK):
        return rows(j * BLOCK + tl.arange(0, BLOCK), PAGE)
    else:
        return rows(j * BLOCK, PAGE) + tl.arange(0, BLOCK)


@triton.jit
def matrix(view, plane, page, pages):
    """Return a head's matrix in a page. Page numbers are clamped to the pool; `page` may be [BLOCK, 1], one per row."""
    page = tl.minimum(tl.maximum(page, 0), pages - 1)
    return memory.matrix(view, span.Plane(page, plane.head, plane.index, ()))
