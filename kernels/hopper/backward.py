"""Backward attention for Hopper: warps that copy, one in and two out, and two warpgroups of 64 keys each that multiply.

A program has a block of keys. A warpgroup keeps the gradients of its keys and values in registers, and computes scores
transposed, [keys, rows], so that weights and gradients of scores go from registers straight into the products that take
them. What its keys give to dq the copy engine adds in memory, at the word of a warp that waits for it.
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
from triton.experimental.gluon.language.nvidia.hopper.tma import store_wait, tensor_descriptor

from ..vocabulary import softmax, span, tiles
from . import ring, turns
from .copies import async_add, async_store

WARPS = gl.constexpr(4)  # of a warpgroup


class Shared(NamedTuple):
    """What lies in shared memory: k, a tile a warpgroup, and with it v; q in a ring, and with it `GradOut` and `Rows`.

    ds are gradients of scores, [step and warpgroup, keys, rows], of two steps. dq is what they give to dq, in float32,
    a tile a warpgroup. Where heads are wide a warpgroup has half of the columns of dq, from the keys of both, who meet
    at a barrier; else met is None, and each has what its own keys give. out tells that dk and dv lie in k and v.
    """

    k: ring.Ring
    v: gl.shared_memory_descriptor
    q: ring.Ring
    do: gl.shared_memory_descriptor
    rows: gl.shared_memory_descriptor
    ds: gl.shared_memory_descriptor
    dq: ring.Ring
    met: gl.shared_memory_descriptor
    out: gl.shared_memory_descriptor


class Results(NamedTuple):
    """Descriptors: Sums is of dq's, in float32. Turns are whose turn it is to add to it, or None."""

    Sums: tensor_descriptor
    GradK: tensor_descriptor
    GradV: tensor_descriptor
    Turns: gl.tensor


@gluon.jit
def _extent(band, first, KEYS: gl.constexpr, BLOCK_M: gl.constexpr):
    """(begin, full, full_end, end) of the blocks of rows that see some of the keys; between the middle two all do."""
    ranges = span.blocks(span.flip(band), first, KEYS, BLOCK_M)
    return span.masked_past(ranges, first + KEYS, band.keys)


@gluon.jit
def _following(block, member, begin, end, GROUP: gl.constexpr):
    """The block of rows and the query head that come next: all blocks of one head, then those of the next."""
    if GROUP == 1:
        return block + 1, member
    else:
        wrap = block + 1 == end
        return gl.where(wrap, begin, block + 1), member + wrap.to(gl.int32)


@gluon.jit
def _turn(
    g: gl.constexpr, results, plane, block, first, band,
    TOGETHER: gl.constexpr, KEYS: gl.constexpr, BLOCK_M: gl.constexpr,
):  # fmt: skip
    """(the counter of a tile of dq, how many add to it before warpgroup g does): the last keys of its rows come first.

    TOGETHER: whether both warpgroups add to all columns; otherwise each to its own, which have a counter of their own.
    Under a causal band the programs of the last keys have the fewest rows: in this order none waits for a longer one.
    """
    last = gl.minimum((block + 1) * BLOCK_M - 1 + band.high, band.keys - 1) // KEYS
    before = last - first // KEYS
    counter = tiles.table(results.Turns + 1, plane, band.rows, 2).base + block.to(gl.int64) * (2 * BLOCK_M)
    if TOGETHER:
        return counter, before * 2 + g
    else:
        return counter + g, before


@gluon.jit
def _across(rows, step, column: gl.constexpr, LAYOUT: gl.constexpr):
    """[1, rows]: one of the four numbers of each row."""
    return ring.at(rows, step).slice(column, 1, dim=0).load(LAYOUT)


@gluon.jit
def _half(rows, step, column: gl.constexpr, half: gl.constexpr, LAYOUT: gl.constexpr):
    """`_across` of half of the rows."""
    tile = ring.at(rows, step)
    HALF: gl.constexpr = tile.shape[1] // 2
    return tile.slice(column, 1, dim=0).slice(half * HALF, HALF, dim=1).load(LAYOUT)


@gluon.jit
def _whole(early, late, LAYOUT: gl.constexpr):
    """Both halves of the rows, in the registers where they are."""
    both = gl.join(early, late).permute((0, 2, 1)).reshape([1, 2 * early.shape[1]])
    return gl.convert_layout(both, LAYOUT)


@gluon.jit
def _produce(shared, Q, K, V, GradOut, Rows, kv, first, band, GROUP: gl.constexpr):
    """The warp that copies."""
    GROUPS: gl.constexpr = shared.k.tiles.shape[0]
    KEYS: gl.constexpr = shared.k.tiles.shape[3]
    BLOCK_M: gl.constexpr = shared.q.tiles.shape[3]
    for g in gl.static_range(GROUPS):
        ring.reserve(shared.k, g, K.block_type.nbytes + V.block_type.nbytes)
        ring.copy(shared.k, shared.k.tiles, g, K, kv, first + g * KEYS)
        ring.copy(shared.k, shared.v, g, V, kv, first + g * KEYS)
    begin, full, full_end, end = _extent(band, first, GROUPS * KEYS, BLOCK_M)
    block, member = begin, begin * 0
    for step in range((end - begin) * GROUP):
        plane = span.query_head(kv, member, GROUP)
        ring.reserve(shared.q, step, Q.block_type.nbytes + GradOut.block_type.nbytes + Rows.block_type.nbytes)
        ring.copy(shared.q, shared.q.tiles, step, Q, plane, block * BLOCK_M)
        ring.copy(shared.q, shared.do, step, GradOut, plane, block * BLOCK_M)
        ring.copy(shared.q, shared.rows, step, Rows, plane, 0, block * BLOCK_M)
        block, member = _following(block, member, begin, end, GROUP)


@gluon.jit
def _give(g: gl.constexpr, shared, results, kv, first, band, GROUP: gl.constexpr):
    """A warp that adds to dq what a warpgroup has for it, and stores the gradients of its keys and values."""
    GROUPS: gl.constexpr = shared.k.tiles.shape[0]
    KEYS: gl.constexpr = shared.k.tiles.shape[3]
    BLOCK_M: gl.constexpr = shared.q.tiles.shape[3]
    begin, full, full_end, end = _extent(band, first, GROUPS * KEYS, BLOCK_M)
    block, member = begin, begin * 0
    column = 0 if shared.met is None else g * shared.dq.tiles.shape[4]
    for step in range((end - begin) * GROUP):
        plane = span.query_head(kv, member, GROUP)
        ring.wait(shared.dq, step * GROUPS + g)
        place = [plane.batch, plane.head, block * BLOCK_M, column]
        if results.Turns is not None:
            counter, turn = _turn(g, results, plane, block, first, band, shared.met is None, GROUPS * KEYS, BLOCK_M)
            turns.wait(counter, turn)
        async_add(results.Sums, place, shared.dq.tiles.index(g))
        store_wait(0)
        ring.release(shared.dq, step * GROUPS + g)
        if results.Turns is not None:
            turns.end(counter, turn)
        block, member = _following(block, member, begin, end, GROUP)
    mbarrier.wait(shared.out.index(g), 0)
    place = [kv.batch, kv.head, first + g * KEYS, 0]
    async_store(results.GradK, place, shared.k.tiles.index(g))
    async_store(results.GradV, place, shared.v.index(g))
    store_wait(0)


@gluon.jit
def _consume(g: gl.constexpr, shared, first, band, scale, GROUP: gl.constexpr):
    """A warpgroup: keys first + g * 64 .. first + g * 64 + 63."""
    GROUPS: gl.constexpr = shared.k.tiles.shape[0]
    KEYS: gl.constexpr = shared.k.tiles.shape[3]
    BLOCK_M: gl.constexpr = shared.q.tiles.shape[3]
    WIDTH: gl.constexpr = shared.k.tiles.shape[4]
    V_WIDTH: gl.constexpr = shared.v.shape[4]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_M, 16])
    HALF: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_M // 2, 16])
    K_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, WIDTH, 16])
    V_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, V_WIDTH, 16])
    PART: gl.constexpr = shared.dq.tiles.shape[4]
    Q_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, PART, 16])
    OF_DK: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=K_LAYOUT, k_width=2)
    OF_DV: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=V_LAYOUT, k_width=2)
    # Whether the next scores are multiplied under the end of a step, and half of its numbers are read before a product,
    # behind which they would wait. At D 128 that was 7 % faster on an H200, 4 % where causal; at D 64 6 % slower.
    AHEAD: gl.constexpr = shared.met is not None
    dtype: gl.constexpr = shared.q.tiles.dtype
    cols = first + g * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(1, S_LAYOUT))
    earliest = span.first_to_see(band, cols[:, None])
    zero = gl.zeros([KEYS, BLOCK_M], gl.float32, S_LAYOUT)
    no_dq = gl.zeros([BLOCK_M, PART], gl.float32, Q_LAYOUT)
    dk = gl.zeros([KEYS, WIDTH], gl.float32, K_LAYOUT)
    dv = gl.zeros([KEYS, V_WIDTH], gl.float32, V_LAYOUT)
    begin, full, full_end, end = _extent(band, first, GROUPS * KEYS, BLOCK_M)
    block, member = begin, begin * 0
    for other in gl.static_range(GROUPS):
        ring.wait(shared.k, other)
    steps = (end - begin) * GROUP
    s = zero
    if AHEAD:
        ring.wait(shared.q, 0, pred=steps > 0)
        first_q = ring.tile(shared.q, 0).permute((1, 0))
        s = warpgroup_mma(ring.tile(shared.k, g), first_q, zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(num_outstanding=0, deps=(s,))
    for step in range(steps):
        if not AHEAD:
            ring.wait(shared.q, step)
        none = (block < begin).to(gl.int32)  # 0: where parts of a tile lie whose number is known fills registers
        k, v = ring.tile(shared.k, g + none), ring.at(shared.v, g + none)
        q = ring.tile(shared.q, step)
        if AHEAD:
            early = softmax.Row(_half(shared.rows, step, 0, 0, HALF), _half(shared.rows, step, 1, 0, HALF))
        else:
            s = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
        do = ring.at(shared.do, step)
        dp = warpgroup_mma(v, do.permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(num_outstanding=1, deps=(s,))  # if they are there, exponentials still follow the product
        if AHEAD:
            late = softmax.Row(_half(shared.rows, step, 0, 1, HALF), _half(shared.rows, step, 1, 1, HALF))
            row = softmax.Row(
                _whole(early.pivot, late.pivot, S_LAYOUT), _whole(early.neg_log2_sum, late.neg_log2_sum, S_LAYOUT)
            )
        else:
            row = softmax.Row(_across(shared.rows, step, 0, S_LAYOUT), _across(shared.rows, step, 1, S_LAYOUT))
        p = softmax.weights(s, row, scale)
        if (block < full) | (block >= full_end):
            rows = _across(shared.rows, step, 3, S_LAYOUT).to(gl.int32, bitcast=True)
            seen = (rows - earliest).to(gl.uint32) <= (band.high - band.low).to(gl.uint32)  # an earlier one is huge
            p = gl.where(seen, p, 0.0)
        w = gl.convert_layout(p.to(dtype), OF_DV)
        if AHEAD:
            early_delta = _half(shared.rows, step, 2, 0, HALF)
        dv = warpgroup_mma(w, do, dv, is_async=True)
        dp = warpgroup_mma_wait(num_outstanding=1, deps=(dp,))
        if AHEAD:
            delta = _whole(early_delta, _half(shared.rows, step, 2, 1, HALF), S_LAYOUT)
        else:
            delta = _across(shared.rows, step, 2, S_LAYOUT)
        ds = (p * (dp - delta)).to(dtype)
        both = step % 2 * GROUPS
        shared.ds.index(both + g).store(ds)
        fence_async_shared()
        ds = gl.convert_layout(ds, OF_DK)
        dk = warpgroup_mma(ds, q, dk, is_async=True)
        if shared.met is None:
            dq = warpgroup_mma(shared.ds.index(both + g).permute((1, 0)), k, no_dq, use_acc=False, is_async=True)
        else:
            mbarrier.arrive(shared.met, count=1)
            mbarrier.wait(shared.met, step & 1)
            dq = no_dq
            for other in gl.static_range(GROUPS):
                of_rows = shared.ds.index(both + other).permute((1, 0))
                columns = ring.tile(shared.k, other + none).slice(g * PART, PART, dim=1)
                dq = warpgroup_mma(of_rows, columns, dq, use_acc=other > 0, is_async=True)
        if AHEAD:
            # Of the last block, what lies there, which nobody reads.
            ring.wait(shared.q, step + 1, pred=step + 1 < steps)
            next_q = ring.tile(shared.q, step + 1).permute((1, 0))
            dv, w = warpgroup_mma_wait(num_outstanding=1 + GROUPS, deps=(dv, w))  # to have the registers of w
            next_s = warpgroup_mma(k, next_q, zero, use_acc=False, is_async=True)
            dk, ds, dq = warpgroup_mma_wait(num_outstanding=1, deps=(dk, ds, dq))
        else:
            dv, w, dk, ds, dq = warpgroup_mma_wait(num_outstanding=0, deps=(dv, w, dk, ds, dq))
        ring.release(shared.q, step)
        ring.claim(shared.dq, step * GROUPS + g)
        ring.tile(shared.dq, step * GROUPS + g).store(dq)
        fence_async_shared()
        ring.publish(shared.dq, step * GROUPS + g)
        if AHEAD:
            s = warpgroup_mma_wait(num_outstanding=0, deps=(next_s,))
        block, member = _following(block, member, begin, end, GROUP)
    if shared.met is not None:  # until the other has read these keys
        mbarrier.arrive(shared.met, count=1)
        mbarrier.wait(shared.met, (end - begin) * GROUP & 1)
    ring.tile(shared.k, g).store((dk * scale).to(dtype))
    ring.at(shared.v, g).store(dv.to(dtype))
    fence_async_shared()
    mbarrier.arrive(shared.out.index(g), count=1)


@gluon.jit(do_not_specialize=["q_len", "k_len", "left", "right", "heads"])
def backward(
    Q, K, V, GradOut, Rows, Sums, GradK, GradV, Turns,
    q_len, k_len, left, right, scale, heads,
    GROUP: gl.constexpr, TOP_LEFT: gl.constexpr, STAGES: gl.constexpr,
    REGISTERS: gl.constexpr, COPYING_REGISTERS: gl.constexpr,
):  # fmt: skip
    """GradK (B, Hkv, Sk, D) and GradV (B, Hkv, Sk, Dv); what dq is, less its scale, is added to Sums.

    All are descriptors of (B, H, S, D) with blocks of [1, 1, rows, width(D)]; those of keys and values have the 64 of a
    warpgroup, those of Sums (B, Hq, Sq, D), in float32, no more than 64 columns. Rows is what `preprocess` wrote,
    (B, Hq, 4, Sq) in blocks of as many rows as Q. heads is Hkv.
    Turns, if not None, are zeros, int32, one and then two for each row of each query head; with them Sums has the same
    bits each time.
    """
    KEYS: gl.constexpr = K.block_type.shape[2]
    BLOCK_M: gl.constexpr = Q.block_type.shape[2]
    if Turns is None:
        block, kv = span.place(gl.program_id(0), k_len, heads, 2 * KEYS)
    else:
        block, kv = span.place(turns.number(Turns), k_len, heads, 2 * KEYS)
        block = gl.cdiv(k_len, 2 * KEYS) - 1 - block
    band = span.band(q_len, k_len, left, right, TOP_LEFT)
    k, q = ring.ring(K, 2, 1), ring.ring(Q, STAGES, 2)
    v = gl.allocate_shared_memory(V.dtype, [2] + V.block_type.shape, V.layout)
    do = gl.allocate_shared_memory(GradOut.dtype, [STAGES] + GradOut.block_type.shape, GradOut.layout)
    rows = gl.allocate_shared_memory(Rows.dtype, [STAGES] + Rows.block_type.shape, Rows.layout)
    SCORES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, BLOCK_M], Q.dtype)
    ds = gl.allocate_shared_memory(Q.dtype, [4, KEYS, BLOCK_M], SCORES)
    dq = ring.ring(Sums, 2, 1)
    out = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for g in gl.static_range(2):
        mbarrier.init(out.index(g), count=1)
    gl.static_assert(STAGES >= 2, "the next q is waited for before q is given back")
    met = None
    if Sums.block_type.shape[3] < K.block_type.shape[3]:
        met = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(met, count=2)
    fence_async_shared()
    shared, results = Shared(k, v, q, do, rows, ds, dq, met, out), Results(Sums, GradK, GradV, Turns)
    first = block * 2 * KEYS
    gl.warp_specialize(
        [
            (_consume, (0, shared, first, band, scale, GROUP)),
            (_consume, (1, shared, first, band, scale, GROUP)),
            (_produce, (shared, Q, K, V, GradOut, Rows, kv, first, band, GROUP)),
            (_give, (0, shared, results, kv, first, band, GROUP)),
            (_give, (1, shared, results, kv, first, band, GROUP)),
        ],
        [WARPS, 1, 1, 1],
        [REGISTERS, COPYING_REGISTERS, COPYING_REGISTERS, COPYING_REGISTERS],
    )
