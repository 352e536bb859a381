"""Dropout by Philox in torch's integer arithmetic, with the same bits as the kernels.

Philox4x32 has seven rounds; its key is the seed. The counter is a position in the grid of rows and keys, so the bits
depend on nothing else. Source: Parallel random numbers: as easy as 1, 2, 3, doi:10.1145/2063384.2063405.
"""

import torch
from torch import Tensor

ROUNDS = 7
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
WEYL = 0x9E3779B9, 0xBB67AE85
SLAB = 2**15  # counters at a time, whose words fit a cache
WORD = 0xFFFFFFFF  # words are int64; products wrap, with the right lower 64 bits


def _multiplied(word: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """Return (word * multiplier, its upper 32 bits with their sign). The product overwrites the word."""
    if torch.compiler.is_compiling():
        # By multiplier - 2**32, which is small: a C++ compiler assumes that int64 products do not overflow, and then
        # drops the mask that corrects an overflow.
        return word * multiplier, (word * (multiplier - 2**32) >> 32) + word
    product = word.mul_(multiplier)
    return product, product >> 32


def _xor(a: Tensor, b: Tensor) -> Tensor:
    return a.bitwise_xor_(b) if a.shape == b.shape else a ^ b


def _rounds(counter: list[Tensor], key: list[Tensor]) -> list[Tensor]:
    """Return four words for each counter; only their lower 32 bits are right.

    A counter is four words that broadcast, so that the first rounds compute few numbers.
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


def _eights(kept: Tensor) -> Tensor:
    """Return bools (.., columns) as (.., columns / 8, 1) int64, which copies faster; when compiled as (.., 8) bools."""
    if torch.compiler.is_compiling():
        return kept.unflatten(-1, (kept.shape[-1] // 8, 8))
    return kept.view(torch.int64)[..., None]


def keep(seed: Tensor, planes: Tensor, rows: tuple[int, int], keys: tuple[int, int], dropout_p: float) -> Tensor:
    """Return the pairs that dropout keeps, bool (planes, last - first row, end - begin key).

    One call of Philox serves rows i and i + 8, and keys j and j + 8.

    seed: one int64. planes: int64, b * Hq + h of each plane. rows, keys: (first, last + 1).
    """
    (first, last), (begin, end), device = rows, keys, planes.device
    least = int(dropout_p * 2**32)  # words below it are dropped; at 1 it is past every word
    left = begin // 16 * 8  # counters of keys are half as many as keys
    columns = (end + 15) // 16 * 8 - left  # not by -(-end // 16): ONNX rounds quotients towards 0
    start, stop = first // 16 * 8, (last + 15) // 16 * 8  # counters of rows, in steps of 8
    key = [seed.reshape(()) & WORD, (seed.reshape(()) >> 32) & WORD]
    plane, column = planes.reshape(-1, 1, 1), torch.arange(left, left + columns, device=device)[None, None, :]
    # One slab for a compiler: it fuses anyway, and the number of slabs would be a guard on sizes.
    whole = torch.compiler.is_compiling()
    step = max(1, SLAB // max(1, planes.numel() * columns * 8)) * 8
    slabs = []
    for row in (start,) if whole else range(start, stop if columns else start, step):
        row_counters = torch.arange(row, stop if whole else min(row + step, stop), device=device)[None, :, None]
        words = _rounds([row_counters, column, plane & WORD, plane >> 32], key)
        # [plane, half of i, low bits of i, half of j, low bits of j, bit 3 of i, bit 3 of j]
        slab = torch.stack([_eights(word.bitwise_and_(WORD) >= least) for word in words], -1)
        slab = slab.unflatten(1, (slab.shape[1] // 8, 8)).unflatten(5, (2, 2))
        slabs.append(slab.permute(0, 1, 5, 2, 3, 6, 4).flatten(1, 3).flatten(2))
    if not slabs:
        return planes.new_zeros(planes.numel(), last - first, end - begin, dtype=torch.bool)
    grid = torch.cat(slabs, 1)
    grid = grid if whole else grid.view(torch.bool)
    return grid[:, first - start * 2 : last - start * 2, begin - left * 2 : end - left * 2]
