"""Blocks that the programs of a stored backward visit, where they store tiles, and constants of their kernels."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..vocabulary import memory, span
from . import lists as listing, schedule


class Form(NamedTuple):
    """Compile-time constants: GROUP query heads per kv head; D and DV columns; TOP_LEFT is as in `span.band`.

    REGISTERS: of a multiplying thread, and of other threads.
    """

    GROUP: int
    D: int
    DV: int
    TOP_LEFT: bool
    REGISTERS: tuple


@gluon.jit
def stored_blocks(band, first, TILE: gl.constexpr):
    """Return [begin, end), the blocks of TILE keys for which the ds of rows first .. first + TILE - 1 is stored.

    Rows and keys are rounded up to whole blocks, so that rows, and keys with a flipped band, find the same tiles.
    """
    rows, keys = gl.cdiv(band.rows, TILE) * TILE, gl.cdiv(band.keys, TILE) * TILE
    begin, full, full_end, end = span.blocks(
        span.Band(rows, keys, band.low, band.high, band.diagonal), first, TILE, TILE
    )
    return begin, gl.maximum(begin, end)


@gluon.jit
def row_blocks(first, band, BLOCK_M: gl.constexpr, TILE: gl.constexpr):
    """Return [begin, end) of the blocks of rows that a program visits for TILE keys from `first`."""
    begin, end = stored_blocks(span.flip(band), first, TILE)
    return begin * (TILE // BLOCK_M), end * (TILE // BLOCK_M)


class Work(NamedTuple):
    """Blocks of rows or keys that the programs compute: their order, planes before the first, and heads of a batch.

    The rest is as in work.py. Programs of packed sequences have one block each, and `order` has only their planes. A
    tile of the lists has as many rows as keys.
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
    """Return (first row, or first key if OF_K; batch and head as a Plane; Band) of a program's n-th block."""
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
        if work.tile_lists is not None and not OF_K:  # as `tile_lists` counts slots
            first = span.latest_first(block, rows, TILE)
        return first, plane, span.band(rows, keys, work.left, work.right, TOP_LEFT)


@gluon.jit
def lists_of(work, plane, first, TILE: gl.constexpr):
    """Return the Lists of a program's block of rows or keys, () if only the band hides pairs."""
    if work.tile_lists is None:
        return ()
    else:
        return listing.lists(work.tile_lists, plane, first // TILE)


@gluon.jit
def listed(lists, step, ahead, PARTS: gl.constexpr):
    """Return (block, query head in its group) of a step, one of PARTS of a tile, and the next step's entry."""
    return (
        ahead.to(gl.int32) * PARTS + step % PARTS,
        (ahead >> 32).to(gl.int32),
        listing.entry(lists, (step + 1) // PARTS),
    )


@gluon.jit
def head(plane, before):
    """Return the index of a query head in GradScores, which begins after `before` heads. Packed sequences share it."""
    return (plane.index if len(plane.packed) == 0 else plane.head) - before


@gluon.jit
def first_key(plane, TILE: gl.constexpr):
    """Return where the keys of a plane begin in GradScores: each packed sequence has tiles of its own."""
    if len(plane.packed) == 0:
        return 0
    else:
        return (plane.packed.key // TILE + plane.batch) * TILE


@gluon.jit
def steps(begin, end, lists, MEMBERS: gl.constexpr, PARTS: gl.constexpr):
    """Return the number of steps of a program: PARTS of each listed tile, or [begin, end) for each of MEMBERS heads."""
    if len(lists) == 0:
        return (end - begin) * MEMBERS
    else:
        return lists.count * PARTS
