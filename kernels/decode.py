"""Kernel for attention of few queries to a cache: one program per kv head, block of rows, and split of the keys.

A row is a pair of a query and a query head that reads the kv head; rows of one query are adjacent.
Source: Flash-Decoding, pytorch.org/blog/flash-decoding; PagedAttention, arXiv:2309.06180.
"""

import triton
import triton.language as tl

from .vocabulary import masks, memory, pages as paging, partials as splitting, rotary as turning, scores, softmax, span
from .vocabulary.attend import attend
from .vocabulary.columns import finish, indices, store, zeros


@triton.constexpr_function
def spanned(BLOCK, GROUP):
    """Return the maximum number of queries, of GROUP adjacent rows each, that a block of BLOCK rows spans."""
    if BLOCK % GROUP == 0:
        return BLOCK // GROUP
    return 1 if GROUP % BLOCK == 0 else (BLOCK + GROUP - 2) // GROUP + 1


@triton.jit
def _walk(
    out, state, q, cache, rows, band, rules, kv, plane, begin, end, capacity, pages,
    spec: tl.constexpr, BLOCK_N: tl.constexpr, CHECK: tl.constexpr,
):  # fmt: skip
    page = paging.of_block(cache, kv, begin, capacity, spec.PAGE, BLOCK_N)
    for j in tl.range(begin, end):
        cols = j * BLOCK_N + tl.arange(0, BLOCK_N)
        exists = masks.real_keys(rules.masks, kv, cols, band.keys) if CHECK else None
        r, c = rows[:, None], cols[None, :]
        k_rows = paging.rows_of_block(j, spec.PAGE, BLOCK_N)
        k = paging.matrix(cache.K, kv, page, pages)
        v = None if cache.V is None else paging.matrix(cache.V, kv, page, pages)
        page = paging.of_block(cache, kv, j + 1, capacity, spec.PAGE, BLOCK_N)
        out, state = attend(out, state, q, k, v, 0, k_rows, exists, r, c, band, rules, plane, kv, spec, CHECK)
    return out, state


@triton.jit(do_not_specialize=["heads", "q_len", "capacity", "added", "pages", "positions", "splits", "left", "right"])
def decode(
    Q, Out, Lse,
    partials, cache, rotary, rules, heads, q_len, capacity, added, pages, positions, splits, left, right,
    spec: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write Partials for each split. If partials is None, write Out, a View of (B, Hq, Sq, DV), and Lse unless None."""
    # ids
    split = tl.program_id(0) % splits
    block, kv = span.place(tl.program_id(0) // splits, q_len * spec.GROUP, heads, BLOCK_M)
    first = span.latest_first(block, q_len * spec.GROUP, BLOCK_M)
    folded = first + tl.arange(0, BLOCK_M)
    rows, member = folded // spec.GROUP, folded % spec.GROUP
    head, plane = span.query_head(kv, member, spec.GROUP), span.query_head(kv, member[:, None], spec.GROUP)

    # what it sees
    before = paging.length(cache, kv, capacity)  # without the `added` keys that `append` wrote
    band = span.band(q_len, before + tl.minimum(added, capacity - before), left, right, spec.TOP_LEFT)
    real = masks.real_rows(rules.masks, kv, rows, q_len)
    q = turning.load(memory.matrix(Q, plane), rows, real, rotary, rows + band.diagonal, positions, spec)

    ranges = span.blocks(band, first // spec.GROUP, spanned(BLOCK_M, spec.GROUP), BLOCK_N)
    # Each split gets an equal part of the key blocks that the rows see.
    each = ranges[3] - ranges[0]
    start, stop = ranges[0] + split * each // splits, ranges[0] + (split + 1) * each // splits
    # walk it
    wide: tl.constexpr = memory.wide(Q.base.dtype.element_ty)
    out = zeros(BLOCK_M, spec.DV, wide)
    nothing = None  # only the first split sees the sink
    if rules.score.sinks is not None:
        nothing = tl.where(split == 0, scores.sink(rules.score, head, wide), float("-inf"))
    state = softmax.start(nothing, BLOCK_M, wide)
    MASKED: tl.constexpr = rules.masks.pairs is not None or rules.masks.keys is not None
    for n in tl.static_range(1 if MASKED else 3):
        # Masks may hide pairs of any block, so one loop masks all blocks. Without a left bound loop 0 has no blocks.
        if MASKED or n > 0 or left is not None:
            begin = start if MASKED else tl.maximum(ranges[n], start)
            end = stop if MASKED else tl.minimum(ranges[n + 1], stop)
            out, state = _walk(
                out, state, q, cache, rows, band, rules, kv, plane, begin, end, capacity, pages,
                spec, BLOCK_N, CHECK=n != 1,
            )  # fmt: skip

    # store it
    if rules.masks.rows is not None:
        unseen = softmax.start(nothing, BLOCK_M, wide)
        out = [tl.where(real[:, None], tile, 0.0) for tile in out]
        state = softmax.State(
            tl.where(real, state.row_max, unseen.row_max), tl.where(real, state.row_sum, unseen.row_sum)
        )
    if partials is not None:
        some = (start < stop) | (split == 0)
        for n in tl.static_range(len(out)):
            c = indices(spec.DV, n)
            splitting.keep(partials, head, rows, c, q_len, split, splits, out[n], state, some, spec.DV)
    else:
        out, lse, log2_sum = finish(out, state, rules.score.softmax_scale)
        store(memory.matrix(Out, plane), rows, q_len, out, spec.DV)
        if Lse is not None:
            memory.store_column(memory.table(Lse, head, q_len, 1), rows, q_len, 0, lse)
