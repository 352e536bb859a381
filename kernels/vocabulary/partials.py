"""Results of programs that each process one split of the keys; `combine` merges them."""

from typing import NamedTuple

import triton
import triton.language as tl

from . import memory, softmax


class Partials(NamedTuple):
    """Unnormalised outputs (B, H, splits, rows, DV) and softmax States (B, H, splits, rows, 2), contiguous.

    If the row_sum of a State is 0, its output may not have been written.
    """

    sums: tl.tensor
    states: tl.tensor


@triton.jit
def states(partials, plane, at, n):
    """Load the softmax States of a head at indices `at`; an index past the end gives the State of no keys."""
    m = memory.table(partials.states, plane, n, 2)
    row_max, row_sum = memory.load_column(m, at, n, 0), memory.load_column(m, at, n, 1)
    return softmax.State(tl.where(row_sum > 0, row_max, float("-inf")), row_sum)


@triton.jit
def keep(partials, plane, rows, c, length, split, splits, sums, state, some, DV: tl.constexpr, is_first=True):
    """Store each row's softmax State for one split of the keys and, if `some`, its unnormalised output `sums`."""
    # some: the split has keys. c: columns of sums. is_first: c begins with column 0; only then States are stored.
    # length: rows of a head.
    at, n = tl.where(rows < length, split * length + rows, 0x7FFFFFFF), splits * length
    if some:
        r = at[:, None]
        first = tl.cast(plane.index, tl.int64) * n * DV
        head = memory.View(partials.sums + (first[:, None] if len(first.shape) == 1 else first), (DV, 1))
        tl.store(memory.pointers(head, r, c), sums, mask=(r < n) & (c < DV))
    m, n = memory.table(partials.states, plane, n, 2), tl.where(is_first, n, 0)
    memory.store_column(m, at, n, 0, state.row_max)
    memory.store_column(m, at, n, 1, state.row_sum)
