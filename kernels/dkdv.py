"""Kernel for the gradients of keys and values: one program per block of keys; softmax weights are recomputed.

Source: FlashAttention-2, arXiv:2307.08691, algorithm 2.
"""

import triton
import triton.language as tl

from .vocabulary import columns, copies, dropout, gradient, masks as masking, memory, row_sums, scores, span, walk


@triton.jit
def _walk_rows(
    dk, dv, k, v,
    Q, incoming, GradQ, grads,
    cols, first_key, band, rules, kv, tile_list, begin, end,
    spec: tl.constexpr, BLOCK_M: tl.constexpr, CHECK: tl.constexpr, WALK: tl.constexpr,
):  # fmt: skip
    """Add the contribution of row blocks [begin, end) of GROUP query heads to dk and dv. Tiles are [keys, rows].

    If grads.k or grads.v is None, dk or dv stays as it is. GradQ, unless None, accumulates dq. grads.bias, unless None,
    gets the gradient of the scores. Column WALK of grads.key_sums (B, Hq, Sk, 3), unless None, gets its sum over rows.
    """
    # The loop over heads and blocks is flat: nested loops keep hoisted values alive, and spill over 1 KB at D = 128.
    # Counters replace a division, which takes 50 instructions. dv comes before dp, because x and dp together spill.
    following = walk.first(tile_list, begin)
    member, block = begin * 0, begin
    sums = tl.zeros(cols.shape, dk[0].dtype)
    for n in tl.range(0, (end - begin) * spec.GROUP if tile_list is None else end):
        if tile_list is not None:
            block, member, following = walk.step(tile_list, n, following)
        plane = span.query_head(kv, member, spec.GROUP)
        first = block * BLOCK_M
        rows = first + tl.arange(0, BLOCK_M)
        exists = (
            masking.real_rows(rules.masks, plane, rows, band.rows) if CHECK or rules.masks.rows is not None else None
        )
        r, c = rows[None, :], cols[:, None]
        q = columns.load(memory.of_rows(Q, plane), rows, exists, spec.D)
        do = columns.load(memory.of_rows(incoming.grad_out, plane), rows, exists, spec.DV)
        row = gradient.across(gradient.load(incoming.rows, plane, rows, band.rows))
        shown = masking.shown(rules.masks, band, plane, r, c, first_key, CHECK)
        bias = scores.pairs(rules.score.bias, band, plane, r, c, CHECK)
        copies.fence()
        x = columns.dot(k, q, spec.D, spec, row.delta.dtype)
        p, dcap = gradient.weights(x, shown, bias, row, r, c, band, rules, plane, CHECK)
        if grads.v is not None:
            dv = columns.add(dv, dropout.after(rules.dropout, p), do, spec.DV, spec)
        dp = columns.dot(v, do, spec.DV, spec, row.delta.dtype)
        ds = gradient.of_scores(p, dp, row, r, c, band, rules, plane, incoming.grad_weights)
        if grads.key_sums is not None:
            sums += row_sums.total(ds)
            # A call with a bias has tile lists. Load the entry again: a value that both prefetches and stores use
            # cannot be pipelined.
            done = (n + 1 == end) | ((tl.load(tile_list + n + 1, volatile=True) >> 32) != member)
            table = memory.table(grads.key_sums, plane, band.keys, 3, BY_KEYS=True)
            tl.store(memory.pointers(table, cols, cols * 0 + WALK), sums, mask=cols < band.keys * done)
            sums = tl.where(done, 0.0, sums)
        if grads.bias is not None:
            memory.store_pairs(memory.matrix(grads.bias, plane), r, c, band.rows, band.keys, ds)
        if grads.k is not None or GradQ is not None:
            ds = scores.apply_dcap(rules.score, dcap, ds)
        if GradQ is not None:
            ds = ds.to(k.tiles[0].dtype)
        if grads.k is not None:
            dk = columns.add(dk, ds, q, spec.D, spec)
        if GradQ is not None:
            dq = tl.dot(ds.T, k.tiles[0], input_precision=spec.PRECISION, out_dtype=dk[0].dtype)
            memory.add(GradQ, plane, rows, first, band.rows, dq, spec.D)
        if tile_list is None:
            block += 1
            if spec.GROUP > 1:
                wrap = block == end
                member += wrap.to(tl.int32)
                block = tl.where(wrap, begin, block)
    return dk, dv


@triton.jit(do_not_specialize=["heads", "q_len", "k_len", "left", "right"])
def dkdv(
    Q, K, V, GradOut, GradWeights, Rows, GradQ,
    grads, sequences, tile_lists, heads, q_len, k_len, left, right, rules,
    spec: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write grads.k (B, Hkv, Sk, D) and grads.v (B, Hkv, Sk, DV), summed over the query heads of a kv head."""
    # GradQ, unless None, is a float32 View or TMA descriptor of (B, Hq, Sq, D), and accumulates dq, not yet scaled.
    # Then the backward takes one pass, with five products a tile instead of seven. grads.bias, a View of
    # (B, Hq, Sq, Sk), and grads.key_sums (B, Hq, Sk, 3) hold zeros at first. The three columns of key_sums add up to
    # the gradient of the scores, summed over rows.

    # ids
    block, kv, q_len, k_len = span.locate(sequences, q_len, k_len, heads // spec.GROUP, BLOCK_N, BY_KEYS=True)
    first = block * BLOCK_N
    cols = first + tl.arange(0, BLOCK_N)
    real = masking.real_keys(rules.masks, kv, cols, k_len)
    k = columns.load(memory.of_keys(K, kv), cols, real, spec.D)
    v = columns.load(memory.of_keys(V, kv), cols, real, spec.DV)
    wide: tl.constexpr = memory.wide(K.base.dtype.element_ty)
    dk = columns.zeros(BLOCK_N, spec.D, wide)
    dv = columns.zeros(BLOCK_N, spec.DV, wide)

    # what it sees
    band = span.band(q_len, k_len, left, right, spec.TOP_LEFT)
    ranges = span.blocks(span.flip(band), first, BLOCK_N, BLOCK_M)
    if GradQ is not None:
        ranges = span.masked_past(ranges, first + BLOCK_N, k_len)
    # walk it
    incoming = gradient.Incoming(GradOut, GradWeights, Rows)
    # Loop 0 is for the masked blocks before `full`. Without a right bound there are none; leaving it out saves spills.
    FIRST: tl.constexpr = 1 if tile_lists is None and right is None else 0
    for n in tl.static_range(FIRST, 3 if tile_lists is None else 2):
        tile_list = None if tile_lists is None else walk.tile_list(tile_lists, kv, block, n)
        begin, end = walk.extent(ranges, tile_list, n)
        dk, dv = _walk_rows(
            dk, dv, k, v, Q, incoming, GradQ, grads, cols, first, band, rules, kv, tile_list, begin, end,
            spec, BLOCK_M, CHECK=n != 1, WALK=n,
        )  # fmt: skip
    # store it
    if grads.k is not None:
        m = memory.of_keys(grads.k, kv)
        columns.store(m, cols, k_len, [scores.grad(rules.score, tile) for tile in dk], spec.D)
    if grads.v is not None:
        columns.store(memory.of_keys(grads.v, kv), cols, k_len, dv, spec.DV)
