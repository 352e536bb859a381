"""Forward attention for Hopper: one warp loads tiles, and two or three warpgroups of 64 rows each multiply.

A warpgroup has two products in flight: q @ k.T of this block of keys, and p @ v of the one before. It computes the
softmax of the first while the second runs. Source: FlashAttention-3, arXiv:2407.08608, algorithms 1 and 2.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.language.nvidia.hopper.tma import store_wait

from ..vocabulary import dropout as dropping, masks as masking, memory, saved_stats, scores, softmax, span
from ..vocabulary.partials import Partials, keep
from ..vocabulary.rules import Rules
from . import layouts, notes as noting, ring, schedule
from .copies import as_blocks, async_store, fence_async_shared
from .layouts import WARPS
from .producer import produce
from .weights import COLUMNS, Rows, weights
from .work import Results, Shared, Work, block_of_rows, extent

TILES_OF_K = gl.constexpr(4)  # number of tiles of k if STAGES is 1; each then has one part of the columns


class Spec(NamedTuple):
    """Compile-time constants of a call: HEADS query heads, GROUP of them per kv head, and DV columns of a value.

    PARTS blocks of Q or K, side by side, are a tile; if STAGES is 1, each block of K is a tile. TOP_LEFT aligns row 0
    with key 0, not the last ones. PAGE: keys of a page (2**30 if none). WARPGROUPS multiply.
    STAGES: tiles of V and of K (if 1, K has TILES_OF_K). REGISTERS: (per multiplying thread, per copying thread).
    """

    HEADS: int
    GROUP: int
    DV: int
    PARTS: int
    TOP_LEFT: bool
    PAGE: int
    WARPGROUPS: int
    STAGES: int
    REGISTERS: tuple


class Stored(NamedTuple):
    """Outputs that threads, not TMA, store. Wide (float32 View) or partials (Partials) replaces Out; both may be None.

    Lse (B, Hq, Sq) and Stats (B, Hq, Sq, `saved_stats.columns`) are contiguous, and None if there are partials.
    """

    Wide: memory.View
    partials: Partials
    Lse: gl.tensor
    Stats: gl.tensor


@gluon.jit
def _take(g: gl.constexpr, shared, work, n, results, spec: gl.constexpr):
    """Return a program's n-th block of rows: (first row, Plane, Band, split, part, last, count, full, full_end).

    The program visits `count` blocks of keys, from `last` down. Warpgroup g needs no mask for blocks full ..
    full_end - 1. With tile lists the last four are (): notes have the rest.
    """
    ROWS: gl.constexpr = shared.q.tiles.shape[-2]
    BLOCK_N: gl.constexpr = shared.k.tiles.shape[-2]
    BLOCK_M: gl.constexpr = spec.WARPGROUPS * ROWS
    first, plane, band, split, part = block_of_rows(work, n, results, BLOCK_M, shared.v.tiles.shape[-1], spec)
    if work.tile_lists is None:
        last, count = extent(band, first, split, results, BLOCK_M, BLOCK_N)
        _, full, full_end, _ = span.blocks(band, first + g * ROWS, ROWS, BLOCK_N)
        return first, plane, band, split, part, last, count, full, full_end
    else:  # the notes of the steps have the rest
        return first, plane, band, split, part, (), (), (), ()


@gluon.jit
def _visit(notes, step, block, count, full, full_end):
    """Return (block of keys, whether it needs a mask, number of steps), from the step's note if there are notes."""
    if notes is None:
        return block, (block < full) | (block >= full_end), count
    else:
        return noting.read(notes, step)


@gluon.jit
def _multiply(q, keys, step, zero, exists=True):
    """Begin q @ k.T of a step, summed over parts of the columns. The caller has waited for the first tile of k."""
    PARTS: gl.constexpr = keys.tiles.shape[0] // keys.ready.shape[0]
    TILES: gl.constexpr = len(q) // PARTS
    s = zero
    for t in gl.static_range(TILES):
        if t > 0:
            ring.wait(keys, step * TILES + t, pred=exists)
        k = ring.parts(keys, step * TILES + t)
        for i in gl.static_range(PARTS):
            s = warpgroup_mma(q[t * PARTS + i], k[i].permute((1, 0)), s, use_acc=t + i > 0, is_async=True)
    return s


@gluon.jit
def _finish_scores(s, keys, step, TILES: gl.constexpr, LATER: gl.constexpr, exists=True):
    """Wait for the product of `_multiply`, and release its tiles of k. LATER: number of products begun after it."""
    for t in gl.static_range(TILES):
        s = warpgroup_mma_wait(num_outstanding=LATER + TILES - 1 - t, deps=(s,))
        ring.release(keys, step * TILES + t, pred=exists)
    return s


@gluon.jit
def _parts_of_q(g: gl.constexpr, shared, n, step, GROUPS: gl.constexpr):
    """Return the parts of a warpgroup's tile of q for a program's n-th block of rows."""
    if shared.v.tiles.shape[0] > 1:
        return ring.parts(shared.q, n * GROUPS + g)
    else:  # add a 0 that ptxas cannot know; otherwise it keeps the addresses of all parts in registers, and spills
        return ring.parts(shared.q, n * GROUPS + g + (step < 0).to(gl.int32))


@gluon.jit
def _begin_scores(g: gl.constexpr, shared, n, step, zero, GROUPS: gl.constexpr, exists=True):
    """Begin q @ k.T of a program's n-th block of rows at a step. exists: False past the last block of rows."""
    q = _parts_of_q(g, shared, n, step, GROUPS)
    ring.wait(shared.q, n * GROUPS + g, pred=exists)
    ring.wait(shared.k, step * (len(q) if shared.v.tiles.shape[0] == 1 else 1), pred=exists)
    return _multiply(q, shared.k, step, zero, exists)


@gluon.jit
def _consume(g: gl.constexpr, shared, results, work, rules, spec: gl.constexpr, SHARE: gl.constexpr):
    """Compute rows g * 64 .. g * 64 + 63 of each block of rows: the work of one warpgroup."""
    GROUPS: gl.constexpr = spec.WARPGROUPS
    DV: gl.constexpr = spec.DV
    ROWS: gl.constexpr = shared.q.tiles.shape[-2]
    BLOCK_N: gl.constexpr = shared.k.tiles.shape[-2]
    WIDTH: gl.constexpr = shared.v.tiles.shape[-1]
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, WIDTH, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, COLUMNS, 16])
    O_ROWS: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    dtype: gl.constexpr = shared.q.tiles.dtype
    # With two tiles of q, the next q is copied in while an output is copied out of the other. If registers allow it
    # (EARLY), the first scores of the next block are then computed before the output of this one is stored.
    TWO: gl.constexpr = shared.q.ready.shape[0] > GROUPS
    EARLY: gl.constexpr = TWO and GROUPS == 2
    PACKED: gl.constexpr = work.sequences is not None
    TILES: gl.constexpr = shared.q.tiles.shape[0] // shared.q.ready.shape[0] if shared.v.tiles.shape[0] == 1 else 1
    ACROSS: gl.constexpr = (DV + WIDTH - 1) // WIDTH  # programs for the columns of a block of rows
    share = schedule.share(work.order, gl.program_id(0), gl.num_programs(0))
    some = share > 0 if PACKED else gl.constexpr(True)  # packed sequences may have fewer blocks than programs
    first, plane, band, split, part, last, count, full, full_end = _take(g, shared, work, 0, results, spec)
    zero = layouts.zeros(ROWS, BLOCK_N)
    S_ROWS: gl.constexpr = gl.SliceLayout(1, zero.type.layout)
    s = zero
    if EARLY:
        s = _begin_scores(g, shared, 0, 0, zero, GROUPS, some)
        s = _finish_scores(s, shared.k, 0, TILES, 0, some)
    step = 0
    for n in range(share):
        column = 0 if ACROSS == 1 else part * WIDTH
        rows = first + g * ROWS + gl.arange(0, ROWS, layout=S_ROWS)
        out = layouts.zeros(ROWS, WIDTH)
        score = rules.score
        if score.slopes is not None:
            slope = scores.slope(score, plane, gl.float32)
            cap, at_zero, sinks = score.cap, score.slope_at_zero, score.sinks
            score = scores.Score(score.scale, None, cap, at_zero, slope, score.bias, sinks, score.shift, score.rough)
        # Before the first key, the sink is the row max, and its weight is 1.
        lowest, weight = float("-inf"), 0.0
        if score.sinks is not None:
            lowest = scores.sink(score, plane, gl.float32)
            weight = gl.where(lowest == float("-inf"), 0.0, 1.0)
        row_max = gl.full([ROWS], lowest, gl.float32, S_ROWS)
        if GROUPS == 2:
            row_sum = gl.full([ROWS, COLUMNS], weight / COLUMNS, gl.float32, SUMS)
        else:  # too few registers for partial sums
            row_sum = gl.full([ROWS], weight, gl.float32, S_ROWS)
        state = softmax.State(row_max, row_sum)
        counters = ()
        if rules.dropout is not None:
            pairs = gl.arange(0, ROWS // 2, layout=gl.SliceLayout(1, layouts.of_counters(BLOCK_N)))
            counters = (first + g * ROWS) // 2 + pairs
        of = Rows(Rules(rules.masks, score, rules.dropout), band, plane, rows, counters)

        if not EARLY:
            s = _begin_scores(g, shared, n, step, zero, GROUPS)
            s = _finish_scores(s, shared.k, step, TILES, 0)
        q = _parts_of_q(g, shared, n, step, GROUPS)
        block, masked, steps = _visit(shared.notes, step, last, count, full, full_end)
        p, decay, state = weights(g, s, state, masked, of, block, shared, step, GROUPS)
        p = layouts.operand(p.to(dtype), out)
        if TWO:
            store_wait(0)  # of the previous block's output
            if SHARE:
                ring.release(shared.q, (n - 1) * GROUPS + g, pred=n > 0)
        ring.wait(shared.k, (step + 1) * TILES, pred=steps > 1)
        for i in range(1, steps):
            step += 1
            block = last - i if shared.notes is None else ()
            block, masked, _ = _visit(shared.notes, step, block, count, full, full_end)
            if TILES > 1:
                q = _parts_of_q(g, shared, n, step, GROUPS)
            s = _multiply(q, shared.k, step, zero)
            ring.wait(shared.v, step - 1)
            next_out = warpgroup_mma(p, ring.tile(shared.v, step - 1), out, is_async=True)
            s = _finish_scores(s, shared.k, step, TILES, 1)
            next_p, decay, state = weights(g, s, state, masked, of, block, shared, step, GROUPS)
            next_p = layouts.operand(next_p.to(dtype), out)
            # ptxas would move the wait for p @ v up over the exponentials, which would then not overlap with p @ v. It
            # moves nothing over the end of a basic block. A barrier's wait is a loop, so wait for the next k here.
            ring.wait(shared.k, (step + 1) * TILES, pred=i + 1 < steps)
            # wgmma reads p from its registers until here.
            out, p = warpgroup_mma_wait(num_outstanding=0, deps=(next_out, p))
            ring.release(shared.v, step - 1)
            out = out * gl.convert_layout(decay, O_ROWS)[:, None]
            p = next_p
        ring.wait(shared.v, step)
        out = warpgroup_mma(p, ring.tile(shared.v, step), out, is_async=True)
        more = n + 1 < share
        if EARLY:  # after the last block this reads old data; the result is unused
            s = _begin_scores(g, shared, n + 1, step + 1, zero, GROUPS, more)
        else:
            # A wait ends a basic block, so ptxas does not put what follows between the instructions of the product.
            ring.wait(shared.k, (step + 1) * TILES, pred=more)
        # Call _take here: its divisions then run during this product and do not delay the next one.
        following = _take(g, shared, work, gl.minimum(n + 1, share - 1), results, spec)
        out, p = warpgroup_mma_wait(num_outstanding=1 if EARLY else 0, deps=(out, p))
        ring.release(shared.v, step)
        step += 1

        row_max = gl.convert_layout(state.row_max, O_ROWS)
        row_sum = state.row_sum if GROUPS > 2 else gl.sum(state.row_sum, 1)
        row_sum = gl.convert_layout(row_sum, O_ROWS)
        state = softmax.State(row_max, row_sum)
        out = dropping.scaled(rules.dropout, out)
        if results.partials is None:
            out, lse, log2_sum = softmax.finish(out, state, score.softmax_scale)
        rows = gl.convert_layout(rows, O_ROWS)
        if rules.masks.rows is not None:
            real = masking.real_rows(rules.masks, plane, rows, band.rows)
            out = gl.where(real[:, None], out, 0.0)
            lse = gl.where(real, lse, scores.unseen(score, plane, gl.float32))
            log2_sum = gl.where(real, log2_sum, float("inf"))
        # If several programs divide the columns of a row, the first stores its statistics.
        is_first = True if ACROSS == 1 else part == 0
        stored_rows = gl.where(is_first, band.rows, 0)
        if results.Lse is not None:
            memory.store_column(memory.table(results.Lse, plane, band.rows, 1), rows, stored_rows, 0, lse)
        c = column + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, O_LAYOUT))[None, :]
        if results.Stats is not None:
            stored: gl.constexpr = dtype if results.Wide is None else gl.float32
            stats = saved_stats.table(results.Stats, plane, band.rows, stored, DV)
            saved_stats.store(stats, rows, stored_rows, row_max, log2_sum)
            saved_stats.store_tail(stats, rows, band.rows, out, c, DV, stored)
        if not SHARE:
            ring.release(shared.q, n * GROUPS + g)
        if results.Wide is not None:
            m = memory.of_rows(results.Wide, plane)
            layouts.store_wide(m, first + g * ROWS, band.rows, out, DV, column)
        elif results.partials is not None:
            keep(results.partials, plane, rows, c, band.rows, split, results.splits, out, state, True, DV, is_first)
        else:
            if SHARE and len(q) == 1:
                tile = q[0].reshape(results.Out.block_type.shape)
            else:  # the first block of Out that lies within this warpgroup's q
                tile = shared.out.index((g * shared.out.shape[0] + GROUPS - 1) // GROUPS)
            tile.reshape([ROWS, WIDTH]).store(out.to(dtype))
            fence_async_shared()
            async_store(results.Out, ring.place(ring.of_rows(plane, band), first + g * ROWS, column), tile)
        if EARLY:
            s = _finish_scores(s, shared.k, step, TILES, 0, more)
        if not TWO:
            store_wait(0)
            if SHARE:
                ring.release(shared.q, n * GROUPS + g)
        first, plane, band, split, part, last, count, full, full_end = following
    store_wait(0)


@gluon.jit(do_not_specialize=["q_len", "k_len", "left", "right", "planes", "section", "splits"])
def forward(
    Q, K, V, Bias, Words, Out, stored,
    sequences, caches, tile_lists, used, q_len, k_len, left, right, rules, planes, section, splits,
    spec: gl.constexpr,
):  # fmt: skip
    """Write the same outputs as kernels/forward.py. A program may compute several blocks of rows.

    One of Out, stored.Wide (B, H, Sq, DV) and stored.partials is not None. Q, K, V and Out are TMA descriptors of
    (B, H, S, D). Blocks are [1, 1, rows, width(D)], but those of Q and K are narrower if spec.PARTS of them are a tile.
    Blocks of Q and Out have 64 rows. A program computes as many columns of Out as a block of V has. Bias, or None,
    describes (B, H, Sq, Sk), with size 1 where it broadcasts. Words, or None, describes the words of `masks.Bits` as
    int32 (count, 128), in blocks [1, 128]. tile_lists is None if only causal and window hide pairs.

    planes is the number of planes of the schedule: B * Hq * splits, times the number of programs that share a row's
    columns. A `section` of planes runs before the next. If only one side of the band is bounded, as by causal, a
    program with several blocks takes them in pairs; planes must then be even.

    sequences, unless None, are packed: B is 1, q_len and k_len are totals, descriptors of Q, K, V and Out are ragged.
    `used`, an int32 tensor with one element, is the number of used slots. If caches (`work.Caches`) are not None, K and
    V are ragged descriptors of (1, H, rows of all pages, D), and k_len is the capacity.
    """
    GROUPS: gl.constexpr = spec.WARPGROUPS
    STAGES: gl.constexpr = spec.STAGES
    band = span.band(q_len, k_len, left, right, spec.TOP_LEFT)
    ROWS: gl.constexpr = Q.block_type.shape[-2]
    blocks, paired = gl.cdiv(q_len, GROUPS * ROWS), 0
    if sequences is not None:
        blocks = gl.maximum(gl.load(used), 1)
    elif (left is None) != (right is None):
        paired = (gl.num_programs(0) < blocks * planes).to(gl.int32)
    work = Work(schedule.Schedule(blocks, planes, section, paired), band, sequences, caches, tile_lists, left, right)
    WIDTH: gl.constexpr = spec.PARTS * Q.block_type.shape[-1]
    # A warpgroup's output overwrites its q if both are equally wide, or if q has parts, which are at least as wide.
    SHARE: gl.constexpr = Out is not None and (spec.PARTS > 1 or WIDTH == Out.block_type.shape[-1])
    # A warpgroup has two tiles of q (one if heads are wider than 128): the next q has arrived when a block ends. If
    # heads are wider than 256, a tile of k is one part, because all parts of two steps do not fit in shared memory.
    APART: gl.constexpr = STAGES == 1
    q = ring.ring(Q, GROUPS if WIDTH > 128 or APART else 2 * GROUPS, 1, spec.PARTS)
    k = ring.ring(K, TILES_OF_K if APART else STAGES, GROUPS, 1 if APART else spec.PARTS)
    v = ring.ring(V, STAGES, GROUPS)
    if SHARE and spec.PARTS > 1:
        out = as_blocks(Out, q.tiles)
    elif SHARE or Out is None:
        out = q.tiles
    else:
        out = gl.allocate_shared_memory(Out.dtype, [GROUPS] + Out.block_type.shape, Out.layout)
    landed = None if rules.masks.keys is None else ring.landing(v)
    AHEAD: gl.constexpr = (TILES_OF_K + spec.PARTS - 1) // spec.PARTS if APART else STAGES
    notes = None if tile_lists is None else noting.notes(AHEAD, K.block_type.shape[-2])
    words = None if Words is None else noting.words(Words, AHEAD, GROUPS * K.block_type.shape[-2] // masking.BLOCK)
    bias = None if Bias is None else ring.ring(Bias, GROUPS, 1)
    fence_async_shared()
    shared = Shared(q, k, v, landed, notes, words, bias, out)
    results = Results(Out, stored.Wide, stored.partials, stored.Lse, stored.Stats, splits)
    gl.warp_specialize(
        [
            (_consume, (g, shared, results, work, rules, spec, SHARE))
            if g < GROUPS
            else (produce, (shared, results, Q, K, V, Bias, Words, work, rules, spec))
            for g in ((0, 1, 2) if GROUPS == 2 else (0, 1, 2, 3))
        ],
        [WARPS] * (GROUPS - 1) + [1],
        [spec.REGISTERS[0]] * (GROUPS - 1) + [spec.REGISTERS[1]],
    )
