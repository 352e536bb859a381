"""Dropout of attention weights by Philox bits.

The bits come from Philox4x32 with seven rounds. Its key is the seed. Its counter is the position: row, key and plane (a
head of a batch). Nothing else changes the bits.
Source: Parallel random numbers: as easy as 1, 2, 3, doi:10.1145/2063384.2063405.
"""

from typing import NamedTuple

import triton
import triton.language as tl


class Dropout(NamedTuple):
    """Dropout options of a call, from `of`. seed points to an int64, so that a replayed CUDA graph can get a new one.

    A weight is dropped if its random word is below the threshold, otherwise multiplied by scale. origin is an Origin if
    this call is part of a larger one. Otherwise it is (), because Triton 3.6 cannot compare a tuple that holds None.
    """

    seed: tl.tensor
    threshold: tl.tensor
    scale: tl.tensor
    origin: tuple


class Origin(NamedTuple):
    """Start of this call's Philox counters in a larger call: row, key and plane. The larger call has `heads` heads.

    A plane is one head of one batch. If first row and first key are multiples of 16, `aligned` has both, in units of
    16, and `unaligned` is (). Otherwise `unaligned` has both, and `aligned` is ().
    """

    aligned: tuple
    unaligned: tuple
    plane: tl.tensor
    heads: tl.tensor


def is_aligned(origin):
    """Return whether a call's first row and first key in a larger call are multiples of 16."""
    _, row, key, _, _ = origin
    return row % 16 == key % 16 == 0


def of(seed, dropout_p, origin=None):
    """Return a Dropout. For dropout_p = 1 the threshold wraps to 0, which drops nothing, but scale is 0."""
    place = ()
    if origin is not None:
        _, row, key, plane, heads = origin
        aligned = is_aligned(origin)
        place = Origin((row // 16, key // 16) if aligned else (), () if aligned else (row, key), plane, heads)
    return Dropout(seed, int(dropout_p * 2**32) % 2**32, 1 / (1 - dropout_p) if dropout_p < 1 else 0.0, place)


@triton.jit
def _counters(x, SIZE: tl.constexpr):
    """Return one Philox counter for each two indices i and i + 8 in x, which starts at a multiple of 16."""
    x, other = tl.split(tl.permute(tl.reshape(x, [SIZE // 16, 2, 8]), [0, 2, 1]))
    x = tl.reshape(x, [SIZE // 2])
    return (x >> 4) * 8 + (x & 7)


@triton.jit
def _plane(dropout, plane):
    """Return the index of this (batch, head), in the larger call if this call is part of one."""
    origin = dropout.origin
    return plane.index if len(origin) == 0 else origin.plane + plane.batch * origin.heads + plane.head


@triton.jit
def word(dropout, plane, r, c):
    """Return a random word for each pair (r, c) of an unaligned origin, with 4 times the Philox calls of `four`."""
    row, key = dropout.origin.unaligned
    r, c = tl.broadcast(r + row, c + key)
    low, high = (r >> 4) * 8 + (r & 7), (c >> 4) * 8 + (c & 7)
    zero = low & 0
    w0, w1, w2, w3 = tl.philox(tl.load(dropout.seed), low, high, zero + _plane(dropout, plane), zero, 7)
    of_row = (r & 8) != 0
    return tl.where((c & 8) != 0, tl.where(of_row, w3, w1), tl.where(of_row, w2, w0))


@triton.jit
def _words(dropout, plane, r, c):
    """Return a random word for each pair (r, c). r and c are [n, 1] and [1, m], or the reverse."""
    if len(dropout.origin) > 0 and len(dropout.origin.unaligned) > 0:
        return word(dropout, plane, r, c)
    else:
        ROWS: tl.constexpr = r.shape[0] * r.shape[1]
        KEYS: tl.constexpr = c.shape[0] * c.shape[1]
        i, j = _counters(tl.reshape(r, [ROWS]), ROWS), _counters(tl.reshape(c, [KEYS]), KEYS)
        if r.shape[1] == 1:
            return four(dropout, plane, i[:, None], j[None, :])
        else:
            return four(dropout, plane, i[None, :], j[:, None])


@triton.jit
def four(dropout, plane, i, j):
    """Return a random 32-bit word for each pair. i and j: Philox counters, one for each two rows or two keys."""
    # One call of Philox gives four words, for rows r, r + 8 and keys c, c + 8. In a product, one thread holds all four
    # of these elements, so no data moves between threads.
    BY_ROWS: tl.constexpr = i.shape[1] == 1
    ROWS: tl.constexpr = 2 * i.shape[0] * i.shape[1]
    KEYS: tl.constexpr = 2 * j.shape[0] * j.shape[1]
    i, j = tl.broadcast(i, j)
    if len(dropout.origin) > 0:
        i, j = i + dropout.origin.aligned[0] * 8, j + dropout.origin.aligned[1] * 8
    zero = i & 0
    w0, w1, w2, w3 = tl.philox(tl.load(dropout.seed), i, j, zero + _plane(dropout, plane), zero, 7)
    words = tl.join(tl.join(w0, w1), tl.join(w2, w3))  # the last two axes are bit 3 of the key, and of the row
    if BY_ROWS:
        words = tl.permute(tl.reshape(words, [ROWS // 16, 8, KEYS // 16, 8, 2, 2]), [0, 5, 1, 2, 4, 3])
        return tl.reshape(words, [ROWS, KEYS])
    else:
        words = tl.permute(tl.reshape(words, [KEYS // 16, 8, ROWS // 16, 8, 2, 2]), [0, 4, 1, 2, 5, 3])
        return tl.reshape(words, [KEYS, ROWS])


@triton.jit
def keep(dropout, p, plane, r, c):
    """Return the weights p, with dropped ones set to 0. The forward applies `scaled` to its output, not to p."""
    # In a row with one key, rounding a scaled weight to 16 bits would shift all columns of the output. delta would then
    # differ from dp, and the gradient of the score would not be 0.
    return p if dropout is None else keep_by(dropout, p, _words(dropout, plane, r, c))


@triton.jit
def keep_by(dropout, p, words):
    """Return p, 0 where dropped, from random words in the layout of p: for Gluon, where `keep` cannot infer layouts."""
    return tl.where(words >= tl.cast(dropout.threshold, tl.uint32), p, 0.0)


@triton.jit
def scaled(dropout, x):
    return x if dropout is None else x * dropout.scale


@triton.jit
def drop(dropout, p, plane, r, c):
    return scaled(dropout, keep(dropout, p, plane, r, c))


@triton.jit
def sign_by(dropout, p, words):
    """Return p, negative where dropped, from random words in the layout of p: `sign_dropped` for Gluon.

    An int32 p (softcap): the high half is p scaled, the low half p * dcap. If dropped, high is 0 and low negative.
    """
    dropped = (p & 0xFFFF) ^ 0x8000 if p.dtype == tl.int32 else -p
    return tl.where(words >= tl.cast(dropout.threshold, tl.uint32), p, dropped)


@triton.jit
def sign_dropped(dropout, p, plane, r, c):
    """Return the weights, negative if dropped, because the backward lacks registers for both weights and bits."""
    return p if dropout is None else sign_by(dropout, p, _words(dropout, plane, r, c))


@triton.jit
def before(dropout, signed):
    """Return the weights before dropout from `signed`, the result of `sign_dropped`."""
    return signed if dropout is None else tl.abs(signed)


@triton.jit
def after(dropout, signed):
    """Return the weights after dropout from `signed`, the result of `sign_dropped`."""
    return signed if dropout is None else tl.maximum(signed, 0.0) * dropout.scale


@triton.jit
def grad(dropout, signed, dp):
    """Return the gradient of the weights before dropout, from dp, the gradient of the weights after it."""
    return dp if dropout is None else tl.where(signed > 0, dp * dropout.scale, 0.0)
