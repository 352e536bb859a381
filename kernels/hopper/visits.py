"""Blocks that the programs of a backward visit, and positions of their tiles in stored score gradients."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..vocabulary import memory, span, walk
from . import schedule


class Form(NamedTuple):
    """Compile-time constants of stored.py and wide.py: GROUP query heads per kv head; TOP_LEFT is as in `span.band`.

    REGISTERS: (per multiplying thread, per other thread). BY_ROW: a bias, if any, is equal for all keys.
    """

    GROUP: int
    D: int
    DV: int
    TOP_LEFT: bool
    REGISTERS: tuple
    BY_ROW: bool


class Lists(NamedTuple):
    """Tiles that a program visits for its block, from the tile lists: blocks of keys, or row blocks of each query head.

    The first `masked` of `count` entries need a mask. Entry i is at partial + i if i < masked, otherwise at full + i.
    """

    count: gl.tensor
    masked: gl.tensor
    partial: gl.tensor
    full: gl.tensor


class Program(NamedTuple):
    """The work of a program: keys of a kv head, from `first` on, their Band, and Lists or ()."""

    kv: span.Plane
    first: gl.tensor
    band: span.Band
    lists: Lists


@gluon.jit
def lists_of(tile_lists, plane, block):
    """Return the Lists of a block of rows or keys; () if tile_lists is None."""
    if tile_lists is None:
        return ()
    else:
        partial, full = walk.tile_list(tile_lists, plane, block, 0), walk.tile_list(tile_lists, plane, block, 1)
        masked = walk.extent((), partial, 0)[1]
        return Lists(masked + walk.extent((), full, 1)[1], masked, partial, full - masked)


@gluon.jit
def entry(lists, i):
    """Load entry i of the Lists; 0 past the last. Return () without Lists."""
    if len(lists) == 0:
        return ()
    else:
        return gl.load(gl.where(i < lists.masked, lists.partial, lists.full) + i, mask=i < lists.count, other=0)


@gluon.jit
def extent(band, first, KEYS: gl.constexpr, BLOCK_M: gl.constexpr):
    """Return the row blocks that see any of KEYS keys from `first`: (begin, full, full_end, end) of `span.blocks`."""
    ranges = span.blocks(span.flip(band), first, KEYS, BLOCK_M)
    return span.masked_past(ranges, first + KEYS, band.keys)


@gluon.jit
def stored_blocks(band, first, TILE: gl.constexpr):
    """Return [begin, end), the blocks of TILE keys for which the ds of rows first .. first + TILE - 1 is stored.

    Rows and keys are rounded up to whole blocks, so that a flipped band, from keys to rows, gives the same tiles.
    """
    rows, keys = gl.cdiv(band.rows, TILE) * TILE, gl.cdiv(band.keys, TILE) * TILE
    begin, full, full_end, end = span.blocks(
        span.Band(rows, keys, band.low, band.high, band.diagonal), first, TILE, TILE
    )
    return begin, gl.maximum(begin, end)


@gluon.jit
def row_blocks(first, band, BLOCK_M: gl.constexpr, TILE: gl.constexpr):
    """Return [begin, end) of the blocks of BLOCK_M rows that a program visits for TILE keys from `first`."""
    begin, end = stored_blocks(span.flip(band), first, TILE)
    return begin * (TILE // BLOCK_M), end * (TILE // BLOCK_M)


class Work(NamedTuple):
    """Blocks of rows or keys that the programs compute: their order, planes before the first, and heads of a batch.

    Each packed sequence has its own band, from left and right; otherwise `band` holds for all blocks. Programs of
    packed sequences have one block each, and use only `planes` of `order`. Tiles of tile_lists are squares.
    """

    order: schedule.Schedule
    before: gl.tensor
    heads: gl.tensor
    band: span.Band
    sequences: span.Sequences
    tile_lists: memory.View
    left: gl.tensor
    right: gl.tensor


@gluon.jit
def take(work, n, TOP_LEFT: gl.constexpr, TILE: gl.constexpr, OF_K: gl.constexpr):
    """Return (first row, or first key if OF_K; Plane; Band) of a program's n-th block."""
    if work.sequences is None:
        programs, order = gl.num_programs(0), work.order
        first, plane = schedule.take(order, n, gl.program_id(0), programs, work.heads, TILE, work.before)
        if OF_K:  # reverse: under a causal band the first keys have the most rows
            first = (order.blocks - 1) * TILE - first
        return first, plane, work.band
    else:
        block, plane, rows, keys = span.locate(
            work.sequences, work.band.rows, work.band.keys, work.order.planes, TILE, BY_KEYS=OF_K
        )
        head = work.before + plane.head
        plane = span.Plane(plane.batch, head, plane.batch * work.heads + head, plane.packed)
        first = gl.maximum(block, 0) * TILE
        if work.tile_lists is not None and not OF_K:  # slots count blocks of rows from the last
            first = span.latest_first(block, rows, TILE)
        return first, plane, span.band(rows, keys, work.left, work.right, TOP_LEFT)


@gluon.jit
def listed(lists, step, block, member, ahead, PARTS: gl.constexpr = 1):
    """Return (block, query head in its group, entry of the next step) of a step; `ahead` is the step's own entry.

    A listed tile has PARTS steps. Without Lists return the arguments.
    """
    if len(lists) > 0:
        block, member = ahead.to(gl.int32) * PARTS + step % PARTS, (ahead >> 32).to(gl.int32)
        ahead = entry(lists, (step + 1) // PARTS)
    return block, member, ahead


@gluon.jit
def following(block, member, begin, end, GROUP: gl.constexpr):
    """Return the (row block, query head in its group) after (block, member): all blocks of a head, then of the next."""
    if GROUP == 1:
        return block + 1, member
    else:
        wrap = block + 1 == end
        return gl.where(wrap, begin, block + 1), member + wrap.to(gl.int32)


@gluon.jit
def head(plane, before):
    """Return the index in GradScores of a query head, counted from head `before`. Packed sequences share an index."""
    return (plane.index if len(plane.packed) == 0 else plane.head) - before


@gluon.jit
def first_key(plane, TILE: gl.constexpr):
    """Return the row of GradScores where a plane's keys begin: a multiple of TILE, or 0 if nothing is packed."""
    return 0 if len(plane.packed) == 0 else (plane.packed.key // TILE + plane.batch) * TILE


@gluon.jit
def steps(begin, end, lists, MEMBERS: gl.constexpr, PARTS: gl.constexpr = 1):
    """Return the number of steps: PARTS for each listed tile, or one for each block [begin, end) of MEMBERS heads."""
    return (end - begin) * MEMBERS if len(lists) == 0 else lists.count * PARTS


@gluon.jit
def program(work, TILE: gl.constexpr, TOP_LEFT: gl.constexpr):
    """Return this program's Program. The grid must have one program for each block of TILE keys."""
    first, kv, band = take(work, 0, TOP_LEFT, TILE, True)
    return Program(kv, first, band, lists_of(work.tile_lists, kv, first // TILE))
