"""Dropout by Philox in torch's integer arithmetic, with the same bits as the kernels.

This is Philox4x32 with seven rounds. Its key is the seed. Its counter holds plane (head of a batch), row and key, so
the bits depend on nothing else. Source: Parallel random numbers: as easy as 1, 2, 3, doi:10.1145/2063384.2063405.
"""

import torch
from torch import Tensor

ROUNDS = 7
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
WEYL = 0x9E3779B9, 0xBB67AE85
SLAB = 2**15  # counters computed at a time: their words fit a cache
WORD = 0xFFFFFFFF  # mask of a 32-bit word; words are stored as int64, where products wrap


def _multiplied(word: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """Return (word * multiplier, its upper 32 bits as a signed number). In eager code the product overwrites `word`."""
    if torch.compiler.is_compiling():
        # Multiply by multiplier - 2**32, which is small: C++ compilers assume that int64 products do not overflow, and
        # then drop the mask that corrects an overflow.
        return word * multiplier, (word * (multiplier - 2**32) >> 32) + word
    product = word.mul_(multiplier)
    return product, product >> 32


def _xor(a: Tensor, b: Tensor) -> Tensor:
    return a.bitwise_xor_(b) if a.shape == b.shape else a ^ b


def _rounds(counter: list[Tensor], keys: list[tuple[Tensor, ...]]) -> list[Tensor]:
    """Return four random words for each counter; only their lower 32 bits are valid."""
    # The four words of the counters broadcast to a grid, so that the first rounds compute few numbers.
    c0, c1, c2, c3 = counter
    c0, c2 = c0.clone(), c2.clone()
    for k0, k1 in zip(*keys, strict=True):
        factors = zip((c0, c2), MULTIPLIERS, strict=True)
        (a, of_a), (b, of_b) = (_multiplied(word.bitwise_and_(WORD), by) for word, by in factors)
        c0, c1, c2, c3 = _xor(of_b, c1).bitwise_xor_(k0), b, _xor(of_a, c3).bitwise_xor_(k1), a
    return [c0, c1, c2, c3]


def keep(seed: Tensor, planes: Tensor, rows: tuple[int, int], keys: tuple[int, int], dropout_p: float) -> Tensor:
    """Return a bool dropout mask (planes, rows, keys), True = keep. planes: b * Hq + h. rows, keys: (first, end)."""
    # The four words of a counter serve the pairs of rows i and i + 8 with keys j and j + 8.
    (first, last), (begin, end), device = rows, keys, planes.device
    least = int(dropout_p * 2**32)  # pairs with a smaller word are dropped; with dropout_p = 1, all pairs
    left = begin // 16 * 8  # first counter of the keys: 8 counters for 16 keys
    columns = (end + 15) // 16 * 8 - left  # not by -(-end // 16): ONNX rounds quotients towards 0
    start, stop = first // 16 * 8, (last + 15) // 16 * 8  # first counter of the rows, last counter + 1
    rounds = torch.arange(ROUNDS, device=device)
    words = seed.reshape(()) & WORD, (seed.reshape(()) >> 32) & WORD
    round_keys = [(word + rounds * step).unbind() for word, step in zip(words, WEYL, strict=True)]
    plane, column = planes.reshape(-1, 1, 1), torch.arange(left, left + columns, device=device)[None, None, :]

    def kept(row: int, after: int) -> list[Tensor]:
        """Return four bool tensors (planes, after - row, columns), True = keep: one per word of a Philox counter."""
        row_counters = torch.arange(row, after, device=device)[None, :, None]
        words = _rounds([row_counters, column, plane & WORD, plane >> 32], round_keys)
        return [word.bitwise_and_(WORD) >= least for word in words]

    if torch.compiler.is_compiling():  # slabs, views and slices would guard on sizes
        i, j = torch.arange(first, last, device=device)[:, None], torch.arange(begin, end, device=device)
        counter_i, counter_j = i // 16 * 8 + i % 8 - start, j // 16 * 8 + j % 8 - left
        return torch.stack(kept(start, stop), -1)[:, counter_i, counter_j, i // 8 % 2 * 2 + j // 8 % 2]
    step = max(1, SLAB // max(1, planes.numel() * columns * 8)) * 8
    slabs = []
    for row in range(start, stop if columns else start, step):
        # Eight bools are copied faster as one int64.
        # dimensions, for row i and key j: plane, i // 16, i % 8, j // 16, the int64 of j % 8, bit 3 of i, bit 3 of j
        slab = torch.stack([word.view(torch.int64)[..., None] for word in kept(row, min(row + step, stop))], -1)
        slab = slab.unflatten(1, (slab.shape[1] // 8, 8)).unflatten(5, (2, 2))
        slabs.append(slab.permute(0, 1, 5, 2, 3, 6, 4).flatten(1, 3).flatten(2))
    if not slabs:
        return planes.new_zeros(planes.numel(), last - first, end - begin, dtype=torch.bool)
    grid = torch.cat(slabs, 1).view(torch.bool)
    return grid[:, first - start * 2 : last - start * 2, begin - left * 2 : end - left * 2]
