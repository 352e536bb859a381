"""Backward attention for Hopper with heads of 129 to 256 columns: gradients of scores go through global memory.

The dv of 128 keys fills the registers of two warpgroups, so dk does not fit beside it. This kernel computes dv and the
gradients of scores, ds. It stores ds transposed, in 16 bits, for some heads at a time. Then `grad_product` multiplies
ds by keys for dq and by queries for dk. That is five products, as in one pass. Nothing is added in memory, so dq is
deterministic.
Source: FlashAttention-2, arXiv:2307.08691, algorithm 2, with its loop divided among kernels.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.language.nvidia.hopper.tma import store_wait, tensor_descriptor

from ..vocabulary import masks as masking, memory, rules as ruling, scores, span
from . import body, layouts, notes as noting, ring, schedule, visits
from .body import OPERANDS_STAY
from .copies import as_blocks, async_store, fence_async_shared
from .layouts import WARPS


class Shared(NamedTuple):
    """Shared memory of `stored_backward`: k and v, a tile per warpgroup; rings of q, do, row statistics and ds.

    do: tiles of half the columns. ds: a tile [keys, rows] for each warpgroup. bias, unless None: a tile [rows, keys]
    for each. out: barriers, passed once v holds dv. notes, written before q, are None without a mask of keys or pairs.
    """

    k: ring.Ring
    v: gl.shared_memory_descriptor
    q: ring.Ring
    notes: noting.Notes
    do: ring.Ring
    rows: ring.Ring
    ds: ring.Ring
    bias: ring.Ring
    out: gl.shared_memory_descriptor


@gluon.jit
def _produce(shared, Q, K, V, GradOut, Rows, Bias, program, form: gl.constexpr):
    """Load by TMA all tiles that the warpgroups of `stored_backward` read: the work of one warp."""
    kv, first, band, lists = program
    KEYS: gl.constexpr = shared.k.tiles.shape[-2]
    BLOCK_M: gl.constexpr = shared.q.tiles.shape[-2]
    for g in gl.static_range(2):
        ring.reserve(shared.k, g, K.block_type.nbytes + V.block_type.nbytes)
        ring.copy(shared.k, shared.k.tiles, g, K, ring.of_keys(kv, band), first + g * KEYS)
        ring.copy(shared.k, shared.v, g, V, ring.of_keys(kv, band), first + g * KEYS)
    begin, end = visits.row_blocks(first, band, BLOCK_M, 2 * KEYS)
    block, member, ahead = begin, begin * 0, visits.entry(lists, 0)
    for step in range(visits.steps(begin, end, lists, form.GROUP, 2 * KEYS // BLOCK_M)):
        block, member, ahead = visits.listed(lists, step, block, member, ahead, 2 * KEYS // BLOCK_M)
        if shared.notes is not None:
            masked = step < lists.masked * (2 * KEYS // BLOCK_M)
            noting.write(shared.notes, shared.q, step, step, block, masked, member)
        plane = ring.of_rows(span.query_head(kv, member, form.GROUP), band)
        ring.fill(shared.q, step, Q, plane, block * BLOCK_M)
        if Rows.block_type.shape[-1] == 4:
            ring.fill(shared.rows, step, Rows, plane, block * BLOCK_M)
        else:
            ring.fill(shared.rows, step, Rows, plane, 0, block * BLOCK_M)
        for h in gl.static_range(2):
            ring.fill(shared.do, 2 * step + h, GradOut, plane, block * BLOCK_M, h * GradOut.block_type.shape[-1])
        if shared.bias is not None:
            for g in gl.static_range(2):
                ring.fill_bias(shared.bias, 2 * step + g, Bias, plane, block * BLOCK_M, first + g * KEYS)
        block, member = visits.following(block, member, begin, end, form.GROUP)


@gluon.jit
def _store(g: gl.constexpr, shared, GradScores, GradV, program, before, form: gl.constexpr):
    """Store a warpgroup's ds and dv in global memory: the work of one warp."""
    kv, first, band, lists = program
    KEYS: gl.constexpr = shared.k.tiles.shape[-2]
    BLOCK_M: gl.constexpr = shared.q.tiles.shape[-2]
    begin, end = visits.row_blocks(first, band, BLOCK_M, 2 * KEYS)
    block, member = begin, begin * 0
    key = visits.first_key(kv, 2 * KEYS) + first + g * KEYS
    for step in range(visits.steps(begin, end, lists, form.GROUP, 2 * KEYS // BLOCK_M)):
        ring.wait(shared.ds, 2 * step + g)
        if shared.notes is not None:
            block, _, member = noting.read(shared.notes, step)
        here = visits.head(span.query_head(kv, member, form.GROUP), before * form.GROUP)
        async_store(GradScores, [here, 0, key, block * BLOCK_M], shared.ds.tiles.index(g))
        store_wait(0)
        ring.release(shared.ds, 2 * step + g)
        block, member = visits.following(block, member, begin, end, form.GROUP)
    if isinstance(GradV, tensor_descriptor):
        mbarrier.wait(shared.out.index(g), 0)
        async_store(GradV, ring.place(ring.of_keys(kv, band), first + g * KEYS, 0), shared.v.index(g))
        store_wait(0)


@gluon.jit
def _begin_scores(g: gl.constexpr, shared, step, exists, none, zero, FOR_S: gl.constexpr):
    """Begin k @ q.T of a step, [keys, rows], in FOR_S products; if FOR_S is 2, they skip the last quarter of columns.

    exists: False past the last step. none: a 0 that ptxas cannot know.
    """
    ring.wait(shared.q, step, pred=exists)
    # If ptxas knows the index of a tile, it keeps the tile's addresses in registers and spills others.
    q = shared.q.tiles.index(none).reshape([shared.q.tiles.shape[-2], shared.q.tiles.shape[-1]])
    k, s = ring.tile(shared.k, g + none), zero
    if FOR_S == 2:
        s = warpgroup_mma(body.half(k, 0, 1), body.half(q, 0, 1).permute((1, 0)), s, use_acc=False, is_async=True)
        k, q = body.half(body.half(k, 1, 1), 0, 1), body.half(body.half(q, 1, 1), 0, 1)
    return warpgroup_mma(k, q.permute((1, 0)), s, use_acc=FOR_S == 2, is_async=True)


@gluon.jit
def _begin_dp(v, shared, step, exists, zero):
    """Begin wgmma for dp = v @ do.T of a step. One half of the columns may be multiplied while the other is loaded."""
    ring.wait(shared.do, 2 * step, pred=exists)
    one = ring.tile(shared.do, 2 * step).permute((1, 0))
    dp = warpgroup_mma(body.half(v, 0, 1), one, zero, use_acc=False, is_async=True)
    ring.wait(shared.do, 2 * step + 1, pred=exists)
    other = ring.tile(shared.do, 2 * step + 1).permute((1, 0))
    return warpgroup_mma(body.half(v, 1, 1), other, dp, is_async=True)


@gluon.jit
def _begin_dv(shared, step, p, dropout, dv0, dv1):
    """Begin p @ do of a step. Return dv, as two halves of its columns, and p as a left operand."""
    w = layouts.operand(body.dropped(p, dropout, shared.q.tiles.dtype), dv0)
    dv0 = warpgroup_mma(w, ring.tile(shared.do, 2 * step), dv0, is_async=True)
    return dv0, warpgroup_mma(w, ring.tile(shared.do, 2 * step + 1), dv1, is_async=True), w


@gluon.jit
def _give_ds(g: gl.constexpr, shared, step, p, dropout, dp):
    """Compute the gradients of the scores of a step, store them in shared memory, and release the row statistics."""
    dtype: gl.constexpr = shared.q.tiles.dtype
    ds = body.of_products(p, dropout, dp, shared.rows.tiles, step, dtype)
    ring.put(shared.ds, 2 * step + g, ds.to(dtype))
    ring.release(shared.rows, step)


@gluon.jit
def _number(shared, rules, kv, block, member, key, band, GROUP: gl.constexpr):
    """Return the index of the mask words of a block of rows and 64 keys; without a mask of pairs, an unused number."""
    if rules.masks.bits is None:
        return block
    else:
        head = span.query_head(kv, member, GROUP)
        return masking.number(rules.masks.bits, head, block * shared.q.tiles.shape[-2], key, band).to(gl.int32)


@gluon.jit
def _full(g: gl.constexpr, s, shared, step, exists, block, member, keys, score, kv, form: gl.constexpr):
    """Return the scores of a step with slopes or a bias. Without these options return s, which `_weights` scales.

    This needs registers, so call it before the product for dp begins.
    """
    if score.slopes is not None or score.bias is not None:
        gl.static_assert(score.cap is None, "its derivative would take registers, too")
        if shared.notes is None:  # member is too large past the last step
            member = gl.minimum(member, form.GROUP - 1)
        head = span.query_head(kv, member, form.GROUP)
        r = body.rows_from(s, block * s.shape[1])
        if score.bias is None or shared.bias is not None:
            bias = body.bias_of(shared.bias, 2 * step + g, exists, s)
        elif form.BY_ROW:
            bias = scores.pairs(score.bias, keys.band, head, r, r * 0, True)
        else:
            bias = scores.pairs(score.bias, keys.band, head, block * 0, keys.cols[:, None], True)
        s, _ = scores.apply(score, s, bias, keys.band, head, r, keys.cols[:, None])
    return s


@gluon.jit
def _weights(s, shared, step, block, member, keys, number, rules, kv, GROUP: gl.constexpr):
    """Return the weights of a step from scores of `_full`. number: index of the mask words (`_number`)."""
    bits, score = rules.masks.bits, rules.score
    words = None if bits is None else (bits.words + number.to(gl.int64) * masking.BLOCK,)
    if score.slopes is not None or score.bias is not None:
        score = scores.Score(None, None, None, None, score.slopes, score.bias, None, None)
    rules = ruling.Rules(rules.masks, score, rules.dropout)
    head = span.query_head(kv, member, GROUP)
    p = body.powers(s, 0.0, shared.rows.tiles, step, block, keys, rules, (), shared.q.tiles.dtype)
    return body.drop_and_hide(p, words, block, keys, rules, head)


@gluon.jit
def _consume(g: gl.constexpr, shared, GradV, program, rules, form: gl.constexpr):
    """Compute dv and ds of keys first + g * 64 .. first + g * 64 + 63: the work of one warpgroup.

    With DV_FIRST, ds is computed during p @ do. The next step's p is computed during its v @ do.T.
    """
    kv, first, band, lists = program
    GROUP: gl.constexpr = form.GROUP
    KEYS: gl.constexpr = shared.k.tiles.shape[-2]
    BLOCK_M: gl.constexpr = shared.q.tiles.shape[-2]
    HALF: gl.constexpr = shared.do.tiles.shape[-1]
    FOR_S: gl.constexpr = 2 if shared.k.tiles.shape[-1] == 256 and form.D <= 192 else 1  # products for scores
    # During p @ do, ds lacks registers if Triton copies p, or with dropout or slopes and values wider than 128.
    DV_FIRST: gl.constexpr = OPERANDS_STAY and ((rules.dropout is None and rules.score.slopes is None) or HALF == 64)
    dtype: gl.constexpr = shared.q.tiles.dtype
    zero, dv0, dv1 = layouts.zeros(KEYS, BLOCK_M), layouts.zeros(KEYS, HALF), layouts.zeros(KEYS, HALF)
    keys = body.keys_of(g, program, (), rules, zero, BLOCK_M)
    begin, end = visits.row_blocks(first, band, BLOCK_M, 2 * KEYS)
    block, member = begin, begin * 0
    steps = visits.steps(begin, end, lists, GROUP, 2 * KEYS // BLOCK_M)
    ring.wait(shared.k, g)
    if rules.masks.keys is not None:
        body.clean(ring.at(shared.v, g), first + g * KEYS, rules.masks, kv, band.keys)
        fence_async_shared()
    some = steps > 0
    s = _begin_scores(g, shared, 0, some, begin * 0, zero, FOR_S)
    s = warpgroup_mma_wait(num_outstanding=0, deps=(s,))
    ring.release(shared.q, 0, pred=some)
    if shared.notes is not None:
        block, member, keys = body.noted(shared.notes, 0, steps, keys)
        block = gl.where(some, block, 0)  # without steps no note was written
    number = _number(shared, rules, kv, block, member, first + g * KEYS, band, GROUP)
    s = _full(g, s, shared, 0, some, block, member, keys, rules.score, kv, form)
    ring.wait(shared.rows, 0, pred=some)
    dp = _begin_dp(ring.at(shared.v, g), shared, 0, some, zero)
    p = _weights(s, shared, 0, block, member, keys, number, rules, kv, GROUP)
    dp = warpgroup_mma_wait(num_outstanding=0, deps=(dp,))
    for step in range(steps):
        none = (block < begin).to(gl.int32)  # always 0; if ptxas knew that, tile addresses would fill registers
        if DV_FIRST:
            dv0, dv1, p16 = _begin_dv(shared, step, p, rules.dropout, dv0, dv1)
            _give_ds(g, shared, step, p, rules.dropout, dp)
        else:
            _give_ds(g, shared, step, p, rules.dropout, dp)
            dv0, dv1, p16 = _begin_dv(shared, step, p, rules.dropout, dv0, dv1)
        # After the last step this reads old data; the result is unused.
        more = step + 1 < steps
        s = _begin_scores(g, shared, step + 1, more, none, zero, FOR_S)
        if rules.masks.bits is not None:  # read early, so that the number of the words arrives in time
            block, member, keys = body.noted(shared.notes, step + 1, steps, keys)
        number = _number(shared, rules, kv, block, member, first + g * KEYS, band, GROUP)
        dv0, p16 = warpgroup_mma_wait(num_outstanding=FOR_S + 1, deps=(dv0, p16))
        ring.release(shared.do, 2 * step)
        dv1, p16 = warpgroup_mma_wait(num_outstanding=FOR_S, deps=(dv1, p16))
        ring.release(shared.do, 2 * step + 1)
        s = warpgroup_mma_wait(num_outstanding=0, deps=(s,))
        ring.release(shared.q, step + 1, pred=more)
        if shared.notes is None:
            block, member = visits.following(block, member, begin, end, GROUP)
        elif rules.masks.bits is None:
            block, member, keys = body.noted(shared.notes, step + 1, steps, keys)
        s = _full(g, s, shared, step + 1, more, block, member, keys, rules.score, kv, form)
        dp = _begin_dp(ring.at(shared.v, g + none), shared, step + 1, more, zero)
        ring.wait(shared.rows, step + 1, pred=more)
        p = _weights(s, shared, step + 1, block, member, keys, number, rules, kv, GROUP)
        dp = warpgroup_mma_wait(num_outstanding=0, deps=(dp,))
    if isinstance(GradV, tensor_descriptor):
        v = ring.at(shared.v, g)
        body.half(v, 0, 1).store(dv0.to(dtype))
        body.half(v, 1, 1).store(dv1.to(dtype))
        fence_async_shared()
        mbarrier.arrive(shared.out.index(g), count=1)
    else:
        m = memory.of_keys(GradV, kv)
        layouts.store_wide(m, first + g * KEYS, band.keys, dv0, form.DV)
        layouts.store_wide(m, first + g * KEYS, band.keys, dv1, form.DV, HALF)


@gluon.jit(do_not_specialize=["q_len", "k_len", "left", "right", "heads", "planes", "section", "before"])
def stored_backward(
    Q, K, V, GradOut, Rows, Bias, GradScores, GradV,
    sequences, tile_lists, q_len, k_len, left, right, rules, heads, planes, section, before,
    form: gl.constexpr,
):  # fmt: skip
    """Write GradV (B, Hkv, Sk, Dv) and GradScores (query heads, 1, Sk, Sq) of kv planes before .. before + planes - 1.

    A program takes two blocks of keys; a section of planes runs before the next. heads is Hkv. tile_lists, unless None,
    list 128 x 128 tiles by keys. rules.masks.bits has words from `transpose_words`. Tensors are TMA descriptors. Blocks
    of Q, K, V, GradOut and GradV have 64 keys or Q's rows, and at least 128 columns (GradOut: half as many as V). Rows
    is (B, Hq, 4, Sq) or (B, Hq, Sq, 4). Bias, None if equal for all rows or keys, is (B or 1, Hq or 1, Sq, Sk), in
    64 x 64 blocks. GradScores is written at `visits.stored_blocks`. A float32 GradV is a View.

    sequences, unless None, are packed: B is 1, q_len and k_len are totals, descriptors except GradScores and Bias are
    ragged. GradScores has the rows of the longest sequence, and whole tiles of keys for each (`visits.first_key`).
    """
    KEYS: gl.constexpr = K.block_type.shape[-2]
    order = schedule.Schedule(gl.cdiv(k_len, 2 * KEYS), planes, section, 0)
    band = span.band(q_len, k_len, left, right, form.TOP_LEFT)
    work = visits.Work(order, before, heads, band, sequences, tile_lists, left, right)
    program = visits.program(work, 2 * KEYS, form.TOP_LEFT)
    # The warps that store ds read a note as late as two steps after it is written.
    notes = None if tile_lists is None else noting.notes(2, 1)
    k, q, do = ring.ring(K, 2, 1), ring.ring(Q, 1, 2), ring.ring(GradOut, 3, 2)
    v = gl.allocate_shared_memory(V.dtype, [2] + V.block_type.shape, V.layout)
    rows, ds, bias = ring.ring(Rows, 2, 2), ring.ring(GradScores, 2, 1), None
    if Bias is not None:
        # A bias as large as ds is loaded into the tile of ds (D 256 leaves no other memory), and read before ds exists.
        if Bias.block_type.nbytes == GradScores.block_type.nbytes:
            tiles = as_blocks(Bias, ds.tiles)
        else:
            tiles = gl.allocate_shared_memory(Bias.dtype, [2] + Bias.block_type.shape, Bias.layout)
        bias = ring.Ring(tiles, ring.landing(ds).ready, ds.free)
    shared = Shared(k, v, q, notes, do, rows, ds, bias, ring.barriers(2))
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (0, shared, GradV, program, rules, form)),
            (_consume, (1, shared, GradV, program, rules, form)),
            (_produce, (shared, Q, K, V, GradOut, Rows, Bias, program, form)),
            (_store, (0, shared, GradScores, GradV, program, before, form)),
            (_store, (1, shared, GradScores, GradV, program, before, form)),
        ],
        [WARPS, 1, 1, 1],
        [form.REGISTERS[0], form.REGISTERS[1], form.REGISTERS[1], form.REGISTERS[1]],
    )
