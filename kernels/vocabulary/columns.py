"""Tiles of wide heads, in parts of at most PART columns: D 320 takes tiles of 256 and 64 columns, not one of 512."""

from typing import NamedTuple

import triton
import triton.language as tl

from . import memory, softmax

PART = tl.constexpr(256)
LEAST = tl.constexpr(64)  # minimum width of a later part; with 16 or 32, eight warps copy each sum, and spill


class Columns(NamedTuple):
    """Tiles [rows, columns] of the parts. If tiles is (), each product loads rows of `matrix` itself, part by part."""

    tiles: tuple
    matrix: memory.View
    rows: tl.tensor
    exists: tl.tensor


@triton.constexpr_function
def count(D):
    return triton.cdiv(D, PART.value)


@triton.constexpr_function
def size(D, n):
    return min(D - n * PART.value, PART.value)


@triton.constexpr_function
def width(D, n):
    """Return the width of a tile of part n, a power of two."""
    return max(triton.next_power_of_2(min(D - n * PART.value, PART.value)), LEAST.value if n > 0 else 16)


@triton.constexpr_function
def alike(D, DV):
    """Return whether the parts of DV columns are as wide as the first parts of D columns."""
    widths = [[width.fn(x, n) for n in range(count.fn(x))] for x in (D, DV)]
    return widths[0][: len(widths[1])] == widths[1]


@triton.jit
def indices(D: tl.constexpr, n: tl.constexpr):
    """Return the column numbers [1, width] of part n."""
    c = tl.arange(0, width(D, n))[None, :]
    return c if n == 0 else c + n * PART


@triton.jit
def part(m, n: tl.constexpr):
    """Return the columns of matrix m from part n on."""
    return m if n == 0 else memory.View(m.base + tl.cast(m.strides[1], tl.int64) * (n * PART), m.strides)


@triton.jit
def load(m, rows, exists, D: tl.constexpr, LATER: tl.constexpr = False):
    """Load a [rows, D] tile as Columns, with the arguments of `memory.load`."""
    # With LATER, or if elements have at least 32 bits, each product loads the parts of a wide tile itself, because
    # registers and shared memory cannot hold all tiles of a step.
    if D > PART and (LATER or m.base.dtype.scalar.element_ty.primitive_bitwidth >= 32):
        return Columns((), m, rows, rows >= 0 if exists is None else exists)
    else:
        tiles = ()
        for n in tl.static_range(count(D)):
            tiles += (memory.load(part(m, n), rows, exists, size(D, n), width(D, n)),)
        return Columns(tiles, (), (), ())


@triton.jit
def tile_of(x, n: tl.constexpr, D: tl.constexpr):
    """Return the tile of part n."""
    if len(x.tiles) > 0:
        return x.tiles[n]
    else:
        return memory.load(part(x.matrix, n), x.rows, x.exists, size(D, n), width(D, n))


@triton.jit
def _chunk(x, at, D: tl.constexpr, WIDTH: tl.constexpr):
    c = at + tl.arange(0, WIDTH)[None, :]
    return tl.load(memory.pointers(x.matrix, x.rows[:, None], c), mask=x.exists[:, None] & (c < D), other=0.0)


@triton.jit
def zeros(ROWS: tl.constexpr, D: tl.constexpr, dtype: tl.constexpr):
    tiles = ()
    for n in tl.static_range(count(D)):
        tiles += (tl.zeros([ROWS, width(D, n)], dtype),)
    return tiles


@triton.jit
def dot(a, b, D: tl.constexpr, spec: tl.constexpr, dtype: tl.constexpr, x=None):
    """Return a @ b.T, summed over D columns, plus x unless None."""
    if len(a.tiles) > 0 or len(b.tiles) > 0:
        for n in tl.static_range(count(D)):
            x = tl.dot(tile_of(a, n, D), tile_of(b, n, D).T, x, input_precision=spec.PRECISION, out_dtype=dtype)
    else:
        x = tl.zeros([a.rows.shape[0], b.rows.shape[0]], dtype) if x is None else x
        # In float32, add sums of 128 columns. One running sum of 512 columns has up to twice the error.
        APART: tl.constexpr = (
            spec.PRECISION == "ieee" and a.matrix.base.dtype.scalar.element_ty.primitive_bitwidth >= 32
        )
        WIDTH: tl.constexpr = 128 if APART else PART
        for at in tl.range(0, D, WIDTH):
            left, right = _chunk(a, at, D, WIDTH), _chunk(b, at, D, WIDTH).T
            if APART:  # Triton would turn an addition into a running sum
                x = tl.fma(tl.dot(left, right, input_precision="ieee", out_dtype=dtype), 1.0, x)
            else:
                x = tl.dot(left, right, x, input_precision=spec.PRECISION, out_dtype=dtype)
    return x


@triton.jit
def truncated(x, BITS: tl.constexpr = 0):
    """Add BITS to float32 x as an integer, and clear the 13 bits that TF32 ignores. Keep Inf and NaN."""
    bits = (x.to(tl.int32, bitcast=True) + BITS) & -8192
    return tl.where(tl.abs(x) < float("inf"), bits.to(tl.float32, bitcast=True), x)


@triton.jit
def add(sums, x, b, D: tl.constexpr, spec: tl.constexpr, decay=None):
    """Return the tiles of sums (times decay, unless None) + x @ b, with x rounded to the dtype of b."""
    tiles = ()
    for n in tl.static_range(count(D)):
        tile = tile_of(b, n, D)
        w = x.to(tile.dtype)
        total = sums[n] if decay is None else sums[n] * decay
        tiles += (tl.dot(w, tile, total, input_precision=spec.PRECISION, out_dtype=total.dtype),)
    return tiles


@triton.jit
def finish(tiles, state, scale):
    """Return (normalised tiles, lse, log2_sum) as `softmax.finish` does for one tile."""
    out = ()
    for n in tl.static_range(len(tiles)):
        tile, lse, log2_sum = softmax.finish(tiles[n], state, scale)
        out += (tile,)
    return out, lse, log2_sum


@triton.jit
def store(m, rows, n, tiles, D: tl.constexpr):
    for i in tl.static_range(count(D)):
        memory.store(part(m, i), rows, rows < n, tiles[i], size(D, i))
