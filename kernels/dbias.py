"""Kernel for the gradient of a bias that heads or batches share: one program per tile of the bias, no atomics."""

import triton
import triton.language as tl

from .vocabulary import columns, copies, gradient, masks as masking, memory, scores, span, walk


@triton.jit(do_not_specialize="heads bias_heads q_len k_len max_seqlen_q max_seqlen_k left right batches".split())
def dbias(
    Q, K, V, incoming, GradBias,
    extents, block_mask, rules,
    heads, bias_heads, q_len, k_len, max_seqlen_q, max_seqlen_k, left, right, batches,
    spec: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Fill GradBias, a View of (B / batches, bias_heads, max_seqlen_q, max_seqlen_k); a program computes one tile."""
    # Sum over the heads that share the bias, and over `batches` batches. block_mask, a View with the batches and heads
    # of GradBias, marks blocks that are visible in any of the summed heads. extents is for packed sequences. Without it
    # the maximum lengths are q_len and k_len.
    if extents is None:
        max_seqlen_q, max_seqlen_k = q_len, k_len  # fewer variables: up to 58 registers less on sm_90 (Triton 3.7.1)
    block, tile, bias_plane = span.place_tile(max_seqlen_q, max_seqlen_k, bias_heads, BLOCK_M, BLOCK_N)
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    r, c = rows[:, None], cols[None, :]
    grad = tl.zeros([BLOCK_M, BLOCK_N], memory.wide(Q.base.dtype.element_ty))
    together = heads // bias_heads
    visible = tile >= 0
    if extents is None:
        band = span.band(q_len, k_len, left, right, spec.TOP_LEFT)
        begin, full, full_end, end = span.blocks(band, block * BLOCK_M, BLOCK_M, BLOCK_N)
        visible = (tile >= begin) & (tile < end)
    visible, every = walk.covered(
        block_mask, bias_plane, block, tile, max_seqlen_q, max_seqlen_k, visible, BLOCK_M, BLOCK_N
    )
    for n in tl.range(0, tl.where(visible, batches * together, 0)):
        batch, head = bias_plane.batch * batches + n // together, bias_plane.head + n % together
        plane = span.Plane(batch, head, batch * heads + head, ())
        plane, seq_rows, seq_keys = span.within(extents, plane, q_len, k_len, ())
        band = span.band(seq_rows, seq_keys, left, right, spec.TOP_LEFT)
        kv = span.kv_head(plane, spec.GROUP)
        real_rows = masking.real_rows(rules.masks, plane, rows, seq_rows)
        real_keys = masking.real_keys(rules.masks, plane, cols, seq_keys)
        q = columns.load(memory.of_rows(Q, plane), rows, real_rows, spec.D)
        do = columns.load(memory.of_rows(incoming.grad_out, plane), rows, real_rows, spec.DV)
        k = columns.load(memory.of_keys(K, kv), cols, real_keys, spec.D)
        v = columns.load(memory.of_keys(V, kv), cols, real_keys, spec.DV)
        row = gradient.down(gradient.load(incoming.rows, plane, rows, seq_rows))
        shown = masking.shown(rules.masks, band, plane, r, c, tile * BLOCK_N, CHECK=True)
        bias = scores.pairs(rules.score.bias, band, plane, r, c, CHECK=True)
        copies.fence()
        x = columns.dot(q, k, spec.D, spec, grad.dtype)
        p, dcap = gradient.weights(x, shown, bias, row, r, c, band, rules, plane, CHECK=True)
        dp = columns.dot(do, v, spec.DV, spec, grad.dtype)
        grad += gradient.of_scores(p, dp, row, r, c, band, rules, plane, incoming.grad_weights)
    memory.store_pairs(memory.matrix(GradBias, bias_plane), r, c, max_seqlen_q, max_seqlen_k, grad)
