"""Kernel that merges the results of splits of the keys, in a fixed order: one program per row and head.

Source: Flash-Decoding, pytorch.org/blog/flash-decoding.
"""

import triton
import triton.language as tl

from .vocabulary import memory, partials as splitting, saved_stats, softmax, span


@triton.jit(do_not_specialize=["heads", "rows", "splits"])
def combine(
    Out, Lse, Stats,
    partials, scale, heads, rows, splits,
    DV: tl.constexpr, MOST: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Merge the Partials of all splits into Out, a View of (B, H, rows, DV), Lse (B, H, rows) and Stats unless None."""
    # Stats is (B, H, rows, `saved_stats.columns`). A step reads BLOCK_M splits. MOST, a power of 2, is at least splits.
    row, plane = span.place(tl.program_id(0), rows, heads, 1)
    n = rows * splits
    state = softmax.join(splitting.states(partials, plane, row + tl.arange(0, MOST)[:, None] * rows, n), scale)
    sums = memory.table(partials.sums, plane, n, DV)
    out = tl.zeros([1, memory.width(DV)], state.row_sum.dtype)
    for start in tl.range(0, splits, BLOCK_M):
        at = row + (start + tl.arange(0, BLOCK_M)) * rows
        part = splitting.states(partials, plane, at, n)
        tile = memory.load(sums, at, part.row_sum > 0, DV)
        out += tl.sum(tile * softmax.share(part, state, scale)[:, None], 0)[None, :]
    out, lse, log2_sum = softmax.finish(out, state, scale)
    one = row + tl.arange(0, 1)
    if Lse is not None:
        memory.store_column(memory.table(Lse, plane, rows, 1), one, rows, 0, lse)
    if Stats is not None:
        dtype: tl.constexpr = Out.base.dtype.element_ty
        stats = saved_stats.table(Stats, plane, rows, dtype, DV)
        saved_stats.store(stats, one, rows, state.row_max, log2_sum)
        saved_stats.store_tail(stats, one, rows, out, tl.arange(0, memory.width(DV))[None, :], DV, dtype)
    memory.store(memory.matrix(Out, plane), one, one < rows, out, DV)
