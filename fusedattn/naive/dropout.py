"""Dropout by Philox in torch's integer arithmetic, with the same bits as the kernels.

This is Philox4x32 with seven rounds. Its key is the seed. Its counter holds plane (head of a batch), row and key, so
the bits depend on nothing else. Source: Parallel random numbers: as easy as 1, 2, 3, doi:10.1145/2063384.2063405.
"""

from typing import Any

import torch
from torch import Tensor

ROUNDS = 7
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
WEYL = 0x9E3779B9, 0xBB67AE85
SLAB = 2**15  # counters computed at a time: their words fit a cache
WORD = 0xFFFFFFFF  # mask of a 32-bit word; words are stored as int64, where products wrap
Number = int | Tensor


def _multiplied(word: Tensor, multiplier: Number, half: Number) -> tuple[Tensor, Tensor]:
    """Return (word * multiplier, its upper 32 bits as a signed number). In eager code the product overwrites `word`."""
    if isinstance(multiplier, int):
        # Multiply by multiplier - 2**32, which is small: C++ compilers assume that int64 products do not overflow, and
        # then drop the mask that corrects an overflow.
        return word * multiplier, (word * (multiplier - 2**32) >> half) + word
    product = word.mul_(multiplier)
    return product, product >> half


def _xor(a: Tensor, b: Tensor) -> Tensor:
    return a.bitwise_xor_(b) if a.shape == b.shape else a ^ b


def _rounds(counter: list[Tensor], keys: list[tuple[Tensor, ...]], numbers: tuple[Number, ...]) -> list[Tensor]:
    """Return four random words for each counter; only their lower 32 bits are valid."""
    # `counter` is four tensors that broadcast against each other, so that the first rounds compute few numbers.
    (c0, c1, c2, c3), (mask, half, *multipliers) = counter, numbers
    c0, c2 = c0.clone(), c2.clone()
    for k0, k1 in zip(*keys, strict=True):
        factors = zip((c0, c2), multipliers, strict=True)
        (a, of_a), (b, of_b) = (_multiplied(word.bitwise_and_(mask), by, half) for word, by in factors)
        c0, c1, c2, c3 = _xor(of_b, c1).bitwise_xor_(k0), b, _xor(of_a, c3).bitwise_xor_(k1), a
    return [c0, c1, c2, c3]


def keep(seed: Tensor, planes: Tensor, rows: tuple[int, int], keys: tuple[int, int], dropout_p: float) -> Tensor:
    """Return a bool dropout mask (planes, rows, keys), True = keep. planes: b * Hq + h. rows, keys: (first, end)."""
    # The four words of a counter serve the pairs of rows i and i + 8 with keys j and j + 8.
    (first, last), (begin, end), device, count = rows, keys, planes.device, planes.numel()
    top, left = first // 16, begin // 16  # indices of the first blocks of 16 rows and of 16 keys
    bottom, right = (last + 15) // 16, (end + 15) // 16  # not by -(-end // 16): ONNX rounds quotients towards 0
    # Pairs whose word is smaller than the last number are dropped; with dropout_p = 1, all pairs.
    numbers: Any = WORD, 32, *MULTIPLIERS, int(dropout_p * 2**32)
    if not torch.compiler.is_compiling():  # each operator would take 1 us to make a tensor of a Python number
        numbers = torch.tensor(numbers, device="cpu").unbind()
    seed, steps = seed.reshape(()), torch.arange(ROUNDS, device=device)
    round_keys = [(word + steps * step).unbind() for word, step in zip((seed, seed >> 32), WEYL, strict=True)]
    plane, column = planes.reshape(-1, 1, 1), torch.arange(left * 8, right * 8, device=device)[None, None, :]

    def kept(block: int, after: int) -> list[Tensor]:
        """Return four bool tensors (planes, 8 * (after - block), columns), one per word of a counter; True = keep."""
        row = torch.arange(block * 8, after * 8, device=device)[None, :, None]
        words = _rounds([row, column, plane, plane >> 32], round_keys, numbers[:4])
        return [word.bitwise_and_(numbers[0]) >= numbers[4] for word in words]

    if torch.compiler.is_compiling():  # slabs, views and slices would guard on sizes
        i, j = torch.arange(first, last, device=device)[:, None], torch.arange(begin, end, device=device)
        counter_i, counter_j = (i // 16 - top) * 8 + i % 8, (j // 16 - left) * 8 + j % 8
        return torch.stack(kept(top, bottom), -1)[:, counter_i, counter_j, i // 8 % 2 * 2 + j // 8 % 2]
    # Eight bools are copied faster as one int64.
    # Dimensions, for row i and key j: plane, i // 16, bit 3 of i, i % 8, j // 16, bit 3 of j. An int64 has all j % 8.
    grid = torch.empty(count, bottom - top, 2, 8, right - left, 2, dtype=torch.int64, device=device)
    step = max(1, SLAB // max(1, count * (right - left) * 64))
    for block in range(top, bottom if right > left else top, step):
        words = torch.stack(kept(block, min(block + step, bottom))).view(torch.int64)
        slab = words.unflatten(2, (-1, 8)).unflatten(0, (2, 2)).permute(2, 3, 0, 4, 5, 1)
        grid[:, block - top : block - top + step] = slab
    found = grid.view(torch.bool).view(count, (bottom - top) * 16, (right - left) * 16)
    return found[:, first - top * 16 : last - top * 16, begin - left * 16 : end - left * 16]
