"""Rotary position embedding: rotates pairs of columns by angles that depend on the position.

Source: RoFormer, arXiv:2104.09864, section 3.2.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from . import columns, memory


class Rotary(NamedTuple):
    """Views of the cosines and sines, (positions, ROTARY_DIM / 2), that rotate the first ROTARY_DIM columns."""

    cos: memory.View
    sin: memory.View


@triton.jit
def load(m, rows, exists, rotary, position, positions, spec: tl.constexpr):
    """Load the Columns of a tile, rotated by the angles of each row's position; rotary may be None."""
    # Positions are clamped. A pair is columns 2n and 2n + 1 if INTERLEAVED, otherwise n and n + ROTARY_DIM / 2. The
    # other column of each pair is loaded again, because a tile cannot be permuted along its columns.
    if rotary is None:
        return columns.load(m, rows, exists, spec.D)
    else:
        tiles = ()
        for n in tl.static_range(columns.count(spec.D)):
            tiles += (_load(m, rows, exists, rotary, position, positions, spec, n),)
        return columns.Columns(tiles, (), (), ())


@triton.jit
def _load(m, rows, exists, rotary, position, positions, spec: tl.constexpr, n: tl.constexpr):
    x = memory.load(columns.part(m, n), rows, exists, columns.size(spec.D, n), columns.width(spec.D, n))
    dtype: tl.constexpr = memory.wide(x.dtype)
    c = columns.indices(spec.D, n)
    if spec.INTERLEAVED:
        other, pair, first = c ^ 1, c // 2, c % 2 == 0
    else:
        first = c < spec.ROTARY_DIM // 2
        other = tl.where(first, c + spec.ROTARY_DIM // 2, c - spec.ROTARY_DIM // 2)
        pair = tl.where(first, c, other)
    turned = exists[:, None] & (c < spec.ROTARY_DIM)
    y = tl.load(memory.pointers(m, rows[:, None], other), mask=turned, other=0.0).to(dtype)
    p = tl.minimum(tl.maximum(position, 0), positions - 1)[:, None]
    cos = memory.cast(tl.load(memory.pointers(rotary.cos, p, pair), mask=turned, other=0.0), dtype)
    sin = memory.cast(tl.load(memory.pointers(rotary.sin, p, pair), mask=turned, other=0.0), dtype)
    moved = x.to(dtype) * cos + tl.where(first, -y, y) * sin
    return tl.where(turned, moved.to(x.dtype), x)
