"""Dropout's random bits by torch's integer arithmetic: the same as the kernels draw.

Philox4x32 of seven rounds, keyed by the seed; the counter is a place in the grid of rows and keys, so that the bits
depend on nothing else. Source: Parallel random numbers: as easy as 1, 2, 3, doi:10.1145/2063384.2063405.
"""

import torch
from torch import Tensor

ROUNDS = 7
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
WEYL = 0x9E3779B9, 0xBB67AE85
WORD = 0xFFFFFFFF  # words are kept in int64, whose products wrap: their lower 64 bits are right


def _rounds(counter: list[Tensor], key: list[Tensor]) -> list[Tensor]:
    """The four words of each counter (four words itself)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        a, b = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = ((b >> 32) & WORD) ^ c1 ^ k0, b & WORD, ((a >> 32) & WORD) ^ c3 ^ k1, a & WORD
        k0, k1 = (k0 + WEYL[0]) & WORD, (k1 + WEYL[1]) & WORD
    return [c0, c1, c2, c3]


def words(seed: Tensor, planes: Tensor, first: int, last: int, keys: int) -> Tensor:
    """The word that decides each pair (i, j), as int64 in [0, 2**32).

    Args:
        seed: one int64. planes: int64, b * Hq + h of each plane.
        first, last: rows i to draw for. keys: j is 0 .. keys - 1.
    Returns: (planes, last - first, keys). One call of Philox gives the words of i, i + 8 and j, j + 8.
    """
    device = planes.device
    start, rows = first // 16 * 8, -(-last // 16) * 8 - first // 16 * 8
    i = torch.arange(start, start + rows, device=device)[None, :, None]
    columns = -(-keys // 16) * 8
    j = torch.arange(columns, device=device)[None, None, :]
    plane = planes.reshape(-1, 1, 1)
    zero = torch.zeros((), dtype=torch.int64, device=device)
    shape = torch.broadcast_shapes(i.shape, j.shape, plane.shape)
    counter = [x.expand(shape) for x in (i + zero, j + zero, plane & WORD, plane >> 32)]
    seed = seed.reshape(())
    drawn = torch.stack(_rounds(counter, [seed & WORD, (seed >> 32) & WORD]), -1)
    # [plane, half of i, low bits of i, half of j, low bits of j, bit 3 of i, bit 3 of j]
    drawn = drawn.reshape(-1, rows // 8, 8, columns // 8, 8, 2, 2).permute(0, 1, 5, 2, 3, 6, 4)
    return drawn.reshape(-1, rows * 2, columns * 2)[:, first - start * 2 : last - start * 2, :keys]


def keep(seed: Tensor, planes: Tensor, first: int, last: int, keys: int, dropout_p: float) -> Tensor:
    """Which pairs dropout keeps, bool (planes, last - first, keys)."""
    return words(seed, planes, first, last, keys) >= threshold(dropout_p)


def threshold(dropout_p: float) -> int:
    """Words below it are dropped. At 1 it is past every word."""
    return int(dropout_p * 2**32)
