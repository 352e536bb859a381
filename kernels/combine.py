"""Kernel that merges the partial results of `decode`: one program per row and head. The order of sums is fixed.

Source: Flash-Decoding, pytorch.org/blog/flash-decoding.
"""

import triton
import triton.language as tl

from .vocabulary import memory, partials as splitting, softmax, span


@triton.jit(do_not_specialize=["heads", "rows", "splits"])
def combine(
    Out, Lse,
    partials, scale, heads, rows, splits,
    DV: tl.constexpr, MOST: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Write Out, a View of (B, H, rows, DV), and Lse (B, H, rows) unless None.

    `decode` divided the keys into `splits` parts; BLOCK_M are read at a time. MOST is a power of two and >= splits.
    """
    row, plane = span.place(tl.program_id(0), rows, heads, 1)
    first, n = row * splits, rows * splits
    last = first + splits
    state = softmax.join(splitting.states(partials, plane, first + tl.arange(0, MOST)[:, None], last, n), scale)
    sums = memory.table(partials.sums, plane, n, DV)
    out = tl.zeros([1, memory.width(DV)], state.row_sum.dtype)
    for start in tl.range(first, last, BLOCK_M):
        at = start + tl.arange(0, BLOCK_M)
        part = splitting.states(partials, plane, at, last, n)
        tile = memory.load(sums, at, part.row_sum > 0, DV)
        out += tl.sum(tile * softmax.share(part, state, scale)[:, None], 0)[None, :]
    out, lse, _ = softmax.finish(out, state, scale)
    one = row + tl.arange(0, 1)
    memory.store(memory.matrix(Out, plane), one, rows, out, DV)
    if Lse is not None:
        memory.store_column(memory.table(Lse, plane, rows, 1), one, rows, 0, lse)
