"""Backward attention for Hopper: one warp loads tiles, two store results, two warpgroups of 64 keys each multiply.

A program has a block of keys. A warpgroup keeps dk and dv in registers and computes scores transposed, [keys, rows]. So
weights p and gradients ds feed dv and dk from registers; for dq, ds goes through shared memory. TMA adds dq in memory.
Source: FlashAttention-3, arXiv:2407.08608, appendix B.1; FlashAttention-2, arXiv:2307.08691, algorithm 2.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.language.nvidia.hopper.tma import store_wait, tensor_descriptor

from ..vocabulary import masks as masking, memory, scores, span, walk
from . import body, halves, layouts, notes as noting, ring, turns, visits
from .body import GROUPS
from .copies import async_add, async_store, fence_async_shared
from .layouts import WARPS


class Shared(NamedTuple):
    """Shared memory of the backward: tiles of k and v, one for each warpgroup, and rings of tiles of the other tensors.

    The barriers of q also guard do, rows (row statistics), notes (row block and head) and words (mask words of 64 rows
    for a warpgroup's keys). notes and words are None without a mask of pairs. bias, unless None: a tile for each
    warpgroup in turn. It is [64 rows, keys], [1, keys] if equal for all rows, or [64 rows] if equal for all keys. ds:
    gradients of scores [keys, rows] of two steps, a tile for each step and warpgroup. met: barrier of both warpgroups
    in each step, once ds is written. dq: float32, in `layouts.lines`, half the rows for each warpgroup, or in blocks of
    64 rows half the columns. one: matrices of `body.ones`, or None. out: barriers, passed once k, v hold dk, dv.
    """

    k: ring.Ring
    v: gl.shared_memory_descriptor
    q: ring.Ring
    do: gl.shared_memory_descriptor
    rows: gl.shared_memory_descriptor
    notes: noting.Notes
    words: gl.shared_memory_descriptor
    bias: ring.Ring
    ds: gl.shared_memory_descriptor
    dq: ring.Ring
    one: gl.shared_memory_descriptor
    met: gl.shared_memory_descriptor
    out: gl.shared_memory_descriptor


class Form(NamedTuple):
    """Compile-time constants. Shared memory has STAGES tiles of q and of do, and BIAS_TILES of a bias.

    DQ_AT: when a step of 64 rows stores its dq. 0: before it computes the next weights. 1: between their exponentials
    and dropout. 2: after dropout and masks. dq takes 32 registers until it is stored (D 64: 16). REGISTERS: (per
    multiplying thread, per other thread). GROUP query heads share a kv head. TOP_LEFT aligns row 0 with key 0, not the
    last ones. COLUMNS: (D, Dv) if GradK and GradV are Views, otherwise ().
    """

    STAGES: int
    BIAS_TILES: int
    DQ_AT: int
    REGISTERS: tuple
    GROUP: int
    TOP_LEFT: bool
    COLUMNS: tuple


@gluon.jit
def _turn(g: gl.constexpr, Turns, plane, block, first, band, masks, KEYS: gl.constexpr, BLOCK_M: gl.constexpr):
    """Return (counter of warpgroup g's half of a tile of dq, its value before this program adds, and the increase).

    The last keys add first. Under a causal band their programs have the fewest rows, so none waits for a longer one.
    The counter is the number of blocks of keys, from the last, that have added to this tile or that a mask hides.
    """
    if masks.bits is None:
        last = gl.minimum((block + 1) * BLOCK_M - 1 + band.high, band.keys - 1) // KEYS
        turn, more = last - first // KEYS, 1
    else:
        own, count = first // KEYS, gl.cdiv(band.keys, KEYS)
        last = gl.minimum(gl.minimum((block + 1) * BLOCK_M, band.rows) - 1 + band.high, band.keys - 1) // KEYS
        before, start = count, own + 1
        while (before == count) & (start <= last):  # find the block of keys that adds before this one
            others = start + gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
            some, _ = walk.covered(
                masks.bits.block_mask, plane, block, others, band.rows, band.keys, others <= last, BLOCK_M, KEYS
            )
            before = gl.min(gl.where(some, others, count), 0)
            start += 32
        turn, more = count - before, before - own
    counter = memory.table(Turns + 1, plane, band.rows, 2).base + block.to(gl.int64) * (2 * BLOCK_M)
    return counter + g, turn, more


@gluon.jit
def _produce(shared, Q, K, V, GradOut, Rows, Bias, Words, program, rules, form: gl.constexpr):
    """Load all input tiles by TMA, except a bias that is equal for all keys: the work of one warp."""
    kv, first, band, lists = program
    masks = rules.masks
    KEYS: gl.constexpr = shared.k.tiles.shape[-2]
    BLOCK_M: gl.constexpr = shared.q.tiles.shape[-2]
    for g in gl.static_range(GROUPS):
        ring.reserve(shared.k, g, K.block_type.nbytes + V.block_type.nbytes)
        ring.copy(shared.k, shared.k.tiles, g, K, ring.of_keys(kv, band), first + g * KEYS)
        ring.copy(shared.k, shared.v, g, V, ring.of_keys(kv, band), first + g * KEYS)
    TABLES: gl.constexpr = Rows.block_type.shape[-3]  # tables of a head
    NBYTES: gl.constexpr = Q.block_type.nbytes + GradOut.block_type.nbytes + Rows.block_type.nbytes
    begin, full, full_end, end = visits.extent(band, first, GROUPS * KEYS, BLOCK_M)
    block, member, ahead = begin, begin * 0, visits.entry(lists, 0)
    for step in range(visits.steps(begin, end, lists, form.GROUP)):
        block, member, ahead = visits.listed(lists, step, block, member, ahead)
        masked, numbers = (), ()
        if shared.notes is not None:
            masked, head = step < lists.masked, span.query_head(kv, member, form.GROUP)
            for n in gl.static_range(BLOCK_M // 64 * GROUPS):
                key = gl.where(masked, first + n % GROUPS * KEYS, band.keys)
                numbers += (masking.number(masks.bits, head, block * BLOCK_M + n // GROUPS * 64, key, band),)
            noting.write(shared.notes, shared.q, step, step, block, masked, member)
        plane = ring.of_rows(span.query_head(kv, member, form.GROUP), band)
        noting.reserve(shared.notes, shared.words, Words, shared.q, step, step, masked, numbers, NBYTES)
        ring.copy(shared.q, shared.q.tiles, step, Q, plane, block * BLOCK_M)
        ring.copy(shared.q, shared.do, step, GradOut, plane, block * BLOCK_M)
        tables = span.Plane(plane.batch, TABLES * plane.head, TABLES * plane.index, plane.packed)
        ring.copy(shared.q, shared.rows, step, Rows, tables, block * BLOCK_M)
        if shared.bias is not None:
            for half in gl.static_range(BLOCK_M // 64):
                for g in gl.static_range(GROUPS):
                    at, row = (step * (BLOCK_M // 64) + half) * GROUPS + g, block * BLOCK_M + half * 64
                    if Bias is None:
                        ring.put_bias(shared.bias, at, rules.score.bias, band, plane, row)
                    else:
                        ring.fill_bias(shared.bias, at, Bias, plane, row, first + g * KEYS)
        block, member = visits.following(block, member, begin, end, form.GROUP)


@gluon.jit
def _give(g: gl.constexpr, shared, Sums, GradK, GradV, Turns, program, masks, form: gl.constexpr):
    """Add a warpgroup's dq to global memory, and store its dk and dv unless they are float32: the work of one warp."""
    kv, first, band, lists = program
    KEYS: gl.constexpr = shared.k.tiles.shape[-2]
    BLOCK_M: gl.constexpr = shared.q.tiles.shape[-2]
    begin, full, full_end, end = visits.extent(band, first, GROUPS * KEYS, BLOCK_M)
    block, member = begin, begin * 0
    LINES: gl.constexpr = shared.dq.tiles.shape[-2]  # half of a block of dq
    for step in range(visits.steps(begin, end, lists, form.GROUP)):
        ring.wait(shared.dq, step * GROUPS + g)
        if shared.notes is not None:
            block, _, member = noting.read(shared.notes, step)
        plane = span.query_head(kv, member, form.GROUP)
        batch, padded = span.padded(plane, block, BLOCK_M)
        place = [batch, plane.head, (padded * GROUPS + g) * LINES, 0]
        if Turns is not None:
            counter, turn, more = _turn(g, Turns, plane, block, first, band, masks, GROUPS * KEYS, BLOCK_M)
            turns.wait(counter, turn)
        async_add(Sums, place, shared.dq.tiles.index(g))
        store_wait(0)
        ring.release(shared.dq, step * GROUPS + g)
        if Turns is not None:
            turns.end(counter, turn, more)
        block, member = visits.following(block, member, begin, end, form.GROUP)
    if isinstance(GradK, tensor_descriptor):
        mbarrier.wait(shared.out.index(g), 0)
        place = ring.place(ring.of_keys(kv, band), first + g * KEYS, 0)
        async_store(GradK, place, shared.k.tiles.index(g))
        async_store(GradV, place, shared.v.index(g))
        store_wait(0)


@gluon.jit
def _put(g: gl.constexpr, shared, step, dq):
    """Wait for all products (dq's are last), and store dq for the warp that adds it."""
    dq = warpgroup_mma_wait(num_outstanding=0, deps=(dq,))
    ring.put(shared.dq, step * GROUPS + g, layouts.lines(dq))


@gluon.jit
def _consume(g: gl.constexpr, shared, wide, program, all_real, rules, form: gl.constexpr):
    """Compute dk and dv of 64 keys from 64 rows a step, and half the columns of each dq: the work of one warpgroup."""
    GROUP: gl.constexpr = form.GROUP
    KEYS: gl.constexpr = shared.k.tiles.shape[-2]
    BLOCK_M: gl.constexpr = shared.q.tiles.shape[-2]
    WIDTH: gl.constexpr = shared.k.tiles.shape[-1]
    V_WIDTH: gl.constexpr = shared.v.shape[-1]
    PART: gl.constexpr = WIDTH // GROUPS
    FOR_S: gl.constexpr = 1 if shared.one is None else 3  # products for scores
    dtype: gl.constexpr = shared.q.tiles.dtype
    score = rules.score
    kv, first, band, _ = program
    zero, no_dq = layouts.zeros(KEYS, BLOCK_M), layouts.zeros(BLOCK_M, PART)
    dk, dv = layouts.zeros(KEYS, WIDTH), layouts.zeros(KEYS, V_WIDTH)
    keys, slope, steps = body.begin(g, shared, program, all_real, rules, zero, GROUP)
    block, member = keys.begin, keys.begin * 0
    ring.wait(shared.q, 0, pred=steps > 0)
    first_q = ring.tile(shared.q, 0).permute((1, 0))
    s = body.begin_scores(ring.tile(shared.k, g), first_q, shared, 0, zero)
    s = warpgroup_mma_wait(num_outstanding=0, deps=(s,))
    if shared.notes is not None:
        block, member, keys = body.noted(shared.notes, 0, steps, keys)
        slope = body.slope_of(score, kv, member, GROUP)
    first_head = span.query_head(kv, member, GROUP)
    p = body.biased_powers(g, s, shared, 0, steps > 0, block, keys, rules, slope, dtype)
    p = body.finish_weights(g, p, shared, 0, steps > 0, block, keys, rules, first_head)
    for step in range(steps):
        none = (block < keys.begin).to(gl.int32)  # always 0; if ptxas knew that, tile addresses would fill registers
        k, v = ring.tile(shared.k, g + none), ring.at(shared.v, g + none)
        q, do = ring.tile(shared.q, step), ring.at(shared.do, step)
        dp = body.begin_dp(v, do.permute((1, 0)), shared, step, zero)
        p16 = layouts.operand(body.dropped(p, rules.dropout, dtype), dv)
        dv = warpgroup_mma(p16, do, dv, is_async=True)
        dp = warpgroup_mma_wait(num_outstanding=1, deps=(dp,))
        ds = body.of_products(p, rules.dropout, dp, shared.rows, step, dtype).to(dtype)
        both = step % 2 * GROUPS
        shared.ds.index(both + g).store(ds)
        fence_async_shared()
        ds = layouts.operand(ds, dk)
        dk = warpgroup_mma(ds, q, dk, is_async=True)
        mbarrier.arrive(shared.met, count=1)
        # After the last block this reads old data; the result is unused.
        ring.wait(shared.q, step + 1, pred=step + 1 < steps)
        next_q = ring.tile(shared.q, step + 1).permute((1, 0))
        dv, p16 = warpgroup_mma_wait(num_outstanding=1, deps=(dv, p16))  # frees the registers of p16
        next_s = body.begin_scores(k, next_q, shared, step + 1, zero)
        mbarrier.wait(shared.met, step & 1)
        dq = no_dq
        for other in gl.static_range(GROUPS):
            of_rows = shared.ds.index(both + other).permute((1, 0))
            columns = ring.tile(shared.k, other + none).slice(g * PART, PART, dim=1)
            dq = warpgroup_mma(of_rows, columns, dq, use_acc=other > 0, is_async=True)
        dk, ds = warpgroup_mma_wait(num_outstanding=FOR_S + GROUPS, deps=(dk, ds))
        ring.release(shared.q, step)
        s = warpgroup_mma_wait(num_outstanding=GROUPS, deps=(next_s,))
        block, member, keys, slope = body.advance(shared, step + 1, steps, keys, score, slope, kv, block, member, GROUP)
        more, next_head = step + 1 < steps, span.query_head(kv, member, GROUP)
        if form.DQ_AT == 0:
            _put(g, shared, step, dq)
        p = body.biased_powers(g, s, shared, step + 1, more, block, keys, rules, slope, dtype)
        if form.DQ_AT == 1:
            _put(g, shared, step, dq)
        p = body.finish_weights(g, p, shared, step + 1, more, block, keys, rules, next_head)
        if form.DQ_AT == 2:
            _put(g, shared, step, dq)
    body.leave(g, shared, wide, kv, first, band, scores.grad(score, dk), dv, steps, form)


@gluon.jit(do_not_specialize=["q_len", "k_len", "left", "right", "heads"])
def backward(
    Q, K, V, GradOut, Rows, Bias, Words, Sums, GradK, GradV, Turns,
    sequences, tile_lists, q_len, k_len, left, right, rules, heads,
    form: gl.constexpr,
):  # fmt: skip
    """Write GradK (B, Hkv, Sk, D) and GradV (B, Hkv, Sk, Dv), and add dq, not yet scaled, to Sums.

    All tensors but Turns are TMA descriptors. Q, K, V and their gradients are (B, H, S, D), in blocks of 64 keys or of
    Q's rows. Blocks have width(D) columns, or 128 for Q, K and GradK if Dv > 64. Float32 GradK and GradV are Views.
    Sums is (B, Hq, lines, 32) float32, in blocks of a warpgroup's `layouts.lines`. Rows, from `preprocess`, is
    (B, 2 Hq, Sq, 16): a table for scores and one for dp per head. A block has both, for Q's rows. If scores are scaled
    before the softmax, or with dropout, Rows is (B, Hq, Sq, 4), float32. Bias, or None, is (B, Hq, Sq, Sk), with size 1
    where it broadcasts, in blocks of 64 keys, and of 64 rows or 1. Words, or None, has words of `transpose_words` as
    int32 (count, 128), in blocks [1, 128]; tile_lists then list blocks by keys. heads is Hkv. Turns, unless None, makes
    Sums deterministic. It is int32 zeros: a counter of programs, and two counters for each row of each query head.

    With packed sequences B is 1, q_len and k_len are totals, and descriptors except Sums, Bias and Words are ragged.
    """
    KEYS: gl.constexpr = K.block_type.shape[-2]
    BLOCK_M: gl.constexpr = Q.block_type.shape[-2]
    STAGES: gl.constexpr = form.STAGES
    # With turns, all programs with smaller numbers must have begun, whatever the order of launch.
    number = gl.program_id(0) if Turns is None else gl.atomic_add(Turns, 1)
    block, kv, rows, keys = span.locate(sequences, q_len, k_len, heads, 2 * KEYS, BY_KEYS=True, number=number)
    if Turns is not None:
        mirrored, block = block, gl.cdiv(keys, 2 * KEYS) - 1 - block
        if sequences is not None:  # an unused slot has no keys
            block = gl.maximum(block, 0)
            if tile_lists is not None:  # slots of a sequence are neighbours
                p = kv.packed
                packed = span.Packed(p.row, p.key, p.rows, p.keys, p.slot + block - mirrored)
                kv = span.Plane(kv.batch, kv.head, kv.index, packed)
    band, all_real = span.band(rows, keys, left, right, form.TOP_LEFT), ()
    if rules.masks.keys is not None:
        cols = block * 2 * KEYS + gl.arange(0, 2 * KEYS, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
        real = gl.sum(masking.real_keys(rules.masks, kv, cols, keys).to(gl.int32), 0)
        all_real = ((real == gl.minimum(2 * KEYS, keys - block * 2 * KEYS)).to(gl.int32),)
        if Turns is None:  # skip all rows if no key is real; turns need every program
            band = span.Band(gl.where(real > 0, band.rows, 0), band.keys, band.low, band.high, band.diagonal)
    k, q = ring.ring(K, 2, 1), ring.ring(Q, STAGES, 2)
    v = gl.allocate_shared_memory(V.dtype, [2] + V.block_type.shape, V.layout)
    do = gl.allocate_shared_memory(GradOut.dtype, [STAGES] + GradOut.block_type.shape, GradOut.layout)
    tables = gl.allocate_shared_memory(Rows.dtype, [STAGES] + Rows.block_type.shape, Rows.layout)
    SCORES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, BLOCK_M], Q.dtype)
    ds = gl.allocate_shared_memory(Q.dtype, [4, KEYS, BLOCK_M], SCORES)
    dq = ring.ring(Sums, 2, 1)
    bias = None if Bias is None else ring.ring(Bias, form.BIAS_TILES, 1)
    if Bias is None and rules.score.bias is not None:  # equal for all keys
        tiles = gl.allocate_shared_memory(rules.score.bias.base.dtype.element_ty, [4, 64], noting.LAYOUT)
        bias = ring.ring_of(tiles, 4, 1)
    program = visits.Program(kv, block * 2 * KEYS, band, visits.lists_of(tile_lists, kv, block))
    notes, words = None, None
    if tile_lists is not None:
        notes = noting.notes(STAGES, 1)
        words = noting.words(Words, STAGES, BLOCK_M // 64 * GROUPS)
    out = ring.barriers(2)
    gl.static_assert(STAGES >= 2, "the next q is waited for before q is given back")
    met = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(met, count=2)
    one = body.ones(KEYS) if Rows.dtype == gl.bfloat16 else None
    shared = Shared(k, v, q, do, tables, notes, words, bias, ds, dq, one, met, out)
    fence_async_shared()
    wide = () if isinstance(GradK, tensor_descriptor) else (GradK, GradV)
    gl.warp_specialize(
        [
            (halves.consume if BLOCK_M > 64 else _consume, (0, shared, wide, program, all_real, rules, form)),
            (halves.consume if BLOCK_M > 64 else _consume, (1, shared, wide, program, all_real, rules, form)),
            (_produce, (shared, Q, K, V, GradOut, Rows, Bias, Words, program, rules, form)),
            (_give, (0, shared, Sums, GradK, GradV, Turns, program, rules.masks, form)),
            (_give, (1, shared, Sums, GradK, GradV, Turns, program, rules.masks, form)),
        ],
        [WARPS, 1, 1, 1],
        [form.REGISTERS[0], form.REGISTERS[1], form.REGISTERS[1], form.REGISTERS[1]],
    )
