"""The masks that a caller passes: key masks, row masks, and masks of (row, key) pairs."""

from typing import NamedTuple

import triton
import triton.language as tl

from . import memory, span


class Masks(NamedTuple):
    """Views (pointer and strides) of the caller's masks, 8-bit, nonzero = visible; an absent mask is None.

    pairs is (B, H, Sq, Sk); the scores that it hides are finite. keys is (B, 1, Sk, 1), rows (B, 1, Sq, 1): hidden
    tokens may be NaN, so they are never loaded.
    """

    pairs: memory.View
    keys: memory.View
    rows: memory.View


@triton.jit
def real_keys(masks, plane, c, n):
    """Return True for the keys c that exist and are not hidden by masks.keys; c may have any shape."""
    exists = c < n
    if masks.keys is not None:
        seen = tl.load(memory.pointers(memory.of_keys(masks.keys, plane), c, c * 0), mask=exists, other=0)
        exists &= memory.opaque(seen) != 0
    return exists


@triton.jit
def real_rows(masks, plane, r, n):
    """Return True for the rows r that exist and are not hidden by masks.rows; r may have any shape."""
    exists = r < n
    if masks.rows is not None:
        seen = tl.load(memory.pointers(memory.of_rows(masks.rows, plane), r, r * 0), mask=exists, other=0)
        exists &= memory.opaque(seen) != 0
    return exists


@triton.jit
def shown(masks, band, plane, r, c, CHECK: tl.constexpr):
    """Load the pair mask at (r, c), for `visible`; return 1 if there is no pair mask, or without CHECK.

    Call it before the product: a load in between keeps wgmma from running asynchronously.
    """
    if CHECK and masks.pairs is not None:
        return memory.load_pairs(memory.matrix(masks.pairs, plane), r, c, band.rows, band.keys, CHECK=True)
    else:
        return 1


@triton.jit
def visible(masks, shown, band, plane, r, c, real=None):
    """Return True for the (row, key) pairs that all masks leave visible. r and c are [n, 1] and [1, m], or the reverse.

    real: `real_keys` of c, if loaded already.
    masks.rows is not needed here: the saved statistics of a hidden row give it weights of 0.
    """
    seen = span.inside(band, r, c)
    if masks.keys is not None:
        seen &= real_keys(masks, plane, c, band.keys) if real is None else real
    if masks.pairs is not None:
        seen &= shown != 0
    return seen
