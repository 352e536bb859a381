"""Backward attention for Hopper with heads wider than 128, in two kernels: score gradients go through global memory.

The dv of 128 keys fills the registers of two warpgroups, so dk does not fit beside it. A first kernel computes dv, and
stores the gradients of scores, ds, transposed (16 bits each), for some heads at a time. A second multiplies ds by keys
for dq and by queries for dk. That is five products, as in one pass, but nothing is added in memory: dq is
deterministic.
Source: FlashAttention-2, arXiv:2307.08691, algorithm 2, whose loop this divides.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.language.nvidia.hopper.tma import store_wait

from ..vocabulary import span
from . import ring, schedule
from .copies import async_store
from .steps import OPERANDS_STAY, WARPS, Keys, extent, first_to_see, following, half, of_products, operand, weights


class Shared(NamedTuple):
    """Shared memory of `stored_backward`: k and v, a tile per warpgroup; rings of q, do, row statistics and ds.

    do: tiles of half the columns. ds: a tile [keys, rows] for each warpgroup. out: signals that v now holds dv.
    """

    k: ring.Ring
    v: gl.shared_memory_descriptor
    q: ring.Ring
    do: ring.Ring
    rows: ring.Ring
    ds: ring.Ring
    out: gl.shared_memory_descriptor


@gluon.jit
def _stored_blocks(band, first, TILE: gl.constexpr):
    """Return [begin, end), the blocks of TILE keys for which the ds of rows first .. first + TILE - 1 is stored.

    Rows and keys are rounded up to whole blocks, so that rows, and keys with a flipped band, find the same tiles.
    """
    rows, keys = gl.cdiv(band.rows, TILE) * TILE, gl.cdiv(band.keys, TILE) * TILE
    begin, full, full_end, end = span.blocks(
        span.Band(rows, keys, band.low, band.high, band.diagonal), first, TILE, TILE
    )
    return begin, gl.maximum(begin, end)


@gluon.jit
def _row_blocks(shared, first, band):
    """Return [begin, end) of the blocks of rows that a program of `stored_backward` visits."""
    BLOCK_M: gl.constexpr = shared.q.tiles.shape[3]
    TILE: gl.constexpr = shared.k.tiles.shape[0] * shared.k.tiles.shape[3]
    begin, end = _stored_blocks(span.flip(band), first, TILE)
    return begin * (TILE // BLOCK_M), end * (TILE // BLOCK_M)


@gluon.jit
def _take(order, n, heads, before, TILE: gl.constexpr, OF_K: gl.constexpr):
    """Return (first row, or first key if OF_K; batch and head as a Plane) of a program's n-th block."""
    first, plane = schedule.take(order, n, gl.program_id(0), gl.num_programs(0), heads, TILE, before)
    if OF_K:  # reverse: under a causal band the first keys have the most rows
        first = (order.blocks - 1) * TILE - first
    return first, plane


@gluon.jit
def _produce(shared, Q, K, V, GradOut, Rows, kv, first, band, GROUP: gl.constexpr):
    """Load by TMA all tiles that the warpgroups of `stored_backward` read: the work of one warp."""
    KEYS: gl.constexpr = shared.k.tiles.shape[3]
    BLOCK_M: gl.constexpr = shared.q.tiles.shape[3]
    for g in gl.static_range(2):
        ring.reserve(shared.k, g, K.block_type.nbytes + V.block_type.nbytes)
        ring.copy(shared.k, shared.k.tiles, g, K, kv, first + g * KEYS)
        ring.copy(shared.k, shared.v, g, V, kv, first + g * KEYS)
    begin, end = _row_blocks(shared, first, band)
    block, member = begin, begin * 0
    for step in range((end - begin) * GROUP):
        plane = span.query_head(kv, member, GROUP)
        ring.fill(shared.q, step, Q, plane, block * BLOCK_M)
        ring.fill(shared.rows, step, Rows, plane, 0, block * BLOCK_M)
        for h in gl.static_range(2):
            ring.fill(shared.do, 2 * step + h, GradOut, plane, block * BLOCK_M, h * GradOut.block_type.shape[3])
        block, member = following(block, member, begin, end, GROUP)


@gluon.jit
def _store(g: gl.constexpr, shared, GradScores, GradV, kv, before, first, band, GROUP: gl.constexpr):
    """Store a warpgroup's ds and dv in global memory: the work of one warp."""
    KEYS: gl.constexpr = shared.k.tiles.shape[3]
    BLOCK_M: gl.constexpr = shared.q.tiles.shape[3]
    begin, end = _row_blocks(shared, first, band)
    block, member = begin, begin * 0
    for step in range((end - begin) * GROUP):
        here = span.query_head(kv, member, GROUP).index - before * GROUP
        ring.wait(shared.ds, 2 * step + g)
        async_store(GradScores, [here, 0, first + g * KEYS, block * BLOCK_M], shared.ds.tiles.index(g))
        store_wait(0)
        ring.release(shared.ds, 2 * step + g)
        block, member = following(block, member, begin, end, GROUP)
    mbarrier.wait(shared.out.index(g), 0)
    async_store(GradV, [kv.batch, kv.head, first + g * KEYS, 0], shared.v.index(g))
    store_wait(0)


@gluon.jit
def _begin_scores(g: gl.constexpr, shared, step, exists, none, zero):
    """Begin k @ q.T of a step, [keys, rows]. exists: False past the last step. none: a 0 that ptxas cannot know."""
    ring.wait(shared.q, step, pred=exists)
    # If ptxas knows the index of a tile, it keeps the tile's addresses in registers and spills others.
    q = shared.q.tiles.index(none).reshape([shared.q.tiles.shape[3], shared.q.tiles.shape[4]]).permute((1, 0))
    return warpgroup_mma(ring.tile(shared.k, g + none), q, zero, use_acc=False, is_async=True)


@gluon.jit
def _begin_dp(v, shared, step, exists, zero):
    """Begin wgmma for dp = v @ do.T of a step: the first half of the columns may run while the second is loaded."""
    ring.wait(shared.do, 2 * step, pred=exists)
    one = ring.tile(shared.do, 2 * step).permute((1, 0))
    dp = warpgroup_mma(half(v, 0, 1), one, zero, use_acc=False, is_async=True)
    ring.wait(shared.do, 2 * step + 1, pred=exists)
    other = ring.tile(shared.do, 2 * step + 1).permute((1, 0))
    return warpgroup_mma(half(v, 1, 1), other, dp, is_async=True)


@gluon.jit
def _begin_dv(shared, step, p, dv0, dv1):
    """Begin p @ do of a step. Return dv, as two halves of its columns, and p as a left operand."""
    LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=dv0.type.layout, k_width=2)
    w = operand(p, None, LAYOUT, shared.q.tiles.dtype)
    dv0 = warpgroup_mma(w, ring.tile(shared.do, 2 * step), dv0, is_async=True)
    return dv0, warpgroup_mma(w, ring.tile(shared.do, 2 * step + 1), dv1, is_async=True), w


@gluon.jit
def _give_ds(g: gl.constexpr, shared, step, p, dp):
    """Compute the gradients of the scores of a step, and store them in shared memory."""
    dtype: gl.constexpr = shared.q.tiles.dtype
    ds = of_products(p, None, dp, shared.rows.tiles, step, dtype)
    ring.put(shared.ds, 2 * step + g, ds.to(dtype))
    ring.release(shared.rows, step)


@gluon.jit
def _consume(g: gl.constexpr, shared, first, band, rules, GROUP: gl.constexpr):
    """Compute dv and ds of keys first + g * 64 .. first + g * 64 + 63: the work of one warpgroup.

    ds is computed during p @ do, and the next p during do @ v.
    """
    KEYS: gl.constexpr = shared.k.tiles.shape[3]
    BLOCK_M: gl.constexpr = shared.q.tiles.shape[3]
    HALF: gl.constexpr = shared.do.tiles.shape[4]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_M, 16])
    V_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, HALF, 16])
    dtype: gl.constexpr = shared.q.tiles.dtype
    cols = first + g * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(1, S_LAYOUT))
    earliest = first_to_see(cols, band, rules.masks, ())
    zero = gl.zeros([KEYS, BLOCK_M], gl.float32, S_LAYOUT)
    dv0 = gl.zeros([KEYS, HALF], gl.float32, V_LAYOUT)
    dv1 = gl.zeros([KEYS, HALF], gl.float32, V_LAYOUT)
    _, full, full_end, _ = extent(band, first, 2 * KEYS, BLOCK_M)
    keys = Keys(cols, earliest, band, full, full_end, ())
    begin, end = _row_blocks(shared, first, band)
    block, member = begin, begin * 0
    steps = (end - begin) * GROUP
    ring.wait(shared.k, g)
    some = steps > 0
    s = _begin_scores(g, shared, 0, some, begin * 0, zero)
    s = warpgroup_mma_wait(num_outstanding=0, deps=(s,))
    ring.release(shared.q, 0, pred=some)
    ring.wait(shared.rows, 0, pred=some)
    dp = _begin_dp(ring.at(shared.v, g), shared, 0, some, zero)
    p = weights(s, 0.0, None, shared.rows.tiles, 0, block, keys, rules, (), (), dtype)
    dp = warpgroup_mma_wait(num_outstanding=0, deps=(dp,))
    for step in range(steps):
        none = (block < begin).to(gl.int32)  # always 0; if ptxas knew, tile addresses would fill registers
        if OPERANDS_STAY:
            dv0, dv1, p16 = _begin_dv(shared, step, p, dv0, dv1)
            _give_ds(g, shared, step, p, dp)
        else:  # ds first: copies of p16, the left operand, leave no registers for ds
            _give_ds(g, shared, step, p, dp)
            dv0, dv1, p16 = _begin_dv(shared, step, p, dv0, dv1)
        # After the last step this reads old data; the result is unused.
        more = step + 1 < steps
        s = _begin_scores(g, shared, step + 1, more, none, zero)
        dv0, p16 = warpgroup_mma_wait(num_outstanding=2, deps=(dv0, p16))
        ring.release(shared.do, 2 * step)
        dv1, p16 = warpgroup_mma_wait(num_outstanding=1, deps=(dv1, p16))
        ring.release(shared.do, 2 * step + 1)
        s = warpgroup_mma_wait(num_outstanding=0, deps=(s,))
        ring.release(shared.q, step + 1, pred=more)
        block, member = following(block, member, begin, end, GROUP)
        dp = _begin_dp(ring.at(shared.v, g + none), shared, step + 1, more, zero)
        ring.wait(shared.rows, step + 1, pred=more)
        p = weights(s, 0.0, None, shared.rows.tiles, step + 1, block, keys, rules, (), (), dtype)
        dp = warpgroup_mma_wait(num_outstanding=0, deps=(dp,))
    v = ring.at(shared.v, g)
    half(v, 0, 1).store(dv0.to(dtype))
    half(v, 1, 1).store(dv1.to(dtype))
    fence_async_shared()
    mbarrier.arrive(shared.out.index(g), count=1)


@gluon.jit(do_not_specialize=["q_len", "k_len", "left", "right", "heads", "planes", "section", "before"])
def stored_backward(
    Q, K, V, GradOut, Rows, GradScores, GradV,
    q_len, k_len, left, right, rules, heads, planes, section, before,
    GROUP: gl.constexpr, TOP_LEFT: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Write GradV (B, Hkv, Sk, Dv) and GradScores (query heads, 1, Sk, Sq) of `planes` kv heads, after `before` others.

    A program takes two blocks of keys; a `section` of planes is done before the next. heads is Hkv. All are TMA
    descriptors. A block has 64 keys, or the rows of a block of Q, and at least 128 columns (GradOut: half). Rows is
    (B, Hq, 4, Sq), in blocks of as many rows as Q. Of GradScores only the `_stored_blocks` are written.
    """
    KEYS: gl.constexpr = K.block_type.shape[2]
    order = schedule.Schedule(gl.cdiv(k_len, 2 * KEYS), planes, section, 0)
    first, kv = _take(order, 0, heads, before, 2 * KEYS, True)
    band = span.band(q_len, k_len, left, right, TOP_LEFT)
    k, q, do = ring.ring(K, 2, 1), ring.ring(Q, 1, 2), ring.ring(GradOut, 3, 2)
    v = gl.allocate_shared_memory(V.dtype, [2] + V.block_type.shape, V.layout)
    rows, ds = ring.ring(Rows, 2, 2), ring.ring(GradScores, 2, 1)
    out = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for g in gl.static_range(2):
        mbarrier.init(out.index(g), count=1)
    fence_async_shared()
    shared = Shared(k, v, q, do, rows, ds, out)
    gl.warp_specialize(
        [
            (_consume, (0, shared, first, band, rules, GROUP)),
            (_consume, (1, shared, first, band, rules, GROUP)),
            (_produce, (shared, Q, K, V, GradOut, Rows, kv, first, band, GROUP)),
            (_store, (0, shared, GradScores, GradV, kv, before, first, band, GROUP)),
            (_store, (1, shared, GradScores, GradV, kv, before, first, band, GROUP)),
        ],
        [WARPS, 1, 1, 1],
        [REGISTERS[0], REGISTERS[1], REGISTERS[1], REGISTERS[1]],
    )


class Factors(NamedTuple):
    """Shared memory of `grad_product`: a ring of ds, keys or queries with the barriers of ds, and a ring of results."""

    ds: ring.Ring
    others: gl.shared_memory_descriptor
    product: ring.Ring


class Work(NamedTuple):
    """Blocks that `grad_product` computes: their order, planes before the first, heads of a batch, and the band."""

    order: schedule.Schedule
    before: gl.tensor
    heads: gl.tensor
    band: span.Band


@gluon.jit
def _share(work):
    return schedule.share(work.order, gl.program_id(0), gl.num_programs(0))


@gluon.jit
def _factors_of(work, n, factors, OF_K: gl.constexpr):
    """Return (first row, batch and head, begin, end) of a program's n-th block, which uses ds tiles [begin, end)."""
    TILE: gl.constexpr = factors.product.tiles.shape[0] * factors.product.tiles.shape[3]
    PARTS: gl.constexpr = TILE // factors.others.shape[3]
    first, plane = _take(work.order, n, work.heads, work.before, TILE, OF_K)
    begin, end = _stored_blocks(work.band, first, TILE)
    return first, plane, begin * PARTS, end * PARTS


@gluon.jit
def _load(factors, GradScores, Others, work, before, GROUP: gl.constexpr, OF_K: gl.constexpr):
    """Load by TMA the tiles that `_multiply` multiplies: the work of one warp.

    For dq these are ds and keys of one head; for dk, ds and queries of all query heads that share the kv head.
    """
    DEPTH: gl.constexpr = Others.block_type.shape[2]
    MEMBERS: gl.constexpr = GROUP if OF_K else 1
    step = 0
    for n in range(_share(work)):
        first, plane, begin, end = _factors_of(work, n, factors, OF_K)
        block, member = begin, begin * 0
        for _ in range((end - begin) * MEMBERS):
            ring.reserve(factors.ds, step, GradScores.block_type.nbytes + Others.block_type.nbytes)
            if OF_K:
                other = span.query_head(plane, member, GROUP)
                here = span.Plane(other.index - before * GROUP, 0, 0, ())
                ring.copy(factors.ds, factors.ds.tiles, step, GradScores, here, first, block * DEPTH)
            else:
                other = span.kv_head(plane, GROUP)
                here = span.Plane(plane.index - before * GROUP, 0, 0, ())
                ring.copy(factors.ds, factors.ds.tiles, step, GradScores, here, block * DEPTH, first)
            ring.copy(factors.ds, factors.others, step, Others, other, block * DEPTH)
            block, member = following(block, member, begin, end, MEMBERS)
            step += 1


@gluon.jit
def _store_product(g: gl.constexpr, factors, Product, work, OF_K: gl.constexpr):
    """Store the blocks of dq or dk of warpgroup g, each while the next is computed: the work of one warp."""
    ROWS: gl.constexpr = Product.block_type.shape[2]
    for n in range(_share(work)):
        first, plane, _, _ = _factors_of(work, n, factors, OF_K)
        ring.wait(factors.product, 2 * n + g)
        async_store(Product, [plane.batch, plane.head, first + g * ROWS, 0], factors.product.tiles.index(g))
        store_wait(0)
        ring.release(factors.product, 2 * n + g)


@gluon.jit
def _multiply(g: gl.constexpr, factors, work, scale, MEMBERS: gl.constexpr, OF_K: gl.constexpr):
    """Compute half g (0 or 1) of the rows of each block of dq or dk: the work of one warpgroup."""
    ROWS: gl.constexpr = factors.product.tiles.shape[3]
    WIDTH: gl.constexpr = factors.product.tiles.shape[4]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, WIDTH, 16])
    step = 0
    for n in range(_share(work)):
        _, _, begin, end = _factors_of(work, n, factors, OF_K)
        total = gl.zeros([ROWS, WIDTH], gl.float32, LAYOUT)
        steps = (end - begin) * MEMBERS
        for i in range(steps):
            ring.wait(factors.ds, step)
            if OF_K:
                ds = ring.tile(factors.ds, step).slice(g * ROWS, ROWS, dim=0)
            else:
                ds = ring.tile(factors.ds, step).slice(g * ROWS, ROWS, dim=1).permute((1, 0))
            total = warpgroup_mma(ds, ring.at(factors.others, step), total, is_async=True)
            total = warpgroup_mma_wait(num_outstanding=1, deps=(total,))
            ring.release(factors.ds, step - 1, pred=i > 0)
            step += 1
        total = warpgroup_mma_wait(num_outstanding=0, deps=(total,))
        ring.release(factors.ds, step - 1, pred=steps > 0)
        ring.put(factors.product, 2 * n + g, (total * scale).to(factors.product.tiles.dtype))


@gluon.jit(do_not_specialize=["q_len", "k_len", "left", "right", "heads", "planes", "section", "before"])
def grad_product(
    GradScores, Others, Product,
    q_len, k_len, left, right, scale, heads, planes, section, before,
    GROUP: gl.constexpr, OF_K: gl.constexpr, TOP_LEFT: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Write Product: dq = ds @ keys, where Others is K; or, if OF_K, dk = ds.T @ queries, where Others is Q.

    heads, planes and section refer to Product; before counts kv heads; others are as in `stored_backward`. Blocks
    have 64 rows; a block of GradScores has 128 rows of Product as its columns, or as its rows if OF_K. A program takes
    two blocks of Product at a time.
    """
    TILE: gl.constexpr = 2 * Product.block_type.shape[2]
    MEMBERS: gl.constexpr = GROUP if OF_K else 1
    length = k_len if OF_K else q_len
    band = span.band(q_len, k_len, left, right, TOP_LEFT)
    if OF_K:
        band = span.flip(band)
    order = schedule.Schedule(gl.cdiv(length, TILE), planes, section, 0)
    work = Work(order, before * (GROUP // MEMBERS), heads, band)
    ds = ring.ring(GradScores, STAGES, 2)
    others = gl.allocate_shared_memory(Others.dtype, [STAGES] + Others.block_type.shape, Others.layout)
    factors = Factors(ds, others, ring.ring(Product, 2, 1))
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (0, factors, work, scale, MEMBERS, OF_K)),
            (_multiply, (1, factors, work, scale, MEMBERS, OF_K)),
            (_load, (factors, GradScores, Others, work, before, GROUP, OF_K)),
            (_store_product, (0, factors, Product, work, OF_K)),
            (_store_product, (1, factors, Product, work, OF_K)),
        ],
        [WARPS, 1, 1, 1],
        [REGISTERS[0], REGISTERS[1], REGISTERS[1], REGISTERS[1]],
    )
