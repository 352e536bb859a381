"""Backward attention for Hopper with heads wider than 256: the weights and the gradients of scores go through memory.

The dv of 64 keys and 512 columns would fill all registers of a warpgroup. So this kernel computes only the weights, p,
and the gradients of scores, ds. It stores both transposed, in 16 bits, for some heads at a time. `grad_product` then
multiplies p by grad_out for dv, and ds by queries for dk and by keys for dq. Nothing is added in memory, so gradients
are deterministic.
Source: FlashAttention-2, arXiv:2307.08691, algorithm 2, with its loop divided among kernels.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.language.nvidia.hopper.tma import store_wait

from ..vocabulary import masks as masking, scores, span
from . import body, layouts, notes as noting, ring, schedule, visits
from .copies import async_store, fence_async_shared
from .layouts import WARPS

SLOTS = gl.constexpr(4)  # chunks of operands in shared memory


class Shared(NamedTuple):
    """Shared memory: chunks (64 columns) of both operands of a product, other inputs of a step, and its results.

    keys: a ring of chunks of k, then of v. rows: chunks of q, then of do; keys' barriers guard both. statistics: a ring
    of row statistics. notes, unless None, are written before the first chunk of a step. p and ds: a tile [keys, rows]
    for each warpgroup.
    """

    keys: ring.Ring
    rows: gl.shared_memory_descriptor
    statistics: ring.Ring
    notes: noting.Notes
    p: gl.shared_memory_descriptor
    ds: gl.shared_memory_descriptor


@gluon.jit
def _load(shared, Keys, Rows, step, kv, plane, key, row, COUNT: gl.constexpr):
    """Load by TMA COUNT chunks of both operands of a product. `step`: the first chunk's step in the ring."""
    for c in gl.static_range(COUNT):
        column = c * Keys.block_type.shape[-1]
        ring.reserve(shared.keys, step + c, Keys.block_type.nbytes + Rows.block_type.nbytes)
        ring.copy(shared.keys, shared.keys.tiles, step + c, Keys, kv, key, column)
        ring.copy(shared.keys, shared.rows, step + c, Rows, plane, row, column)


@gluon.jit
def _produce(shared, Q, K, V, GradOut, Rows, program, GROUP: gl.constexpr, COUNT: gl.constexpr, COUNT_V: gl.constexpr):
    """Load by TMA all chunks that the warpgroups multiply: the work of one warp."""
    kv, first, band, lists = program
    BLOCK_M: gl.constexpr = Q.block_type.shape[-2]
    TILE: gl.constexpr = K.block_type.shape[-2]
    begin, end = visits.row_blocks(first, band, BLOCK_M, TILE)
    block, member, ahead = begin, begin * 0, visits.entry(lists, 0)
    of_keys = ring.of_keys(kv, band)
    for step in range(visits.steps(begin, end, lists, GROUP, TILE // BLOCK_M)):
        chunk = step * (COUNT + COUNT_V)
        block, member, ahead = visits.listed(lists, step, block, member, ahead, TILE // BLOCK_M)
        if shared.notes is not None:
            masked = step < lists.masked * (TILE // BLOCK_M)
            noting.write(shared.notes, shared.keys, chunk, step, block, masked, member)
        plane = ring.of_rows(span.query_head(kv, member, GROUP), band)
        if Rows.block_type.shape[-1] == 4:
            ring.fill(shared.statistics, step, Rows, plane, block * BLOCK_M)
        else:
            ring.fill(shared.statistics, step, Rows, plane, 0, block * BLOCK_M)
        _load(shared, K, Q, chunk, of_keys, plane, first, block * BLOCK_M, COUNT)
        _load(shared, V, GradOut, chunk + COUNT, of_keys, plane, first, block * BLOCK_M, COUNT_V)
        block, member = visits.following(block, member, begin, end, GROUP)


@gluon.jit
def _multiply(g: gl.constexpr, shared, chunk, x, BEGIN: gl.constexpr, END: gl.constexpr):
    """Add to x the products of chunks BEGIN .. END - 1, counted from chunk `chunk` of the ring; leave one in flight.

    x is [keys, rows]. With BEGIN 0 it is overwritten. Chunks are released once they have been read, except the last.
    """
    for c in gl.static_range(BEGIN, END):
        ring.wait(shared.keys, chunk + c)
        keys, rows = body.half(ring.tile(shared.keys, chunk + c), g, 0), ring.at(shared.rows, chunk + c)
        x = warpgroup_mma(keys, rows.permute((1, 0)), x, use_acc=c > 0, is_async=True)
        if c > 0:
            x = warpgroup_mma_wait(num_outstanding=1, deps=(x,))
            ring.release(shared.keys, chunk + c - 1)
    return x


@gluon.jit
def _words(bits, plane, row, key, band, ROWS: gl.constexpr):
    """Return pointers to the mask words of 64 keys (from `transpose_words`), one for each 64 of ROWS rows."""
    words = ()
    for n in gl.static_range(ROWS // masking.BLOCK):
        number = masking.number(bits, plane, row + n * masking.BLOCK, key, band)
        words += (bits.words + number.to(gl.int64) * masking.BLOCK,)
    return words


@gluon.jit
def _consume(
    g: gl.constexpr, shared, Weights, GradScores, program, before, rules,
    GROUP: gl.constexpr, COUNT: gl.constexpr, COUNT_V: gl.constexpr,
):  # fmt: skip
    """Compute and store p and ds of keys first + g * 64 .. first + g * 64 + 63: the work of one warpgroup."""
    KEYS: gl.constexpr = GradScores.block_type.shape[-2]
    BLOCK_M: gl.constexpr = GradScores.block_type.shape[-1]
    dtype: gl.constexpr = shared.rows.dtype
    kv, first, band, lists = program
    zero = layouts.zeros(KEYS, BLOCK_M)
    keys = body.keys_of(g, program, (), rules, zero, BLOCK_M)
    begin, end = visits.row_blocks(first, band, BLOCK_M, 2 * KEYS)
    block, member = begin, begin * 0
    steps = visits.steps(begin, end, lists, GROUP, 2 * KEYS // BLOCK_M)
    EARLY: gl.constexpr = 1 if rules.score.bias is None else 0  # chunks of dp before p: a bias takes their registers
    key = visits.first_key(kv, 2 * KEYS) + first + g * KEYS
    for step in range(steps):
        chunk = step * (COUNT + COUNT_V)
        s = _multiply(g, shared, chunk, zero, 0, COUNT)
        dp = _multiply(g, shared, chunk + COUNT, zero, 0, EARLY)  # in flight during the exponentials
        s = warpgroup_mma_wait(num_outstanding=EARLY, deps=(s,))
        ring.release(shared.keys, chunk + COUNT - 1)
        if shared.notes is not None:
            block, member, keys = body.noted(shared.notes, step, steps, keys)
        ring.wait(shared.statistics, step)
        head, table = span.query_head(kv, member, GROUP), shared.statistics.tiles
        slope, bias, words = body.slope_of(rules.score, kv, member, GROUP), 0.0, None
        if rules.masks.bits is not None:
            words = _words(rules.masks.bits, head, block * BLOCK_M, first + g * KEYS, band, BLOCK_M)
        if rules.score.bias is not None:
            r = body.rows_from(s, block * BLOCK_M)
            bias = scores.pairs(rules.score.bias, band, head, r, keys.cols[:, None], True)
        p = body.powers(s, bias, table, step, block, keys, rules, slope, dtype)
        p = body.drop_and_hide(p, words, block, keys, rules, head)
        dp = _multiply(g, shared, chunk + COUNT, dp, EARLY, COUNT_V)
        dp = warpgroup_mma_wait(num_outstanding=0, deps=(dp,))
        ring.release(shared.keys, chunk + COUNT + COUNT_V - 1)
        ds = body.of_products(p, rules.dropout, dp, table, step, dtype)
        store_wait(0)  # of the step before
        shared.p.index(g).reshape([KEYS, BLOCK_M]).store(body.dropped(p, rules.dropout, dtype))
        shared.ds.index(g).reshape([KEYS, BLOCK_M]).store(ds.to(dtype))
        ring.release(shared.statistics, step)
        fence_async_shared()
        here = [visits.head(head, before * GROUP), 0, key, block * BLOCK_M]
        async_store(Weights, here, shared.p.index(g))
        async_store(GradScores, here, shared.ds.index(g))
        block, member = visits.following(block, member, begin, end, GROUP)
    store_wait(0)


@gluon.jit(do_not_specialize=["q_len", "k_len", "left", "right", "heads", "planes", "section", "before"])
def wide_backward(
    Q, K, V, GradOut, Rows, Weights, GradScores,
    sequences, tile_lists, q_len, k_len, left, right, rules, heads, planes, section, before,
    form: gl.constexpr,
):  # fmt: skip
    """Write Weights and GradScores (query heads, 1, Sk, Sq) of kv planes before .. before + planes - 1.

    Arguments are as in `stored.stored_backward`. Blocks of Q and GradOut have 128 rows and 64 columns. Those of K and V
    have 128 keys and 64 columns, those of Weights and GradScores 64 keys and 128 rows.
    """
    TILE: gl.constexpr = K.block_type.shape[-2]
    WIDTH: gl.constexpr = K.block_type.shape[-1]
    GROUP: gl.constexpr = form.GROUP
    COUNT: gl.constexpr = (form.D + WIDTH - 1) // WIDTH
    COUNT_V: gl.constexpr = (form.DV + WIDTH - 1) // WIDTH
    order = schedule.Schedule(gl.cdiv(k_len, TILE), planes, section, 0)
    band = span.band(q_len, k_len, left, right, form.TOP_LEFT)
    work = visits.Work(order, before, heads, band, sequences, tile_lists, left, right)
    program = visits.program(work, TILE, form.TOP_LEFT)
    notes = None if tile_lists is None else noting.notes(1, 1)
    keys = ring.ring(K, SLOTS, 2)
    rows = gl.allocate_shared_memory(Q.dtype, [SLOTS] + Q.block_type.shape, Q.layout)
    p = gl.allocate_shared_memory(Weights.dtype, [2] + Weights.block_type.shape, Weights.layout)
    ds = gl.allocate_shared_memory(GradScores.dtype, [2] + GradScores.block_type.shape, GradScores.layout)
    shared = Shared(keys, rows, ring.ring(Rows, 2, 2), notes, p, ds)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (0, shared, Weights, GradScores, program, before, rules, GROUP, COUNT, COUNT_V)),
            (_consume, (1, shared, Weights, GradScores, program, before, rules, GROUP, COUNT, COUNT_V)),
            (_produce, (shared, Q, K, V, GradOut, Rows, program, GROUP, COUNT, COUNT_V)),
        ],
        [WARPS, 1],
        [form.REGISTERS[0], form.REGISTERS[1]],
    )
