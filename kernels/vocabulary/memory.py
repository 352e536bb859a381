"""Loads and stores of tiles, by Views (pointer and strides). Sums may also be TMA descriptors."""

from typing import NamedTuple

import triton
import triton.language as tl
from triton import knobs

INTERPRETED = tl.constexpr(knobs.runtime.interpret)  # the interpreter has no map_elementwise


class View(NamedTuple):
    """Pointer and strides of a (batch, head, row, column) tensor or a (row, column) matrix. Broadcast strides are 0."""

    base: tl.tensor
    strides: tuple


@triton.constexpr_function
def width(D):
    """Return the width of a tile that holds D columns: a power of two, and at least 16, as tensor cores need."""
    return max(16, triton.next_power_of_2(D))


@triton.constexpr_function
def wide(dtype):
    return tl.float64 if dtype == tl.float64 else tl.float32


@triton.jit
def _same(x):
    return x


@triton.jit
def opaque(x):
    """Return x, and hide from the compiler how x was computed. It costs no instruction."""
    # Before triton-lang/triton#11691 the compiler lays out an operand of mma.sync for the narrowest load behind it,
    # such as a byte of a mask, and for half its width after a tl.join. At best that costs a detour through shared
    # memory. At worst, with a layout for K = 8 in a product of K = 16, results are wrong. So weights that depend on
    # masks or random bits pass through here.
    return x if INTERPRETED else tl.map_elementwise(_same, x)


@triton.jit
def matrix(view, plane):
    # int64 before each product: a tensor may have over 2**31 elements.
    batch, head = tl.cast(plane.batch, tl.int64), tl.cast(plane.head, tl.int64)
    return View(view.base + batch * view.strides[0] + head * view.strides[1], (view.strides[2], view.strides[3]))


@triton.jit
def pointers(m, r, c):
    # int64 adds 1% (forward) to 8% (dk/dv) of code to the loop, but saves 30 registers over int32 within a tile.
    return m.base + r.to(tl.int64) * m.strides[0] + c.to(tl.int64) * m.strides[1]


@triton.jit
def _of(view, plane, first):
    m = matrix(view, plane)
    return m if len(plane.packed) == 0 else View(pointers(m, first, first * 0), m.strides)


@triton.jit
def of_rows(view, plane):
    """Return the (Sq, D) matrix of a head in a (B, H, Sq, D) tensor; a packed sequence starts at its first row."""
    return _of(view, plane, 0 if len(plane.packed) == 0 else plane.packed.row)


@triton.jit
def of_keys(view, plane):
    """Return the (Sk, D) matrix of a head in a (B, H, Sk, D) tensor; a packed sequence starts at its first key."""
    return _of(view, plane, 0 if len(plane.packed) == 0 else plane.packed.key)


@triton.jit
def table(base, plane, n, COLUMNS: tl.constexpr, BY_KEYS: tl.constexpr = False):
    """Return the rows of one (batch, head) in a contiguous buffer (B * H, n, COLUMNS), as a matrix."""
    # n counts queries or keys. Packed sequences share one buffer (heads, total rows or keys, COLUMNS).
    if len(plane.packed) == 0:
        first = tl.cast(plane.index, tl.int64) * n
    elif BY_KEYS:
        first = tl.cast(plane.head, tl.int64) * plane.packed.keys + plane.packed.key
    else:
        first = tl.cast(plane.head, tl.int64) * plane.packed.rows + plane.packed.row
    return View(base + first * COLUMNS, (COLUMNS, 1))


@triton.jit
def load(m, rows, exists, D: tl.constexpr, WIDTH: tl.constexpr = None):
    """Load a [rows, WIDTH or width(D)] tile; 0 past column D and where `exists` is False (None if all rows exist)."""
    ALL: tl.constexpr = width(D) if WIDTH is None else WIDTH
    r, c = rows[:, None], tl.arange(0, ALL)[None, :]
    if exists is None and ALL == D:
        return tl.load(pointers(m, r, c))
    elif exists is None:
        return tl.load(pointers(m, r, c), mask=c < D, other=0.0)
    else:
        return tl.load(pointers(m, r, c), mask=exists[:, None] if ALL == D else exists[:, None] & (c < D), other=0.0)


@triton.jit
def store(m, rows, exists, tile, D: tl.constexpr):
    """Store columns below D of a tile where `exists` is True, in the matrix's dtype. m.base may be a pointer a row."""
    r, c = rows[:, None], tl.arange(0, tile.shape[1])[None, :]
    tl.store(pointers(m, r, c), tile.to(m.base.dtype.scalar.element_ty), mask=exists[:, None] & (c < D))


@triton.jit
def add(sums, plane, rows, first, n, tile, D: tl.constexpr):
    """Add a tile atomically to rows of one head in `sums`, from row `first` on, but not to rows from n on."""
    # sums is a View or a descriptor of (B, H, S, D). With a descriptor, TMA adds asynchronously, and needs no pointers.
    if isinstance(sums, tl.tensor_descriptor):
        place = [plane.batch, plane.head, first, 0]
        if len(plane.packed) > 0:
            # Rows past the end belong to the next sequence; their contribution, 0 times a value, may be NaN.
            place = [plane.batch * 0, plane.head, first + plane.packed.row, 0]
            tile = tl.where(rows[:, None] < n, tile, 0.0)
        sums.atomic_add(place, tile.reshape(sums.block_shape))
    else:
        r, c = rows[:, None], tl.arange(0, width(D))[None, :]
        exists = r < n if width(D) == D else (r < n) & (c < D)
        tl.atomic_add(pointers(of_rows(sums, plane), r, c), tile, mask=exists, sem="relaxed")


@triton.jit
def load_pairs(m, r, c, rows, keys, CHECK: tl.constexpr):
    """Load elements (r, c) of a (rows, keys) matrix, zero past its end. r, c are [n, 1], [1, m] or the reverse."""
    # Without CHECK the tile must not pass the end along its second axis.
    if CHECK:
        exists = (r < rows) & (c < keys)
    else:
        # Loads along contiguous keys can be wide, because no bound applies to the second axis.
        exists = r < rows if r.shape[1] == 1 else c < keys
    return tl.load(pointers(m, r, c), mask=exists, other=0)


@triton.jit
def store_pairs(m, r, c, rows, keys, tile):
    """Store the part of a tile that lies within a (rows, keys) matrix, in the matrix's dtype."""
    tl.store(pointers(m, r, c), tile.to(m.base.dtype.scalar.element_ty), mask=(r < rows) & (c < keys))


@triton.jit
def scalar(view, plane):
    """Load the number of one (batch, head) from a (B, H, 1, 1) tensor."""
    return tl.load(matrix(view, plane).base)


@triton.jit
def cast(x, dtype: tl.constexpr):
    """Convert x to a dtype. Finite float64 numbers below the range of float32 become its lowest number, not -inf."""
    if x.dtype == tl.float64 and dtype != tl.float64:
        x = tl.where(x == float("-inf"), x, tl.maximum(x, -3.4028234663852886e38))
    return x.to(dtype)


@triton.jit
def load_column(m, rows, n, i):
    return tl.load(pointers(m, rows, rows * 0 + i), mask=rows < n, other=0.0)


@triton.jit
def store_column(m, rows, n, i, x):
    tl.store(pointers(m, rows, rows * 0 + i), x, mask=rows < n)


@triton.jit
def load_quad(m, rows, n):
    """Load a (row, 4) matrix as four vectors, zero from row n on, in one load."""
    # Triton 3.6 gives a load of fewer than 32 * num_warps elements the layout of the operation that uses it, with up to
    # 16 copies of each element. Three loads of vectors made the dk/dv loop 1.5 times as long.
    r, c = rows[:, None], tl.arange(0, 4)[None, :]
    even, odd = tl.split(tl.reshape(tl.load(pointers(m, r, c), mask=r < n, other=0.0), [rows.shape[0], 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth
