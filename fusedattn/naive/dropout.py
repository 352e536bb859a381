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
SLAB = 2**15  # counters drawn at a time: their words fit a cache
WORD = 0xFFFFFFFF  # words are kept in int64, whose products wrap: their lower 64 bits are right


def _multiplied(word: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """Return the product, which replaces the word, and its upper word, above which its highest bit is copied."""
    if torch.compiler.is_compiling():
        # By multiplier - 2**32, which is small: a C++ compiler takes it that no product of int64 overflows, and leaves
        # out the mask that mends one that does.
        return word * multiplier, (word * (multiplier - 2**32) >> 32) + word
    product = word.mul_(multiplier)
    return product, product >> 32


def _xor(a: Tensor, b: Tensor) -> Tensor:
    return a.bitwise_xor_(b) if a.shape == b.shape else a ^ b


def _rounds(counter: list[Tensor], key: list[Tensor]) -> list[Tensor]:
    """Return the four words of each counter, which is four words that broadcast: the first rounds are of few numbers.

    The lower 32 bits are right. Only what is multiplied must be without the others.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    c0, c2 = c0.clone(), c2.clone()
    for _ in range(ROUNDS):
        (a, of_a), (b, of_b) = (
            _multiplied(word.bitwise_and_(WORD), by) for word, by in zip((c0, c2), MULTIPLIERS, strict=True)
        )
        c0, c1, c2, c3 = _xor(of_b, c1).bitwise_xor_(k0), b, _xor(of_a, c3).bitwise_xor_(k1), a
        k0, k1 = (k0 + WEYL[0]) & WORD, (k1 + WEYL[1]) & WORD
    return [c0, c1, c2, c3]


def _drawn(
    seed: Tensor, planes: Tensor, first: int, last: int, begin: int, keys: int, decide: Callable[[Tensor], Tensor]
) -> Tensor:
    """`decide` of the word of each pair (i, j): (planes, last - first, keys - begin).

    One call of Philox serves i and i + 8, j and j + 8.
    """
    device, left = planes.device, begin // 16 * 8  # counters of keys are half as many as well
    columns = (keys + 15) // 16 * 8 - left  # not by -(-keys // 16): ONNX rounds quotients towards 0
    start, end = first // 16 * 8, (last + 15) // 16 * 8  # counters of rows: half as many, in steps of 8
    key = [seed.reshape(()) & WORD, (seed.reshape(()) >> 32) & WORD]
    plane, column = planes.reshape(-1, 1, 1), torch.arange(left, left + columns, device=device)[None, None, :]
    # A compiler fuses what here has to fit the cache, and would take the number of slabs for a guard on sizes.
    whole = torch.compiler.is_compiling()
    step = max(1, SLAB // max(1, planes.numel() * columns * 8)) * 8
    slabs = []
    for row in (start,) if whole else range(start, end if columns else start, step):
        rows = torch.arange(row, end if whole else min(row + step, end), device=device)[None, :, None]
        words = _rounds([rows, column, plane & WORD, plane >> 32], key)
        # [plane, half of i, low bits of i, half of j, low bits of j, bit 3 of i, bit 3 of j]
        slab = torch.stack([_eights(decide(word.bitwise_and_(WORD))) for word in words], -1)
        slab = slab.unflatten(1, (slab.shape[1] // 8, 8)).unflatten(5, (2, 2))
        slabs.append(slab.permute(0, 1, 5, 2, 3, 6, 4).flatten(1, 3).flatten(2))
    if not slabs:
        return decide(plane.new_zeros(planes.numel(), last - first, keys - begin))
    grid = torch.cat(slabs, 1)
    grid = grid.view(torch.bool) if grid.shape[2] < columns * 2 else grid
    return grid[:, first - start * 2 : last - start * 2, begin - left * 2 : keys - left * 2]


def _eights(decided: Tensor) -> Tensor:
    """Return (.., columns) as (.., columns / 8, 8); bools as (.., columns / 8, 1), eight of them one number to copy."""
    if decided.dtype == torch.bool and not torch.compiler.is_compiling():
        return decided.view(torch.int64)[..., None]
    return decided.unflatten(-1, (decided.shape[-1] // 8, 8))


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
    """Return the pairs that dropout keeps, bool (planes, last - first, keys - begin)."""
    least = threshold(dropout_p)
    return _drawn(seed, planes, first, last, begin, keys, lambda word: word >= least)


def threshold(dropout_p: float) -> int:
    """Words below it are dropped. At 1 it is past every word."""
    return int(dropout_p * 2**32)
