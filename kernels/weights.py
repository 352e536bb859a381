"""Kernel for attention weights or their tangents, from the forward's row statistics: one program per tile."""

import triton
import triton.language as tl

from .vocabulary import columns, dropout, masks, memory, saved_stats, scores, softmax, span


@triton.jit(do_not_specialize=["heads", "q_len", "k_len", "width", "left", "right"])
def weights(
    Q, K, Weights, Stats, TangentLse,
    tangents, sequences, heads, q_len, k_len, width, left, right, rules,
    spec: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write the weights after dropout, or with TangentLse their tangents, to Weights, a View of (B, Hq, Sq, width)."""
    # width is the number of keys, or of the longest packed sequence. Shorter sequences are padded with 0.
    across = tl.cdiv(width, BLOCK_N)
    tile = tl.program_id(0) % across
    block, plane, q_len, k_len = span.locate(sequences, q_len, k_len, heads, BLOCK_M, BY_KEYS=False, across=across)
    if sequences is not None:
        block = tl.maximum(block, 0)
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    r, c = rows[:, None], cols[None, :]
    band = span.band(q_len, k_len, left, right, spec.TOP_LEFT)
    begin, full, full_end, end = span.blocks(band, block * BLOCK_M, BLOCK_M, BLOCK_N)
    p = tl.zeros([BLOCK_M, BLOCK_N], memory.wide(Q.base.dtype.element_ty))
    if (tile >= begin) & (tile < end):
        real = masks.real_rows(rules.masks, plane, rows, q_len)
        exists = masks.real_keys(rules.masks, plane, cols, k_len)
        q = columns.load(memory.of_rows(Q, plane), rows, real, spec.D)
        t_q = None if tangents.q is None else columns.load(memory.of_rows(tangents.q, plane), rows, real, spec.D)
        kv = span.kv_head(plane, spec.GROUP)
        k = columns.load(memory.of_keys(K, kv), cols, exists, spec.D)
        t_k = None if tangents.k is None else columns.load(memory.of_keys(tangents.k, kv), cols, exists, spec.D)
        stats = saved_stats.table(Stats, plane, q_len, Q.base.dtype.element_ty, spec.DV)
        row = softmax.down(saved_stats.load(stats, rows, q_len))
        x = columns.dot(q, k, spec.D, spec, p.dtype)
        shown = masks.shown(rules.masks, band, plane, r, c, tile * BLOCK_N, CHECK=True)
        bias = scores.pairs(rules.score.bias, band, plane, r, c, CHECK=True)
        t_bias = scores.pairs(tangents.bias, band, plane, r, c, CHECK=True)
        s, dcap = scores.apply(rules.score, x, bias, band, plane, r, c)
        seen = masks.visible(rules.masks, shown, band, plane, r, c)
        if rules.masks.rows is not None:
            seen &= real[:, None]
        p = dropout.drop(rules.dropout, softmax.weights(s, row, rules.score.softmax_scale), plane, r, c)
        if TangentLse is not None:
            t_x = scores.tangent_of_products(q, t_q, k, t_k, x, spec)
            t_s = scores.tangent(rules.score, t_x, dcap, t_bias, tangents, band, plane, r, c)
            if tangents.bias is not None:
                t_s = tl.where(p > 0, t_s, 0.0)
            mean = memory.load_column(memory.table(TangentLse, plane, q_len, 1), rows, q_len, 0)
            p *= t_s - mean[:, None]
        p = tl.where(seen, p, 0.0)
    memory.store_pairs(memory.of_rows(Weights, plane), r, c, q_len, width, p)
