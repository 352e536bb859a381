"""Packing of masks of pairs: a block mask, and a word of 64 bits for each row of a partly visible block."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn.functional import pad

from .private import transforms_active

# Entries of a block mask; kernels/vocabulary/masks.py explains them. Each entry is also an index of mask_bits.
EMPTY, FULL, SOME, CONSTANT = range(4)
BLOCK = 64  # rows and keys of a block; 16 in Triton's interpreter
CHUNK = 2**19  # pairs packed in one step: int64 indices of more would not fit a cache
ALIGNED = 16  # mask_bits has a multiple of this many blocks: kernels are compiled once for all multiples
_GATHER = sum(1 << 56 - 7 * i for i in range(8))  # x * _GATHER has the lowest bit of byte i of x as bit 56 + i


def _words(blocks: Tensor) -> Tensor:
    """Return bool (n, size, size) as int64 (n, size): bit c of a word is column c."""
    lanes = pad(blocks, (0, 64 - blocks.shape[2])).contiguous().view(torch.int64)
    return (lanes * _GATHER >> 56).to(torch.uint8).view(torch.int64).squeeze(-1)


def _lengths(n: int, size: int, device: torch.device) -> Tensor:
    """Return how many of n rows or keys each block has."""
    return (n - torch.arange(-(-n // size), device=device) * size).clamp(max=size)


def _counted(mask: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return (a mask (B, H, rows, keys) as blocks (B, H, down, across, size, size), count of visible pairs in each)."""
    batch, heads, rows, keys = mask.shape
    down, across = -(-rows // size), -(-keys // size)
    if is_compiling() or rows % size or keys % size:  # compiled code would guard on the remainders
        mask = pad(mask, (0, across * size - keys, 0, down * size - rows))
    elif mask.storage_offset() % 8:  # eight bools are read as one int64
        mask = mask.clone()
    mask = mask.contiguous().view(batch, heads, down, size, across * (size // 8), 8)  # 8: an empty mask, too
    lanes = mask.view(torch.int64).sum(3)  # a byte counts up to `size` pairs
    seen = lanes.view(torch.uint8).view(batch, heads, down, across, size).sum(4)
    return mask.view(batch, heads, down, size, across, size).transpose(3, 4), seen


def pack(pairs: Callable[..., Tensor], shape: Sequence[int], size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return (block_mask, mask_bits) of a mask of shape (B, H, rows, keys), as a Plan has them."""
    # pairs(batches, heads, rows, keys), four slices, returns that part of the mask. Parts have about CHUNK pairs, or 16
    # times as many on a GPU. Compiled, transformed and fake code packs all pairs at once, with words for each block.
    constant = torch.tensor([0, -1, -1], device=device)[:, None].expand(-1, size)
    area = _lengths(shape[2], size, device)[:, None] * _lengths(shape[3], size, device)
    if is_compiling() or transforms_active() or device.type == "meta" or type(constant) is not Tensor:
        blocks, seen = _counted(pairs(*(slice(0, n) for n in shape)), size)
        words, numbers = _words(blocks.flatten(0, 3)), torch.arange(seen.numel(), device=device) + CONSTANT
        block_mask = torch.where((seen == 0) | (seen == area), seen.clamp(max=FULL), numbers.view_as(seen))
        return block_mask.to(torch.int32), _aligned(constant, words)
    if math.prod(shape):  # pack a mask once if its stride along batches or heads is 0
        strides = pairs(slice(0, shape[0]), slice(0, shape[1]), slice(0, 1), slice(0, 1)).stride()
        shape = *(1 if stride == 0 else n for n, stride in zip(shape[:2], strides[:2], strict=True)), *shape[2:]
    steps, room = [0, 0, 0, 0], CHUNK if device.type == "cpu" else 16 * CHUNK
    for axis, least in ((3, size), (2, size), (1, 1), (0, 1)):
        most = room // (size if axis == 3 else 1)  # keys leave room for a block of rows
        steps[axis] = max(least, min(-(-shape[axis] // least) * least, most // least * least))
        room //= steps[axis]
    block_mask = torch.empty(*shape[:2], *area.shape, dtype=torch.int32, device=device)
    # This tensor doubles when it is full. Many small tensors between temporary ones would fragment the memory.
    found, count = constant.new_empty(ALIGNED, size), 0
    for starts in itertools.product(*map(range, (0,) * 4, shape, steps)):
        where = [slice(start, min(start + step, n)) for start, step, n in zip(starts, steps, shape, strict=True)]
        blocks, seen = _counted(pairs(*where), size)
        where[2:] = (slice(x.start // size, -(-x.stop // size)) for x in where[2:])
        full = seen == area[where[2], where[3]]
        cut, part = (seen != 0) != full, block_mask[tuple(where)]
        part.copy_(full)
        if cut.any():
            words, places = torch.unique(_words(blocks[cut]), dim=0, return_inverse=True)
            part[cut] = (places + (CONSTANT + count)).int()
            while len(found) < count + len(words):
                found = torch.cat([found, found])
            found[count : count + len(words)] = words
            count += len(words)
    words, places = torch.unique(found[:count], dim=0, return_inverse=True)
    numbers = torch.cat([torch.arange(CONSTANT, device=device), places + CONSTANT])
    numbers = numbers.to(torch.int16 if len(words) + CONSTANT < 2**15 else torch.int32)
    return numbers.index_select(0, block_mask.flatten()).view_as(block_mask), _aligned(constant, words)


def _aligned(constant: Tensor, words: Tensor) -> Tensor:
    found = torch.cat([constant, words])
    return pad(found, (0, 0, 0, -found.shape[0] % ALIGNED))  # torch.export would fix a len()


def hide_tokens(block_mask: Tensor, key_mask: Tensor | None, query_mask: Tensor | None, size: int) -> Tensor:
    """Apply key_mask and query_mask (1 or B, S) to a block mask, and return the result."""
    # Rows that query_mask hides do not stop a block from counting as fully visible: their output is overwritten.

    def blocks(tokens: Tensor) -> Tensor:
        padded = pad(tokens.to(torch.uint8), (0, -tokens.shape[1] % size), value=2)
        return padded.view(padded.shape[0], padded.shape[1] // size, size)

    if key_mask is not None:
        keys = blocks(key_mask)[:, None, None]
        block_mask = torch.where((block_mask == FULL) & (keys == 0).any(-1), SOME, block_mask)
        block_mask = torch.where((keys == 1).any(-1), block_mask, EMPTY)
    if query_mask is not None:
        block_mask = torch.where((blocks(query_mask) == 1).any(-1)[:, None, :, None], block_mask, EMPTY)
    return block_mask


def unpack(block_mask: Tensor, mask_bits: Tensor, first: int, last: int, begin: int, end: int) -> Tensor:
    """Return the mask of rows first .. last - 1 and keys begin .. end - 1, bool (1 or B, 1 or H, rows, keys)."""
    size, device = mask_bits.shape[1], mask_bits.device
    rows = torch.arange(first, last, device=device)
    across = torch.arange(begin // size, -(-end // size), device=device)
    # A block mask of one block of rows or keys may be broadcast along them.
    numbers = block_mask[:, :, rows // size % block_mask.shape[2]][..., across % block_mask.shape[3]]
    octets = mask_bits[numbers.int(), (rows % size)[:, None]][..., None].view(torch.uint8)[..., : size // 8]
    bits = octets[..., None].bitwise_and(1 << torch.arange(8, dtype=torch.uint8, device=device))
    start = begin // size * size
    return bits.ne(0).flatten(3)[..., begin - start : end - start]


def density(
    block_mask: Tensor | None, mask_bits: Tensor | None, key_mask: Tensor | None, query_mask: Tensor | None,
    shape: tuple[int, ...],
) -> float:  # fmt: skip
    """Return the share of the pairs that all masks of a Plan show."""
    if block_mask is None or mask_bits is None:  # token masks alone
        counts: list[Any] = [1 if x is None else x.sum(1) for x in (key_mask, query_mask)]
        return float((counts[0] * counts[1]).sum()) / max(1, math.prod(shape))
    size, device, total = mask_bits.shape[1], mask_bits.device, math.prod(block_mask.shape[:2])
    sides: list[tuple[Any, Any]] = []
    for tokens, n in zip((query_mask, key_mask), shape[2:], strict=True):
        if tokens is None:  # a mask that broadcasts has one block of equal rows or keys
            tokens = torch.ones(1, size if n == 1 else n, dtype=torch.bool, device=device)
        words = _words(pad(tokens, (0, -tokens.shape[1] % size)).unflatten(1, (-1, size)))
        sides.append(torch.unique(words, return_inverse=True))
        total *= tokens.shape[1]
    (rows, row_at), (keys, key_at) = sides
    # Count each distinct triple (entry of the block mask, its visible rows, its visible keys) once.
    triples = (block_mask.long() * len(rows) + row_at[:, None, :, None]) * len(keys) + key_at[:, None, None]
    seen, lanes = 0, torch.arange(size, device=device)
    for part, times in zip(*(x.split(CHUNK // size) for x in triples.unique(return_counts=True)), strict=True):
        x = (mask_bits[part // len(keys) // len(rows)] & keys[part % len(keys), None]).view(torch.uint8)
        x = x - (x >> 1 & 0x55)
        x = (x & 0x33) + (x >> 2 & 0x33)
        of_rows = (x + (x >> 4) & 0x0F).view(-1, size, 8).sum(2)
        seen += int((of_rows * (rows[part // len(keys) % len(rows), None] >> lanes & 1) * times[:, None]).sum())
    return seen / max(1, total)
