"""Partial results of `decode`, whose programs have one split (part) of the keys each; `combine` merges them."""

from typing import NamedTuple

import triton
import triton.language as tl

from . import memory, softmax


class Partials(NamedTuple):
    """Unnormalised outputs (B, H, rows, splits, DV) and softmax States (B, H, rows, splits, 2), contiguous.

    If the row_sum of a State is 0, its output was not written.
    """

    sums: tl.tensor
    states: tl.tensor


@triton.jit
def states(partials, plane, at, last, n):
    """Load the States at indices `at`, of a head's n. From index `last` on, return States that have seen nothing."""
    m = memory.table(partials.states, plane, n, 2)
    row_max, row_sum = memory.load_column(m, at, last, 0), memory.load_column(m, at, last, 1)
    return softmax.State(tl.where(row_sum > 0, row_max, float("-inf")), row_sum)


@triton.jit
def keep(partials, plane, at, n, sums, state, some, DV: tl.constexpr):
    """Store each row's State and, if `some`, its unnormalised output (sums) at index `at`. A head has n indices."""
    if some:
        r = at[:, None]
        head = memory.View(partials.sums + (tl.cast(plane.index, tl.int64) * n * DV)[:, None], (DV, 1))
        c = tl.arange(0, memory.width(DV))[None, :]
        tl.store(memory.pointers(head, r, c), sums, mask=(r < n) & (c < DV))
    m = memory.table(partials.states, plane, n, 2)
    memory.store_column(m, at, n, 0, state.row_max)
    memory.store_column(m, at, n, 1, state.row_sum)
