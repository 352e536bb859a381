"""Draws dropout's random bits (Philox) with torch's integer arithmetic: the same bits as the kernels draw.

Philox4x32 of seven rounds, keyed by the seed; the counter is a place in the grid of rows and keys, so that the bits
depend on nothing else. Source: Parallel random numbers: as easy as 1, 2, 3, doi:10.1145/2063384.2063405.
"""

from collections.abc import Callable

import torch
from torch import Tensor

ROUNDS = 7
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
WEYL = 0x9E3779B9, 0xBB67AE85
SLAB = 2**16  # counters drawn at a time: their words fit a cache
WORD = 0xFFFFFFFF  # words are kept in int64, whose products wrap: their lower 64 bits are right


def _upper(word: Tensor, multiplier: int, product: Tensor) -> Tensor:
    """The upper word of a product."""
    if torch.compiler.is_compiling():
        # By multiplier - 2**32, which is small: a C++ compiler takes it that no product of int64 overflows, and leaves
        # out the mask that mends one that does.
        return (word * (multiplier - 2**32) >> 32) + word
    return (product >> 32) & WORD


def _rounds(counter: list[Tensor], key: list[Tensor]) -> list[Tensor]:
    """The four words of each counter (four words itself)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        a, b = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        of_b, of_a = _upper(c2, MULTIPLIERS[1], b), _upper(c0, MULTIPLIERS[0], a)
        c0, c1, c2, c3 = of_b ^ c1 ^ k0, b & WORD, of_a ^ c3 ^ k1, a & WORD
        k0, k1 = (k0 + WEYL[0]) & WORD, (k1 + WEYL[1]) & WORD
    return [c0, c1, c2, c3]


def _drawn(
    seed: Tensor, planes: Tensor, first: int, last: int, begin: int, keys: int, decide: Callable[[Tensor], Tensor]
) -> Tensor:
    """`decide` of the word of each pair (i, j): (planes, last - first, keys - begin).

    One call of Philox serves i and i + 8, j and j + 8.
    """
    device, left = planes.device, begin // 16 * 8  # counters of keys are half as many as well
    columns = -(-keys // 16) * 8 - left
    start, end = first // 16 * 8, -(-last // 16) * 8  # counters of rows: half as many, in steps of 8
    key = [seed.reshape(()) & WORD, (seed.reshape(()) >> 32) & WORD]
    plane, column = planes.reshape(-1, 1, 1), torch.arange(left, left + columns, device=device)[None, None, :]
    # A compiler fuses what here has to fit the cache, and would take the number of slabs for a guard on sizes.
    whole = torch.compiler.is_compiling()
    step = max(1, SLAB // max(1, planes.numel() * columns * 8)) * 8
    slabs = []
    for row in (start,) if whole else range(start, end, step):
        rows = torch.arange(row, end if whole else min(row + step, end), device=device)[None, :, None]
        shape = torch.broadcast_shapes(plane.shape, rows.shape, column.shape)
        words = _rounds([x.expand(shape) for x in (rows, column, plane & WORD, plane >> 32)], key)
        # [plane, half of i, low bits of i, half of j, low bits of j, bit 3 of i, bit 3 of j]
        slab = torch.stack([decide(word) for word in words], -1)
        slab = slab.reshape(shape[0], shape[1] // 8, 8, columns // 8, 8, 2, 2)
        slabs.append(slab.permute(0, 1, 5, 2, 3, 6, 4).reshape(shape[0], shape[1] * 2, columns * 2))
    grid = torch.cat(slabs, 1) if slabs else decide(plane.new_zeros(planes.numel(), 0, columns * 2))
    return grid[:, first - start * 2 : last - start * 2, begin - left * 2 : keys - left * 2]


def words(seed: Tensor, planes: Tensor, first: int, last: int, keys: int, begin: int = 0) -> Tensor:
    """The word that decides each pair (i, j), as int64 in [0, 2**32).

    Args:
        seed: one int64.
        planes: int64, b * Hq + h of each plane.
        first, last: rows i to draw for. begin, keys: j is begin .. keys - 1.
    Returns: (planes, last - first, keys - begin).
    """
    return _drawn(seed, planes, first, last, begin, keys, lambda word: word)


def keep(seed: Tensor, planes: Tensor, first: int, last: int, keys: int, dropout_p: float, begin: int = 0) -> Tensor:
    """Which pairs dropout keeps, bool (planes, last - first, keys - begin)."""
    least = threshold(dropout_p)
    return _drawn(seed, planes, first, last, begin, keys, lambda word: word >= least)


def threshold(dropout_p: float) -> int:
    """Words below it are dropped. At 1 it is past every word."""
    return int(dropout_p * 2**32)
