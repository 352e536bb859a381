"""Forward attention: one program per block of rows of one head of one batch.

Source: FlashAttention-2, arXiv:2307.08691, algorithm 1.
"""

import triton
import triton.language as tl

from .vocabulary import columns, dropout as dropping, masks as masking, memory, saved_stats, scores, softmax, span, walk
from .vocabulary.attend import attend


@triton.jit
def _walk(
    out, state, q, k, v, rows, band, rules, plane, tile_list, begin, end,
    spec: tl.constexpr, BLOCK_N: tl.constexpr, CHECK: tl.constexpr,
):  # fmt: skip
    """Add key blocks [begin, end), or entries [begin, end) of a tile list, to the running softmax and output."""
    following = walk.first(tile_list, begin)
    for n in tl.range(begin, end):
        j, member, following = walk.step(tile_list, n, following)
        cols = j * BLOCK_N + tl.arange(0, BLOCK_N)
        exists = masking.real_keys(rules.masks, plane, cols, band.keys) if CHECK else None
        r, c = rows[:, None], cols[None, :]
        out, state = attend(
            out, state, q, k, v, j * BLOCK_N, cols, exists, r, c, band, rules, plane, plane, spec, CHECK
        )  # fmt: skip
    return out, state


@triton.jit(do_not_specialize=["heads", "q_len", "k_len", "left", "right"])
def forward(
    Q, K, V, Out, Lse, Stats,
    sequences, tile_lists, heads, q_len, k_len, left, right, rules,
    spec: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write Out (B, Hq, Sq, DV) and, unless None, Lse (B, Hq, Sq) and Stats (B, Hq, Sq, `saved_stats.columns`)."""
    # Q, K, V and Out are Views (pointer and strides). Lse and Stats are contiguous. tile_lists is None if only causal
    # and window hide pairs. For packed sequences B is 1, and q_len and k_len are totals.

    # ids
    block, plane, q_len, k_len = span.locate(sequences, q_len, k_len, heads, BLOCK_M, BY_KEYS=False)
    first = span.latest_first(block, q_len, BLOCK_M)
    rows = first + tl.arange(0, BLOCK_M)
    real = masking.real_rows(rules.masks, plane, rows, q_len)
    q = columns.load(memory.of_rows(Q, plane), rows, real, spec.D)
    kv = span.kv_head(plane, spec.GROUP)
    k, v = memory.of_keys(K, kv), memory.of_keys(V, kv)

    # what it sees
    band = span.band(q_len, k_len, left, right, spec.TOP_LEFT)
    ranges = span.blocks(band, first, BLOCK_M, BLOCK_N)
    # walk it
    wide: tl.constexpr = memory.wide(Q.base.dtype.element_ty)
    out = columns.zeros(BLOCK_M, spec.DV, wide)
    nothing = None if rules.score.sinks is None else scores.sink(rules.score, plane, wide)
    state = softmax.start(nothing, BLOCK_M, wide)
    # Loop 0 is for the masked blocks before `full`. Without a left bound there are none; leaving it out saves spills.
    FIRST: tl.constexpr = 1 if tile_lists is None and left is None else 0
    for n in tl.static_range(FIRST, 3 if tile_lists is None else 2):
        tile_list = None if tile_lists is None else walk.tile_list(tile_lists, plane, first // BLOCK_M, n)
        begin, end = walk.extent(ranges, tile_list, n)
        out, state = _walk(
            out, state, q, k, v, rows, band, rules, plane, tile_list, begin, end, spec, BLOCK_N, CHECK=n != 1
        )  # fmt: skip

    # store it
    out, lse, log2_sum = columns.finish(out, state, rules.score.softmax_scale)
    out = [dropping.scaled(rules.dropout, tile) for tile in out]
    if rules.masks.rows is not None:
        out = [tl.where(real[:, None], tile, 0.0) for tile in out]
        lse = tl.where(real, lse, scores.unseen(rules.score, plane, lse.dtype))
        log2_sum = tl.where(real, log2_sum, float("inf"))
    if Stats is not None:
        dtype: tl.constexpr = Out.base.dtype.element_ty
        stats = saved_stats.table(Stats, plane, q_len, dtype, spec.DV)
        saved_stats.store(stats, rows, q_len, state.row_max, log2_sum)
    if Lse is not None:
        memory.store_column(memory.table(Lse, plane, q_len, 1), rows, q_len, 0, lse)
    if Stats is not None:
        for n in tl.static_range(len(out)):
            saved_stats.store_tail(stats, rows, q_len, out[n], columns.indices(spec.DV, n), spec.DV, dtype)
    columns.store(memory.of_rows(Out, plane), rows, q_len, out, spec.DV)
