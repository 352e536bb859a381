"""A warpgroup's part of the Hopper backward for heads up to 64 wide: each step computes 128 rows in two halves.

One half is computed while products of the other run, and the first half of the next step during the products for dq.
Source: as in backward.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from ..vocabulary import scores, span
from . import body, layouts, ring
from .body import GROUPS, OPERANDS_STAY
from .copies import fence_async_shared


@gluon.jit
def _columns(tile, number: gl.constexpr):
    """Return half `number` (0 or 1) of the rows of a tile, transposed, as a right operand of wgmma."""
    return body.half(tile, number, 0).permute((1, 0))


@gluon.jit
def _differ(p, dropout, dp, rows, step, number: gl.constexpr, tile):
    """Return ds of half `number` (0 or 1) of the rows of a step; also store it in that half of `tile` [keys, rows]."""
    ds = body.of_products(p, dropout, dp, rows, step, tile.dtype, number, 2).to(tile.dtype)
    body.half(tile, number, 1).store(ds)
    return ds


@gluon.jit
def consume(g: gl.constexpr, shared, wide, program, all_real, rules, form: gl.constexpr):
    """Compute dk and dv of keys first + g * 64 .. first + g * 64 + 63, and half g of each dq: one warpgroup's work."""
    GROUP: gl.constexpr = form.GROUP
    KEYS: gl.constexpr = shared.k.tiles.shape[-2]
    BLOCK_M: gl.constexpr = shared.q.tiles.shape[-2]
    WIDTH: gl.constexpr = shared.k.tiles.shape[-1]
    V_WIDTH: gl.constexpr = shared.v.shape[-1]
    ROWS: gl.constexpr = BLOCK_M // 2
    FOR_S: gl.constexpr = 1 if shared.one is None else 3  # products for scores
    FOR_DP: gl.constexpr = 1 if shared.one is None else 2
    dtype: gl.constexpr = shared.q.tiles.dtype
    score = rules.score
    kv, first, band, _ = program
    zero, no_dq = layouts.zeros(KEYS, ROWS), layouts.zeros(ROWS, WIDTH)
    dk, dv = layouts.zeros(KEYS, WIDTH), layouts.zeros(KEYS, V_WIDTH)
    keys, slope, steps = body.begin(g, shared, program, all_real, rules, zero, GROUP)
    block, member = keys.begin, keys.begin * 0
    k, v = ring.tile(shared.k, g), ring.at(shared.v, g)
    # With k and v in registers, products read half as much shared memory: 2 % faster on an H200. More options spill.
    MANY: gl.constexpr = score.cap is not None and score.slopes is not None
    if OPERANDS_STAY and not MANY and rules.dropout is None and shared.bias is None:
        OF_S: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=zero.type.layout, k_width=2)
        k, v = k.load(OF_S), v.load(OF_S)
    ring.wait(shared.q, 0, pred=steps > 0)
    s0 = body.begin_scores(k, _columns(ring.tile(shared.q, 0), 0), shared, 0, zero, 0, 2)
    dp0 = body.begin_dp(v, _columns(ring.at(shared.do, 0), 0), shared, 0, zero, 0, 2)
    s0, dp0 = warpgroup_mma_wait(num_outstanding=0, deps=(s0, dp0))
    if shared.notes is not None:
        block, member, keys = body.noted(shared.notes, 0, steps, keys)
        slope = body.slope_of(score, kv, member, GROUP)
    first_head = span.query_head(kv, member, GROUP)
    p0 = body.biased_powers(g, s0, shared, 0, steps > 0, block, keys, rules, slope, dtype, 0, 2)
    p0 = body.finish_weights(g, p0, shared, 0, steps > 0, block, keys, rules, first_head, 0, 2)
    for step in range(steps):
        none = (block < keys.begin).to(gl.int32)  # always 0; if ptxas knew that, tile addresses would fill registers
        q, do = ring.tile(shared.q, step), ring.at(shared.do, step)
        both = step % 2 * GROUPS
        s1 = body.begin_scores(k, _columns(q, 1), shared, step, zero, 1, 2)
        first16 = layouts.operand(body.dropped(p0, rules.dropout, dtype), dv)
        dv = warpgroup_mma(first16, body.half(do, 0, 0), dv, is_async=True)
        ds0 = layouts.operand(_differ(p0, rules.dropout, dp0, shared.rows, step, 0, shared.ds.index(both + g)), dk)
        dp1 = body.begin_dp(v, _columns(do, 1), shared, step, zero, 1, 2)
        dk = warpgroup_mma(ds0, body.half(q, 0, 0), dk, is_async=True)
        s1, dv, first16 = warpgroup_mma_wait(num_outstanding=FOR_DP + 1, deps=(s1, dv, first16))
        head = span.query_head(kv, member, GROUP)
        p1 = body.biased_powers(g, s1, shared, step, True, block, keys, rules, slope, dtype, 1, 2)
        p1 = body.finish_weights(g, p1, shared, step, True, block, keys, rules, head, 1, 2)
        other16 = layouts.operand(body.dropped(p1, rules.dropout, dtype), dv)
        dv = warpgroup_mma(other16, body.half(do, 1, 0), dv, is_async=True)
        dp1, dk, ds0 = warpgroup_mma_wait(num_outstanding=1, deps=(dp1, dk, ds0))
        ds1 = _differ(p1, rules.dropout, dp1, shared.rows, step, 1, shared.ds.index(both + g))
        fence_async_shared()
        mbarrier.arrive(shared.met, count=1)
        ds1 = layouts.operand(ds1, dk)
        dk = warpgroup_mma(ds1, body.half(q, 1, 0), dk, is_async=True)
        # After the last block this reads old data; the result is unused.
        ring.wait(shared.q, step + 1, pred=step + 1 < steps)
        next_q, next_do = _columns(ring.tile(shared.q, step + 1), 0), _columns(ring.at(shared.do, step + 1), 0)
        next_s = body.begin_scores(k, next_q, shared, step + 1, zero, 0, 2)
        mbarrier.wait(shared.met, step & 1)
        dq = no_dq
        for other in gl.static_range(GROUPS):
            of_rows = body.half(shared.ds.index(both + other).permute((1, 0)), g, 0)
            dq = warpgroup_mma(of_rows, ring.tile(shared.k, other + none), dq, use_acc=other > 0, is_async=True)
        dv, other16, dk, ds1 = warpgroup_mma_wait(num_outstanding=FOR_S + GROUPS, deps=(dv, other16, dk, ds1))
        ring.release(shared.q, step)
        next_dp = body.begin_dp(v, next_do, shared, step + 1, zero, 0, 2)
        s0 = warpgroup_mma_wait(num_outstanding=FOR_DP + GROUPS, deps=(next_s,))
        block, member, keys, slope = body.advance(shared, step + 1, steps, keys, score, slope, kv, block, member, GROUP)
        more, next_head = step + 1 < steps, span.query_head(kv, member, GROUP)
        p0 = body.biased_powers(g, s0, shared, step + 1, more, block, keys, rules, slope, dtype, 0, 2)
        p0 = body.finish_weights(g, p0, shared, step + 1, more, block, keys, rules, next_head, 0, 2)
        dq = warpgroup_mma_wait(num_outstanding=FOR_DP, deps=(dq,))
        ring.put(shared.dq, step * GROUPS + g, layouts.lines(dq))
        dp0 = warpgroup_mma_wait(num_outstanding=0, deps=(next_dp,))
    body.leave(g, shared, wide, kv, first, band, scores.grad(score, dk), dv, steps, form)
