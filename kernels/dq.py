"""Kernel for the gradient of the queries: one program per block of rows; softmax weights are recomputed.

Source: FlashAttention-2, arXiv:2307.08691, algorithm 2, by blocks of rows, so that dq needs no atomics.
"""

import triton
import triton.language as tl

from .vocabulary import columns, copies, dropout, gradient, masks as masking, memory, row_sums, scores, span, walk


@triton.jit
def _walk_keys(
    dq, sums, q, do, k, v,
    GradWeights, GradQ,
    grads, row, rows, band, rules, plane, tile_list, begin, end,
    spec: tl.constexpr, BLOCK_N: tl.constexpr, CHECK: tl.constexpr,
):  # fmt: skip
    """Add key blocks [begin, end) to dq, and to the row sums `sums` of weights and score gradients."""
    # dq does not change if GradQ is None. The sums do not change if no gradient by row is wanted.
    following = walk.first(tile_list, begin)
    for n in tl.range(begin, end):
        j, member, following = walk.step(tile_list, n, following)
        cols = j * BLOCK_N + tl.arange(0, BLOCK_N)
        exists = masking.real_keys(rules.masks, plane, cols, band.keys) if CHECK else None
        r, c = rows[:, None], cols[None, :]
        first = j * BLOCK_N
        k_tile, v_tile = columns.load(k, cols, exists, spec.D), columns.load(v, cols, exists, spec.DV)
        shown = masking.shown(rules.masks, band, plane, r, c, first, CHECK)
        bias = scores.pairs(rules.score.bias, band, plane, r, c, CHECK)
        copies.fence()
        x = columns.dot(q, k_tile, spec.D, spec, row.delta.dtype)
        known = gradient.down(row)
        p, dcap = gradient.weights(x, shown, bias, known, r, c, band, rules, plane, CHECK)
        dp = columns.dot(do, v_tile, spec.DV, spec, row.delta.dtype)
        ds = gradient.of_scores(p, dp, known, r, c, band, rules, plane, GradWeights)
        if grads.bias is not None:
            memory.store_pairs(memory.matrix(grads.bias, plane), r, c, band.rows, band.keys, ds)
        if row_sums.wanted(grads.rows):
            sums = row_sums.add(
                sums, dropout.before(rules.dropout, p), ds, scores.distance(rules.score, band, r, c).to(ds.dtype)
            )
        if GradQ is not None:
            ds = scores.apply_dcap(rules.score, dcap, ds)
            dq = columns.add(dq, ds, k_tile, spec.D, spec)
    return dq, sums


@triton.jit(do_not_specialize=["heads", "q_len", "k_len", "left", "right"])
def dq(
    Q, K, V, GradOut, GradWeights, Rows, GradQ,
    grads, sequences, tile_lists, heads, q_len, k_len, left, right, rules,
    spec: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write GradQ (B, Hq, Sq, D), unless None, and grads.rows, the gradients that have one number per row."""
    # Rows has the statistics of `preprocess`. grads.bias, unless None, is a View of (B, Hq, Sq, Sk), first all zeros.

    # ids
    block, plane, q_len, k_len = span.locate(sequences, q_len, k_len, heads, BLOCK_M, BY_KEYS=False)
    first = span.latest_first(block, q_len, BLOCK_M)
    rows = first + tl.arange(0, BLOCK_M)
    real = masking.real_rows(rules.masks, plane, rows, q_len)
    q = columns.load(memory.of_rows(Q, plane), rows, real, spec.D)
    do = columns.load(memory.of_rows(GradOut, plane), rows, real, spec.DV)
    row = gradient.load(Rows, plane, rows, q_len)
    kv = span.kv_head(plane, spec.GROUP)
    k, v = memory.of_keys(K, kv), memory.of_keys(V, kv)

    # what it sees
    band = span.band(q_len, k_len, left, right, spec.TOP_LEFT)
    ranges = span.blocks(band, first, BLOCK_M, BLOCK_N)
    # walk it
    wide: tl.constexpr = memory.wide(Q.base.dtype.element_ty)
    grad = columns.zeros(BLOCK_M, spec.D, wide)
    zero = tl.zeros([BLOCK_M], wide)
    sums = row_sums.Sums(zero, zero, zero, zero)
    # Loop 0 is for the masked blocks before `full`. Without a left bound there are none; leaving it out saves spills.
    FIRST: tl.constexpr = 1 if tile_lists is None and left is None else 0
    for n in tl.static_range(FIRST, 3 if tile_lists is None else 2):
        tile_list = None if tile_lists is None else walk.tile_list(tile_lists, plane, first // BLOCK_M, n)
        begin, end = walk.extent(ranges, tile_list, n)
        grad, sums = _walk_keys(
            grad, sums, q, do, k, v, GradWeights, GradQ, grads, row, rows, band, rules, plane, tile_list, begin, end,
            spec, BLOCK_N, CHECK=n != 1,
        )  # fmt: skip
    # store it
    if GradQ is not None:
        m = memory.of_rows(GradQ, plane)
        columns.store(m, rows, q_len, [scores.grad(rules.score, tile) for tile in grad], spec.D)
    if row_sums.wanted(grads.rows):
        row_sums.store(grads.rows, sums, row, rules.score, plane, rows, q_len, grads.partial is not None)
