"""Data that the warps of the forward share, and the blocks of rows and keys that each program visits."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper.tma import tensor_descriptor

from ..vocabulary import memory, pages as paging, partials as splitting, span
from . import notes as noting, ring, schedule


class Shared(NamedTuple):
    """Shared memory: rings of q, k and v, and an output tile for each warpgroup, which may be its tile of q.

    landed, with a key mask, has the tiles of v, and barriers at which the producer awaits its copies, to zero hidden
    values. notes are None without a mask of keys or pairs. words, with a mask of pairs, has the words (`masks.Bits`) of
    each warpgroup's rows, copied with k. bias, unless None, is a ring with a tile for each warpgroup.
    """

    q: ring.Ring
    k: ring.Ring
    v: ring.Ring
    landed: ring.Ring
    notes: noting.Notes
    words: gl.shared_memory_descriptor
    bias: ring.Ring
    out: gl.shared_memory_descriptor


class Caches(NamedTuple):
    """Cached lengths, new keys included, and page numbers, as in `pages.Cache`; all fields are None without caches.

    pitch: the number of rows from the start of a page to the start of the next one in memory.
    """

    lengths: memory.View
    table: memory.View
    pitch: gl.tensor


class Work(NamedTuple):
    """Blocks of rows that the programs compute, in their order, and the band (visible keys) of each.

    Each packed or cached sequence has its own band, from `left` and `right`; otherwise `band` holds for all blocks.
    tile_lists is a View, or None without a mask of keys or pairs.
    """

    order: schedule.Schedule
    band: span.Band
    sequences: span.Sequences
    caches: Caches
    tile_lists: memory.View
    left: gl.tensor
    right: gl.tensor


class Results(NamedTuple):
    """Outputs, as the kernel `forward` takes them, and the number of splits of the keys."""

    Out: tensor_descriptor
    Wide: memory.View
    partials: splitting.Partials
    Lse: gl.tensor
    Stats: gl.tensor
    splits: gl.tensor


@gluon.jit
def block_of_rows(work, n, results, BLOCK: gl.constexpr, WIDTH: gl.constexpr, spec: gl.constexpr):
    """Return (first row, Plane (batch and head), Band, split, part) of a program's n-th block of rows.

    split is the number of a split of its keys, or () without splits. part is the number of a group of WIDTH columns of
    the output, or () if there is only one group.
    """
    PARTS: gl.constexpr = (spec.DV + WIDTH - 1) // WIDTH
    heads = spec.HEADS * PARTS if results.partials is None else spec.HEADS * results.splits * PARTS
    program, programs = gl.program_id(0), gl.num_programs(0)
    if work.sequences is None:
        first, plane = schedule.take(work.order, n, program, programs, heads, BLOCK)
        band = work.band
        if work.caches.lengths is not None:
            keys = paging.length(work.caches, plane, band.keys)
            band = span.band(band.rows, keys, work.left, work.right, spec.TOP_LEFT)
    else:
        # In the schedule, a plane is one head and a block is a slot; the first slot has the most work.
        program = gl.minimum(program, work.order.blocks * work.order.planes - 1)
        slot, plane = schedule.take(work.order, n, program, programs, heads, 1)
        slot = work.order.blocks - 1 - slot
        entry = work.sequences.slots + slot.to(gl.int64) * 2
        batch, block = gl.maximum(gl.load(entry), 0), gl.load(entry + 1)  # if all sequences are empty, slot 0 holds -1
        plane = span.Plane(batch, plane.head, batch * heads + plane.head, ())
        plane, rows, keys = span.within(work.sequences.extents, plane, work.band.rows, work.band.keys, slot)
        band = span.band(rows, keys, work.left, work.right, spec.TOP_LEFT)
        first = span.latest_first(block, rows, BLOCK)
    split, part = (), ()
    if PARTS > 1:
        plane, part = span.kv_head(plane, PARTS), plane.index % PARTS
    if results.partials is not None:
        plane, split = span.kv_head(plane, results.splits), plane.index % results.splits
    return first, plane, band, split, part


@gluon.jit
def within_split(begin, end, split, splits):
    """Return (begin, end) of one split of begin .. end - 1."""
    count = gl.maximum(end - begin, 0)
    return begin + split * count // splits, begin + (split + 1) * count // splits


@gluon.jit
def extent(band, first, split, results, ROWS: gl.constexpr, BLOCK_N: gl.constexpr):
    """Return (last visible block of keys, number of visible blocks) for a block of rows; the number is at least one.

    With splits, each has an equal part of the blocks. A split without blocks reads the block past the last key.
    """
    begin, full, full_end, end = span.blocks(band, first, ROWS, BLOCK_N)
    if results.partials is not None:
        begin, end = within_split(begin, end, split, results.splits)
        begin = gl.where(begin < end, begin, gl.cdiv(band.keys, BLOCK_N))
    count = gl.maximum(end - begin, 1)
    return begin + count - 1, count
