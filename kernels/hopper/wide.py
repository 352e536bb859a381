"""Backward attention for Hopper, of heads wider than 128: two warpgroups share 64 keys, each has half of the columns.

The gradients of 64 keys and values of 256 columns fill the registers of two warpgroups. One computes the weights p, the
other their gradients ds, both transposed, [keys, rows], and both read them in shared memory. While products of one step
run, the weights of the next are computed. What the keys give to dq is added as in `backward`.
Source: FlashAttention-3, arXiv:2407.08608, appendix B.1; FlashAttention-2, arXiv:2307.08691, algorithm 2.
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
from . import ring
from .backward import Results
from .copies import async_add, async_store
from .steps import WARPS, across, extent, following, half, lines, only, weights_of_rows


class Shared(NamedTuple):
    """What lies in shared memory: k, and with it v; q, and with it rows, `Rows`; do, `GradOut`; p, ds, [keys, rows].

    dq are `steps.lines` of what the ds give to dq, in float32, a ring for each warpgroup. Its tiles have few columns,
    so that one is free sooner. met is where the warpgroups meet when they have read k and v, out tells that dk and dv
    lie there.
    """

    k: ring.Ring
    v: gl.shared_memory_descriptor
    q: ring.Ring
    rows: gl.shared_memory_descriptor
    do: ring.Ring
    p: ring.Ring
    ds: ring.Ring
    dq: tuple
    met: gl.shared_memory_descriptor
    out: gl.shared_memory_descriptor


@gluon.jit
def _produce(shared, Q, K, V, GradOut, Rows, kv, first, band, GROUP: gl.constexpr):
    """The warp that copies."""
    KEYS: gl.constexpr = shared.k.tiles.shape[3]
    BLOCK_M: gl.constexpr = shared.q.tiles.shape[3]
    ring.reserve(shared.k, 0, K.block_type.nbytes + V.block_type.nbytes)
    ring.copy(shared.k, shared.k.tiles, 0, K, kv, first)
    ring.copy(shared.k, shared.v, 0, V, kv, first)
    begin, full, full_end, end = extent(band, first, KEYS, BLOCK_M)
    block, member = begin, begin * 0
    for step in range((end - begin) * GROUP):
        plane = span.query_head(kv, member, GROUP)
        ring.reserve(shared.q, step, Q.block_type.nbytes + Rows.block_type.nbytes)
        ring.copy(shared.q, shared.q.tiles, step, Q, plane, block * BLOCK_M)
        ring.copy(shared.q, shared.rows, step, Rows, plane, 0, block * BLOCK_M)
        ring.fill(shared.do, step, GradOut, plane, block * BLOCK_M)
        block, member = following(block, member, begin, end, GROUP)


@gluon.jit
def _give(g: gl.constexpr, shared, results, kv, first, band, GROUP: gl.constexpr, D: gl.constexpr):
    """A warp that adds to dq what a warpgroup has for it, and stores the gradients of keys, or of values."""
    KEYS: gl.constexpr = shared.k.tiles.shape[3]
    BLOCK_M: gl.constexpr = shared.q.tiles.shape[3]
    LINES: gl.constexpr = shared.dq[g].tiles.shape[3]
    PARTS: gl.constexpr = shared.k.tiles.shape[4] * BLOCK_M // (64 * LINES)  # tiles of half of the columns
    TILES: gl.constexpr = shared.dq[g].tiles.shape[0]
    dq = shared.dq[g]
    begin, full, full_end, end = extent(band, first, KEYS, BLOCK_M)
    block, member = begin, begin * 0
    for step in range((end - begin) * GROUP):
        plane = span.query_head(kv, member, GROUP)
        for part in gl.static_range(PARTS):
            place = [plane.batch, plane.head, ((block * 2 + g) * PARTS + part) * LINES, 0]
            use = step * PARTS + part
            if part % 2 == 0:
                ring.wait(dq, use // 2)
            if (g * PARTS + part) * (32 * LINES // BLOCK_M) < D:
                async_add(results.Sums, place, dq.tiles.index(use % TILES))
                store_wait(0)
            ring.release(dq, use)
        block, member = following(block, member, begin, end, GROUP)
    mbarrier.wait(shared.out, 0)
    if g == 0:
        async_store(results.GradK, [kv.batch, kv.head, first, 0], shared.k.tiles.index(0))
    else:
        async_store(results.GradV, [kv.batch, kv.head, first, 0], shared.v.index(0))
    store_wait(0)


@gluon.jit
def _weights(s, shared, step, block, full, full_end, earliest, band, scale):
    """p, from the scores of a step."""
    p = weights_of_rows(s, shared.rows, step, block, full, full_end, earliest, band, scale)
    return p.to(shared.q.tiles.dtype)


@gluon.jit
def _multiply_dq(g: gl.constexpr, shared, step, ds, k, dk):
    """dk, which is waited for, and the last columns of what ds give to the half of dq that a warpgroup has, begun.

    The others are given to the warp that adds them.
    """
    BLOCK_M: gl.constexpr = ds.shape[1]
    # Of two tiles: a product that is as narrow as one reads ds twice as often.
    COLUMNS: gl.constexpr = 64 * shared.dq[g].tiles.shape[3] // BLOCK_M
    PRODUCTS: gl.constexpr = k.shape[1] // (2 * COLUMNS)
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, COLUMNS, 16])
    zero = gl.zeros([BLOCK_M, COLUMNS], gl.float32, LAYOUT)
    dq = ()
    for i in gl.static_range(PRODUCTS):
        columns = half(k, g).slice(i * COLUMNS, COLUMNS, dim=1)
        dq = dq + (warpgroup_mma(ds.permute((1, 0)), columns, zero, use_acc=False, is_async=True),)
    dk = warpgroup_mma_wait(num_outstanding=PRODUCTS, deps=(dk,))
    ring.release(shared.q, step)  # the next q but one is long in coming
    for i in gl.static_range(PRODUCTS - 1):
        _give_columns(g, shared, step, i, PRODUCTS, warpgroup_mma_wait(PRODUCTS - 1 - i, deps=(dq[i],)))
    return dk, dq[PRODUCTS - 1]


@gluon.jit
def _give_columns(g: gl.constexpr, shared, step, i: gl.constexpr, PRODUCTS: gl.constexpr, dq):
    """Give the warp that adds it one product of dq, two tiles."""
    LINES: gl.constexpr = shared.dq[g].tiles.shape[3]
    one, other = gl.split(lines(dq).reshape([2, LINES, 32]).permute((1, 2, 0)))
    ring.put_two(shared.dq[g], step * PRODUCTS + i, one, other)


@gluon.jit
def _finish(g: gl.constexpr, shared, dk, dv, scale):
    """Leave the gradients of keys and values where these lie, when the other warpgroup has read them, too."""
    dtype: gl.constexpr = shared.q.tiles.dtype
    mbarrier.arrive(shared.met, count=1)
    mbarrier.wait(shared.met, 0)
    half(ring.tile(shared.k, 0), g).store((dk * scale).to(dtype))
    half(ring.at(shared.v, 0), g).store(dv.to(dtype))
    fence_async_shared()
    mbarrier.arrive(shared.out, count=1)


@gluon.jit
def _weigh(shared, first, band, scale, GROUP: gl.constexpr):
    """The warpgroup that computes p, of the step after the one that it multiplies."""
    KEYS: gl.constexpr = shared.k.tiles.shape[3]
    BLOCK_M: gl.constexpr = shared.q.tiles.shape[3]
    WIDTH: gl.constexpr = shared.k.tiles.shape[4] // 2
    V_WIDTH: gl.constexpr = shared.v.shape[4] // 2
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_M, 16])
    K_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, WIDTH, 16])
    V_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, V_WIDTH, 16])
    COLUMNS: gl.constexpr = 64 * shared.dq[0].tiles.shape[3] // BLOCK_M
    Q_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, COLUMNS, 16])
    cols = first + gl.arange(0, KEYS, layout=gl.SliceLayout(1, S_LAYOUT))
    earliest = span.first_to_see(band, cols[:, None])
    zero = gl.zeros([KEYS, BLOCK_M], gl.float32, S_LAYOUT)
    dk = gl.zeros([KEYS, WIDTH], gl.float32, K_LAYOUT)
    dv = gl.zeros([KEYS, V_WIDTH], gl.float32, V_LAYOUT)
    begin, full, full_end, end = extent(band, first, KEYS, BLOCK_M)
    block, member = begin, begin * 0
    steps = (end - begin) * GROUP
    ring.wait(shared.k, 0)
    if steps > 0:
        ring.wait(shared.q, 0)
        k = ring.tile(shared.k, 0)
        s = warpgroup_mma(k, ring.tile(shared.q, 0).permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(num_outstanding=0, deps=(s,))
        ring.put(shared.p, 0, _weights(s, shared, 0, block, full, full_end, earliest, band, scale))
    PRODUCTS: gl.constexpr = WIDTH // COLUMNS
    dq = gl.zeros([BLOCK_M, COLUMNS], gl.float32, Q_LAYOUT)
    for step in range(steps):
        none = (block < begin).to(gl.int32)
        ring.wait(shared.do, step)
        dv = warpgroup_mma(only(shared.p, none), half(only(shared.do, none), 0), dv, is_async=True)
        if step > 0:  # under the products of this step
            _give_columns(0, shared, step - 1, PRODUCTS - 1, PRODUCTS, dq)
        ahead = gl.minimum(step + 1, steps - 1)  # once more after the last step: of that nobody reads p
        ring.wait(shared.q, ahead)
        k = only(shared.k, none)
        s = warpgroup_mma(k, ring.tile(shared.q, ahead).permute((1, 0)), zero, use_acc=False, is_async=True)
        dv = warpgroup_mma_wait(num_outstanding=1, deps=(dv,))
        ring.release(shared.do, step)
        ring.wait(shared.ds, step)
        ds = ring.tile(shared.ds, step)
        dk = warpgroup_mma(ds, half(ring.tile(shared.q, step), 0), dk, is_async=True)
        s = warpgroup_mma_wait(num_outstanding=1, deps=(s,))
        block, member = following(block, member, begin, end, GROUP)
        p = _weights(s, shared, ahead, block, full, full_end, earliest, band, scale)
        ring.put(shared.p, step + 1, p)
        dk, dq = _multiply_dq(0, shared, step, ds, k, dk)
        dq = warpgroup_mma_wait(num_outstanding=0, deps=(dq,))
        ring.release(shared.ds, step)
    if steps > 0:
        _give_columns(0, shared, steps - 1, PRODUCTS - 1, PRODUCTS, dq)
    _finish(0, shared, dk, dv, scale)


@gluon.jit
def _differ(shared, first, band, scale, GROUP: gl.constexpr):
    """The warpgroup that computes ds."""
    KEYS: gl.constexpr = shared.k.tiles.shape[3]
    BLOCK_M: gl.constexpr = shared.q.tiles.shape[3]
    WIDTH: gl.constexpr = shared.k.tiles.shape[4] // 2
    V_WIDTH: gl.constexpr = shared.v.shape[4] // 2
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_M, 16])
    K_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, WIDTH, 16])
    V_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, V_WIDTH, 16])
    PRODUCTS: gl.constexpr = WIDTH * BLOCK_M // (64 * shared.dq[1].tiles.shape[3])
    zero = gl.zeros([KEYS, BLOCK_M], gl.float32, S_LAYOUT)
    dk = gl.zeros([KEYS, WIDTH], gl.float32, K_LAYOUT)
    dv = gl.zeros([KEYS, V_WIDTH], gl.float32, V_LAYOUT)
    begin, full, full_end, end = extent(band, first, KEYS, BLOCK_M)
    ring.wait(shared.k, 0)
    steps = (end - begin) * GROUP
    ring.wait(shared.do, 0, pred=steps > 0)
    first_do = ring.tile(shared.do, 0)
    dp = warpgroup_mma(ring.at(shared.v, 0), first_do.permute((1, 0)), zero, use_acc=False, is_async=True)
    dp = warpgroup_mma_wait(num_outstanding=0, deps=(dp,))
    for step in range(steps):
        none = gl.minimum(band.keys + step, 0)
        k, v, do = only(shared.k, none), ring.at(shared.v, none), only(shared.do, none)
        ring.wait(shared.q, step)
        delta = across(shared.rows, step, 2, S_LAYOUT)
        ring.wait(shared.p, step)
        p = ring.tile(shared.p, step)
        dv = warpgroup_mma(p, half(do, 1), dv, is_async=True)
        ds = p.load(S_LAYOUT).to(gl.float32) * (dp - delta)
        ring.put(shared.ds, step, ds.to(shared.q.tiles.dtype))
        ds = only(shared.ds, none)
        dk = warpgroup_mma(ds, half(ring.tile(shared.q, step), 1), dk, is_async=True)
        dv = warpgroup_mma_wait(num_outstanding=1, deps=(dv,))
        ring.release(shared.do, step)
        ring.release(shared.p, step)
        dk, dq = _multiply_dq(1, shared, step, ds, k, dk)
        # After the last step, of what lies there, which nobody reads.
        ring.wait(shared.do, step + 1, pred=step + 1 < steps)
        next_dp = warpgroup_mma(v, do.permute((1, 0)), zero, use_acc=False, is_async=True)
        dq = warpgroup_mma_wait(num_outstanding=1, deps=(dq,))
        _give_columns(1, shared, step, PRODUCTS - 1, PRODUCTS, dq)
        dp = warpgroup_mma_wait(num_outstanding=0, deps=(next_dp,))
    _finish(1, shared, dk, dv, scale)


@gluon.jit(do_not_specialize=["q_len", "k_len", "left", "right", "heads"])
def wide_backward(
    Q, K, V, GradOut, Rows, Sums, GradK, GradV,
    q_len, k_len, left, right, scale, heads,
    GROUP: gl.constexpr, TOP_LEFT: gl.constexpr, STAGES: gl.constexpr, D: gl.constexpr,
    REGISTERS: gl.constexpr, COPYING_REGISTERS: gl.constexpr,
):  # fmt: skip
    """What `backward` computes, of descriptors as it has, whose blocks have at least 128 columns.

    A block of Sums has the lines of 32 columns, and columns past D, that of keys, are not added. Rows is
    (B, Hq, 4, Sq), in blocks of as many rows as Q.
    """
    KEYS: gl.constexpr = K.block_type.shape[2]
    BLOCK_M: gl.constexpr = Q.block_type.shape[2]
    block, kv = span.place(gl.program_id(0), k_len, heads, KEYS)
    band = span.band(q_len, k_len, left, right, TOP_LEFT)
    k, q, do = ring.ring(K, 1, 1), ring.ring(Q, STAGES, 2), ring.ring(GradOut, 1, 2)
    v = gl.allocate_shared_memory(V.dtype, [1] + V.block_type.shape, V.layout)
    rows = gl.allocate_shared_memory(gl.float32, [STAGES] + Rows.block_type.shape, Rows.layout)
    SCORES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 1, KEYS, BLOCK_M], Q.dtype)
    p = ring.around(gl.allocate_shared_memory(Q.dtype, [1, 1, 1, KEYS, BLOCK_M], SCORES), 1)
    ds = ring.around(gl.allocate_shared_memory(Q.dtype, [1, 1, 1, KEYS, BLOCK_M], SCORES), 1)
    dq = ring.ring(Sums, 3, 1), ring.ring(Sums, 3, 1)
    met = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    out = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(met, count=2)
    mbarrier.init(out, count=2)
    fence_async_shared()
    shared, results = Shared(k, v, q, rows, do, p, ds, dq, met, out), Results(Sums, GradK, GradV, None)
    first = block * KEYS
    gl.warp_specialize(
        [
            (_differ, (shared, first, band, scale, GROUP)),
            (_weigh, (shared, first, band, scale, GROUP)),
            (_produce, (shared, Q, K, V, GradOut, Rows, kv, first, band, GROUP)),
            (_give, (0, shared, results, kv, first, band, GROUP, D)),
            (_give, (1, shared, results, kv, first, band, GROUP, D)),
        ],
        [WARPS, 1, 1, 1],
        [REGISTERS, COPYING_REGISTERS, COPYING_REGISTERS, COPYING_REGISTERS],
    )
