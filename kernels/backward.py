"""Gradients in two passes, dq per block of rows and dk, dv per block of keys; weights are recomputed.

Source: FlashAttention-2, arXiv:2307.08691, algorithm 2, as two kernels so that nothing is summed by atomics.
"""

import triton
import triton.language as tl

from . import blocks, dropout, gradient, row_sums, scores, softmax, span, tiles
from . import masks as hidden


@triton.jit(do_not_specialize=["q_len", "k_len"])
def prepare(
    Out,
    GradOut,
    GradLse,
    Weights,
    GradWeights,
    Stats,
    Rows,
    q_len,
    k_len,
    score,
    HEADS: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Rows (B, Hq, Sq, 4: shift, rest and unit of the softmax, delta), contiguous as Stats and GradLse (or None) are.

    A row that saw nothing has delta 0 whatever its incoming gradients hold. Weights and GradWeights are Views of
    (B, Hq, Sq, Sk), or None.
    """
    block, plane = span.place(tl.program_id(0), q_len, HEADS, BLOCK_M)
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    stats = tiles.table(Stats, plane, q_len, 2)
    rest = tiles.load_column(stats, rows, q_len, 1)
    row = softmax.row(tiles.load_column(stats, rows, q_len, 0), rest, score.unit)
    out = tiles.load(tiles.matrix(Out, plane), rows, rows < q_len, DV)
    grad_out = tiles.load(tiles.matrix(GradOut, plane), rows, rows < q_len, DV)
    # The diagonal of a product of matrices: summed as `dp` is, it cancels where one key has all the weight.
    products = tl.dot(out, grad_out.T, input_precision=PRECISION, out_dtype=rest.dtype)
    line = tl.arange(0, BLOCK_M)
    delta = tl.sum(tl.where(line[:, None] == line[None, :], products, 0.0), 1)
    if GradWeights is not None:
        p, dp = tiles.matrix(Weights, plane), tiles.matrix(GradWeights, plane)
        r = rows[:, None]
        for start in tl.range(0, k_len, 64):
            c = start + tl.arange(0, 64)[None, :]
            p_tile = tiles.load_pairs(p, r, c, q_len, k_len, CHECK=True).to(rest.dtype)
            dp_tile = tiles.load_pairs(dp, r, c, q_len, k_len, CHECK=True).to(rest.dtype)
            delta += tl.sum(tl.where(p_tile == 0, 0.0, p_tile * dp_tile), 1)  # what is hidden may come back as NaN
    if GradLse is not None:
        delta -= tiles.load_column(tiles.table(GradLse, plane, q_len, 1), rows, q_len, 0)
    delta = tl.where(rest == float("inf"), 0.0, delta)
    table = tiles.table(Rows, plane, q_len, 4)
    tiles.store_column(table, rows, q_len, 0, row.shift)
    tiles.store_column(table, rows, q_len, 1, row.rest)
    tiles.store_column(table, rows, q_len, 2, row.unit)
    tiles.store_column(table, rows, q_len, 3, delta)


@triton.jit
def _walk_keys(
    dq,
    sums,
    q,
    do,
    k,
    v,
    GradWeights,
    GradQ,
    GradBias,
    BiasSums,
    SlopeSums,
    SinkSums,
    row,
    rows,
    band,
    masks,
    plane,
    order,
    begin,
    end,
    score,
    noise,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    CHECK: tl.constexpr,
):
    """Add to dq and to the sums by row what key blocks [begin, end) give.

    What will not be stored, since GradQ or all of BiasSums, SlopeSums and SinkSums are None, stays as it is. GradBias,
    unless None, gets the gradient of the scores.
    """
    following = blocks.first(order, begin)
    for n in tl.range(begin, end):
        j, member, following = blocks.turn(order, n, following)
        cols = j * BLOCK_N + tl.arange(0, BLOCK_N)
        exists = hidden.real_keys(masks, plane, cols, band.keys) if CHECK else None
        r, c = rows[:, None], cols[None, :]
        k_tile, v_tile = tiles.load(k, cols, exists, D), tiles.load(v, cols, exists, DV)
        shown = hidden.shown(masks, band, plane, r, c, CHECK)
        bias = scores.bias(score, band, plane, r, c, CHECK)
        x = tl.dot(q, k_tile.T, input_precision=PRECISION, out_dtype=row.delta.dtype)
        known = gradient.down(row)
        p, steepness = gradient.weights(x, shown, bias, known, r, c, band, masks, plane, score, noise, CHECK)
        dp = tl.dot(do, v_tile.T, input_precision=PRECISION, out_dtype=row.delta.dtype)
        ds = gradient.of_scores(p, dp, known, r, c, band, masks, plane, noise, GradWeights)
        if GradBias is not None:
            tiles.store_pairs(tiles.matrix(GradBias, plane), r, c, band.rows, band.keys, ds)
        if BiasSums is not None or SlopeSums is not None or SinkSums is not None:
            sums = row_sums.add(sums, dropout.before(noise, p), ds, span.distance(band, r, c).to(ds.dtype))
        if GradQ is not None:
            ds = scores.through(score, steepness, ds).to(k_tile.dtype)
            dq = tl.dot(ds, k_tile, dq, input_precision=PRECISION, out_dtype=dq.dtype)
    return dq, sums


@triton.jit
def _walk_rows(
    dk,
    dv,
    k,
    v,
    Q,
    GradOut,
    GradWeights,
    GradK,
    GradV,
    BiasSums,
    Rows,
    cols,
    band,
    masks,
    kv,
    order,
    begin,
    end,
    score,
    noise,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PRECISION: tl.constexpr,
    CHECK: tl.constexpr,
    WALK: tl.constexpr,
):
    """Add to dk and dv what row blocks [begin, end) of GROUP query heads give. Tiles are [keys, rows].

    What will not be stored in GradK or GradV, since they are None, stays as it is. BiasSums (B, Hq, Sk, 3), unless
    None, gets the sums by key of the gradient of the scores, for each head in turn, in the column of this WALK.

    One flat loop: nested loops keep alive what they hoist, and spill over 1 KB at D = 128. It counts, for a division by
    a length is 50 instructions; and dv comes before dp, for x and dp alive at once spill as well.
    """
    following = blocks.first(order, begin)
    member, block = begin * 0, begin
    sums = tl.zeros(cols.shape, dk.dtype)
    for n in tl.range(0, (end - begin) * GROUP if order is None else end):
        if order is not None:
            block, member, following = blocks.turn(order, n, following)
        plane = span.member(kv, member, GROUP)
        rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
        exists = hidden.real_rows(masks, plane, rows, band.rows) if CHECK or masks.rows is not None else None
        r, c = rows[None, :], cols[:, None]
        q = tiles.load(tiles.matrix(Q, plane), rows, exists, D)
        do = tiles.load(tiles.matrix(GradOut, plane), rows, exists, DV)
        row = gradient.across(gradient.load(Rows, plane, rows, band.rows))
        shown = hidden.shown(masks, band, plane, r, c, CHECK)
        bias = scores.bias(score, band, plane, r, c, CHECK)
        x = tl.dot(k, q.T, input_precision=PRECISION, out_dtype=row.delta.dtype)
        p, steepness = gradient.weights(x, shown, bias, row, r, c, band, masks, plane, score, noise, CHECK)
        if GradV is not None:
            w = dropout.after(noise, p).to(do.dtype)
            dv = tl.dot(w, do, dv, input_precision=PRECISION, out_dtype=dv.dtype)
        dp = tl.dot(v, do.T, input_precision=PRECISION, out_dtype=row.delta.dtype)
        ds = gradient.of_scores(p, dp, row, r, c, band, masks, plane, noise, GradWeights)
        if BiasSums is not None:
            sums += tl.sum(ds, 1)
            if order is None:
                done = block + 1 == end
            else:
                done = (n + 1 == end) | ((following >> 32) != member)
            table = tiles.table(BiasSums, plane, band.keys, 3)
            tl.store(tiles.pointers(table, cols, cols * 0 + WALK), sums, mask=(cols < band.keys) & done)
            sums = tl.where(done, 0.0, sums)
        if GradK is not None:
            ds = scores.through(score, steepness, ds).to(q.dtype)
            dk = tl.dot(ds, q, dk, input_precision=PRECISION, out_dtype=dk.dtype)
        if order is None:
            block += 1
            if GROUP > 1:
                wrap = block == end
                member += wrap.to(tl.int32)
                block = tl.where(wrap, begin, block)
    return dk, dv


@triton.jit(do_not_specialize=["q_len", "k_len", "left", "right"])
def dq(
    Q,
    K,
    V,
    GradOut,
    GradLse,
    GradWeights,
    Rows,
    GradQ,
    GradBias,
    BiasSums,
    SlopeSums,
    SinkSums,
    masks,
    lists,
    noise,
    q_len,
    k_len,
    left,
    right,
    score,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TOP_LEFT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """GradQ (B, Hq, Sq, D), from GradOut and the Rows that `prepare` made; what else is walked row by row with it.

    Each of these may be None: GradQ; GradBias, a View of (B, Hq, Sq, Sk) that is 0 where nothing is seen; and sums by
    row, (B, Hq, Sq): BiasSums of the gradient of the scores, SlopeSums of that of the slope, SinkSums of the sink's.
    """
    block, plane = span.place(tl.program_id(0), q_len, HEADS, BLOCK_M)
    first = span.latest_first(block, q_len, BLOCK_M)
    rows = first + tl.arange(0, BLOCK_M)
    real = hidden.real_rows(masks, plane, rows, q_len)
    q = tiles.load(tiles.matrix(Q, plane), rows, real, D)
    do = tiles.load(tiles.matrix(GradOut, plane), rows, real, DV)
    row = gradient.load(Rows, plane, rows, q_len)
    kv = span.shared(plane, GROUP)
    k, v = tiles.matrix(K, kv), tiles.matrix(V, kv)

    band = span.band(q_len, k_len, left, right, TOP_LEFT)
    wide: tl.constexpr = tiles.wide(Q.base.dtype.element_ty)
    grad = tl.zeros([BLOCK_M, tiles.width(D)], wide)
    zero = tl.zeros([BLOCK_M], wide)
    sums = row_sums.Sums(zero, zero, zero, zero)
    ranges = span.blocks(band, first, BLOCK_M, BLOCK_N)
    for n in tl.static_range(3 if lists is None else 2):
        order = None if lists is None else blocks.order(lists, plane, first // BLOCK_M, n)
        begin, end = blocks.extent(ranges, order, n)
        grad, sums = _walk_keys(
            grad, sums, q, do, k, v, GradWeights, GradQ, GradBias, BiasSums, SlopeSums, SinkSums, row, rows, band,
            masks, plane, order, begin, end, score, noise, D, DV, BLOCK_N, PRECISION, CHECK=n != 1,
        )  # fmt: skip
    if GradQ is not None:
        tiles.store(tiles.matrix(GradQ, plane), rows, q_len, scores.grad(score, grad), D)
    if BiasSums is not None or SlopeSums is not None or SinkSums is not None:
        dlse = zero if GradLse is None else tiles.load_column(tiles.table(GradLse, plane, q_len, 1), rows, q_len, 0)
        sums, delta = row_sums.mend(sums, row.delta, dlse)
    if BiasSums is not None:
        tiles.store_column(tiles.table(BiasSums, plane, q_len, 1), rows, q_len, 0, sums.ds)
    if SlopeSums is not None:
        tiles.store_column(tiles.table(SlopeSums, plane, q_len, 1), rows, q_len, 0, -sums.ds_far)
    if SinkSums is not None:
        p = softmax.weights(scores.sink(score, plane, wide), row.softmax, score.unit)
        tiles.store_column(tiles.table(SinkSums, plane, q_len, 1), rows, q_len, 0, -p * delta)


@triton.jit(do_not_specialize=["q_len", "k_len", "left", "right"])
def dkdv(
    Q,
    K,
    V,
    GradOut,
    GradWeights,
    Rows,
    GradK,
    GradV,
    BiasSums,
    masks,
    lists,
    noise,
    q_len,
    k_len,
    left,
    right,
    score,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TOP_LEFT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """GradK (B, Hkv, Sk, D) and GradV (B, Hkv, Sk, DV): the sum over the query heads that share a kv head.

    Each may be None, as may BiasSums (B, Hq, Sk, 3), zeros before, whose columns add up to the sums by key of the
    gradient of the scores.
    """
    block, kv = span.place(tl.program_id(0), k_len, HEADS // GROUP, BLOCK_N)
    first = block * BLOCK_N
    cols = first + tl.arange(0, BLOCK_N)
    real = hidden.real_keys(masks, kv, cols, k_len)
    k = tiles.load(tiles.matrix(K, kv), cols, real, D)
    v = tiles.load(tiles.matrix(V, kv), cols, real, DV)
    wide: tl.constexpr = tiles.wide(Q.base.dtype.element_ty)
    dk = tl.zeros([BLOCK_N, tiles.width(D)], wide)
    dv = tl.zeros([BLOCK_N, tiles.width(DV)], wide)

    band = span.band(q_len, k_len, left, right, TOP_LEFT)
    ranges = span.blocks(span.flip(band), first, BLOCK_N, BLOCK_M)
    for n in tl.static_range(3 if lists is None else 2):
        order = None if lists is None else blocks.order(lists, kv, block, n)
        begin, end = blocks.extent(ranges, order, n)
        dk, dv = _walk_rows(
            dk, dv, k, v, Q, GradOut, GradWeights, GradK, GradV, BiasSums, Rows, cols, band, masks, kv,
            order, begin, end, score, noise, GROUP, D, DV, BLOCK_M, PRECISION, CHECK=n != 1, WALK=n,
        )  # fmt: skip
    if GradK is not None:
        tiles.store(tiles.matrix(GradK, kv), cols, k_len, scores.grad(score, dk), D)
    if GradV is not None:
        tiles.store(tiles.matrix(GradV, kv), cols, k_len, dv, DV)
