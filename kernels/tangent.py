"""Kernel for the forward-mode derivative of attention: a second pass over the tiles of the forward.

With tangents t_q, t_k, ... of the inputs, weights p and tangents of the scores t_s = scale (t_q k + q t_k) cap' +
t_bias - t_slope distance, the tangents of the results are t_lse = sum p t_s, t_p = p (t_s - t_lse) and t_out = sum t_p
v + p t_v = sum p (t_s v + t_v) - t_lse out. The last form needs t_lse only after the loop over keys.
Source: the derivative of softmax in FlashAttention-2, arXiv:2307.08691, section 2.2, in one direction.
"""

import triton
import triton.language as tl

from .vocabulary import columns, copies, dropout, masks, memory, row_sums, saved_stats, scores, softmax, span, walk


@triton.jit
def _walk(
    out, total, q, t_q, k, v, t_k, t_v, tangents, row, rows, band, rules, plane, tile_list, begin, end,
    spec: tl.constexpr, BLOCK_N: tl.constexpr, CHECK: tl.constexpr,
):  # fmt: skip
    """Add the contribution of key blocks [begin, end) to both sums: p (t_s v + t_v) to out, p t_s to total."""
    following = walk.first(tile_list, begin)
    for n in tl.range(begin, end):
        j, member, following = walk.step(tile_list, n, following)
        cols = j * BLOCK_N + tl.arange(0, BLOCK_N)
        exists = masks.real_keys(rules.masks, plane, cols, band.keys) if CHECK else None
        r, c = rows[:, None], cols[None, :]
        k_tile = columns.load(k, cols, exists, spec.D, LATER=True)
        t_k_tile = None if t_k is None else columns.load(t_k, cols, exists, spec.D, LATER=True)
        shown = masks.shown(rules.masks, band, plane, r, c, j * BLOCK_N, CHECK)
        bias = scores.pairs(rules.score.bias, band, plane, r, c, CHECK)
        t_bias = scores.pairs(tangents.bias, band, plane, r, c, CHECK)
        copies.fence()
        x = columns.dot(q, k_tile, spec.D, spec, total.dtype)
        s, dcap = scores.apply(rules.score, x, bias, band, plane, r, c)
        p = softmax.weights(s, row, rules.score.softmax_scale)
        t_x = scores.tangent_of_products(q, t_q, k_tile, t_k_tile, x, spec)
        t_s = scores.tangent(rules.score, t_x, dcap, t_bias, tangents, band, plane, r, c)
        if CHECK:
            seen = masks.visible(rules.masks, shown, band, plane, r, c)
            p, t_s = tl.where(seen, p, 0.0), tl.where(seen, t_s, 0.0)
        if tangents.bias is not None:  # the tangent of a bias of -inf may not be finite
            t_s = tl.where(p > 0, t_s, 0.0)
        total += row_sums.total(p * t_s)
        v_tile = columns.load(v, cols, exists, spec.DV, LATER=True)
        copies.fence_later(spec.BY_THREADS)
        p = dropout.drop(rules.dropout, p, plane, r, c)
        out = columns.add(out, memory.opaque(p * t_s), v_tile, spec.DV, spec)
        if t_v is not None:
            t_v_tile = columns.load(t_v, cols, exists, spec.DV, LATER=True)
            copies.fence_later(spec.BY_THREADS)
            out = columns.add(out, memory.opaque(p), t_v_tile, spec.DV, spec)
    return out, total


@triton.jit
def _less(tile, t_lse, Out, stats, rows, length, n: tl.constexpr, spec: tl.constexpr):
    """Return tile - t_lse * out for part n of the columns: the tangent of the output."""
    COLUMNS: tl.constexpr = columns.size(spec.DV, n)
    out = memory.load(columns.part(Out, n), rows, rows < length, COLUMNS, columns.width(spec.DV, n))
    if out.dtype.primitive_bitwidth == 16:
        errors = columns.part(saved_stats.errors(stats), n)
        tile -= t_lse[:, None] * saved_stats.lost(errors, rows, length, out, COLUMNS)
    return tile - t_lse[:, None] * out.to(tile.dtype)


@triton.jit(do_not_specialize=["heads", "q_len", "k_len", "left", "right"])
def tangent(
    Q, K, V, Out, Stats, TangentOut, TangentLse,
    tangents, sequences, tile_lists, heads, q_len, k_len, left, right, rules,
    spec: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write the tangents of output and lse: TangentOut, a View of (B, Hq, Sq, DV), and TangentLse unless None."""
    # ids
    block, plane, q_len, k_len = span.locate(sequences, q_len, k_len, heads, BLOCK_M, BY_KEYS=False)
    first = span.latest_first(block, q_len, BLOCK_M)
    rows = first + tl.arange(0, BLOCK_M)
    real = masks.real_rows(rules.masks, plane, rows, q_len)
    q = columns.load(memory.of_rows(Q, plane), rows, real, spec.D, LATER=True)
    t_q = (
        None if tangents.q is None else columns.load(memory.of_rows(tangents.q, plane), rows, real, spec.D, LATER=True)
    )
    dtype: tl.constexpr = Out.base.dtype.element_ty
    stats = saved_stats.table(Stats, plane, q_len, dtype, spec.DV)
    row = saved_stats.load(stats, rows, q_len)
    known = softmax.down(row)
    kv = span.kv_head(plane, spec.GROUP)
    k, v = memory.of_keys(K, kv), memory.of_keys(V, kv)
    t_k = None if tangents.k is None else memory.of_keys(tangents.k, kv)
    t_v = None if tangents.v is None else memory.of_keys(tangents.v, kv)

    # what it sees
    band = span.band(q_len, k_len, left, right, spec.TOP_LEFT)
    ranges = span.blocks(band, first, BLOCK_M, BLOCK_N)
    # walk it
    wide: tl.constexpr = memory.wide(dtype)
    t_out = columns.zeros(BLOCK_M, spec.DV, wide)
    t_lse = tl.zeros([BLOCK_M], wide)
    FIRST: tl.constexpr = 1 if tile_lists is None and left is None else 0
    for n in tl.static_range(FIRST, 3 if tile_lists is None else 2):
        tile_list = None if tile_lists is None else walk.tile_list(tile_lists, plane, first // BLOCK_M, n)
        begin, end = walk.extent(ranges, tile_list, n)
        t_out, t_lse = _walk(
            t_out, t_lse, q, t_q, k, v, t_k, t_v, tangents, known, rows, band, rules, plane, tile_list, begin, end,
            spec, BLOCK_N, CHECK=n != 1,
        )  # fmt: skip

    # store it
    if rules.masks.rows is not None:
        t_lse = tl.where(real, t_lse, 0.0)
    if tangents.sinks is not None:
        p = softmax.weights(scores.sink(rules.score, plane, wide), row, rules.score.softmax_scale)
        t_lse += p * memory.cast(memory.scalar(tangents.sinks, plane), wide)
    if TangentLse is not None:
        memory.store_column(memory.table(TangentLse, plane, q_len, 1), rows, q_len, 0, t_lse)
    for n in tl.static_range(len(t_out)):
        tile = _less(t_out[n], t_lse, memory.of_rows(Out, plane), stats, rows, q_len, n, spec)
        if rules.masks.rows is not None:
            tile = tl.where(real[:, None], tile, 0.0)
        m = columns.part(memory.of_rows(TangentOut, plane), n)
        memory.store(m, rows, rows < q_len, tile, columns.size(spec.DV, n))
