"""The masks that a caller passes: key masks, row masks, and masks of (row, key) pairs."""

from typing import NamedTuple

import triton
import triton.language as tl

from . import memory, span

BLOCK = tl.constexpr(16 if memory.INTERPRETED else 64)  # rows and keys of a block of the block mask
# Entries of a block mask: no, all or some pairs are visible. With Bits, an entry from CONSTANT on is the index of the
# block's words, and SOME means that only other masks hide pairs. Words[EMPTY] are 0, words[FULL] and words[SOME] -1.
EMPTY, FULL, SOME, CONSTANT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)


class Bits(NamedTuple):
    """A mask of pairs: r sees c if words[block_mask[r // BLOCK, c // BLOCK], r % BLOCK] has a 1 in bit c % BLOCK.

    block_mask is a View of (B, H, row blocks, key blocks), int16 or int32. words is int64 (count, BLOCK), contiguous.
    """

    block_mask: memory.View
    words: tl.tensor
    count: tl.tensor


class Masks(NamedTuple):
    """Views (pointer and strides) of the caller's masks, 8-bit, nonzero = visible; an absent mask is None.

    pairs is (B, H, Sq, Sk), keys (B, 1, Sk, 1) and rows (B, 1, Sq, 1). bits, unless None, replaces pairs, which is then
    None. Tokens that keys or rows hide may be NaN, and are never loaded. Tokens that only pairs hides must be finite.
    """

    pairs: memory.View
    keys: memory.View
    rows: memory.View
    bits: Bits = None


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
def number(bits, plane, r, first, band):
    """Load the index in `Bits.words` for each row r and the block of key `first`; r may have any shape."""
    blocks = memory.matrix(bits.block_mask, plane)
    exists = r < tl.where(first < band.keys, band.rows, 0)
    mark = tl.load(memory.pointers(blocks, r // BLOCK, first // BLOCK), mask=exists, other=EMPTY)
    return tl.minimum(mark.to(tl.int32).to(tl.uint32, bitcast=True), bits.count - 1)  # in bounds for any entry


@triton.jit
def _words(bits, plane, r, first, band):
    """Load a word for each row r: its mask bits for the block of keys that holds `first`."""
    return tl.load(bits.words + number(bits, plane, r, first, band).to(tl.int64) * BLOCK + r % BLOCK)


@triton.jit
def half(words, c):
    """Return the 32-bit half of words in which bit c % BLOCK lies. words: a tuple of one tensor for each block of c."""
    word = words[0] if c.numel <= BLOCK else tl.where((c & BLOCK) == 0, words[0], words[1])
    return tl.where((c & (BLOCK - 1)) < 32, word, word >> 32).to(tl.int32)


@triton.jit
def bit(bits, c):
    """Return True where the bit of c is set in the result of `half`."""
    # In a result of tensor cores, the indices of a thread's columns have equal bits 1 and 2, so it shifts by them once.
    # The other bits of c are constants in the code, and take no registers.
    return (((bits >> (c & 6)) >> (c & (BLOCK - 1) & 25)) & 1) != 0


@triton.jit
def shown(masks, band, plane, r, c, first, CHECK: tl.constexpr):
    """Load the pair mask at (r, c), for `visible`; return 1 if there is no pair mask, or without CHECK."""
    # Call this before the product: a load after it keeps wgmma from running asynchronously. first: the first of the
    # keys c, a multiple of their number.
    if CHECK and masks.bits is not None:
        word = _words(masks.bits, plane, r, first, band)
        if c.numel <= BLOCK:
            words = (word,)
        else:
            tl.static_assert(c.numel == 2 * BLOCK)
            words = word, _words(masks.bits, plane, r, first + BLOCK, band)
        # In a tile [keys, rows] a thread has many rows but few keys, which need only one half of each word.
        return words if r.shape[1] == 1 else (half(words, c),)
    elif CHECK and masks.pairs is not None:
        return memory.load_pairs(memory.matrix(masks.pairs, plane), r, c, band.rows, band.keys, CHECK=True)
    else:
        return 1


@triton.jit
def visible(masks, shown, band, plane, r, c, real=None):
    """Return True for the (row, key) pairs that all masks leave visible. real: `real_keys` of c, if loaded already."""
    # masks.rows is not read: the forward sets outputs of hidden rows to 0, and saved statistics make their weights 0.
    # Kernels that return weights mask these rows themselves, because a key that is NaN makes them NaN.
    seen = span.inside(band, r, c)
    if masks.keys is not None:
        seen &= real_keys(masks, plane, c, band.keys) if real is None else real
    if masks.bits is not None:
        if r.shape[1] == 1:
            seen &= bit(half(shown, c), c)
        else:
            seen &= ((shown[0] >> (c & (BLOCK - 1) & 31)) & 1) != 0  # a shift of 32 bits is one instruction
    elif masks.pairs is not None:
        seen &= shown != 0
    return seen
