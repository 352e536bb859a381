"""Counts what kernels compute where masks and windows hide most: tiles and pairs, by the tiles of an H100.

`python -m fusedattn.bench skipping` prints it where there is no GPU to time it on.
"""

import itertools
from typing import NamedTuple

import torch

from fusedattn.launch import tiles as tile_table

GOAL = 1.1  # pairs computed over those that are visible
GPU = 90  # whose tiles are counted
KERNELS = ("forward", "dq", "dkdv", "one_pass")


class Count(NamedTuple):
    """The tiles that a kernel computes, how many of them take a mask, and how many pairs are visible of all."""

    kernel: str
    tile: tile_table.Tile
    tiles: int
    masked: int
    visible: int
    dense: int

    @property
    def computed(self) -> int:
        return self.tiles * self.tile.rows * self.tile.keys


def _pairs(case, masks, first, last):
    """Of rows from first to last: (seen by the band, by the masks, by those of them that a tile must look at).

    The last leaves out rows of padding: what these compute is thrown away.
    """
    row, key, seen = torch.arange(first, last)[:, None], torch.arange(case.Sk), torch.ones(1, 1, 1, 1, dtype=torch.bool)
    (left, right), diagonal = case.sides, row + case.Sk - case.Sq
    left, right = (case.Sk if side is None else side for side in (left, right))
    band = (key >= diagonal - left) & (key <= diagonal + right)
    seen = masks["mask"][:, :, first:last] if "mask" in masks else seen
    seen = seen & masks["key_mask"][:, None, None, :] if "key_mask" in masks else seen
    real = masks["query_mask"][:, None, first:last, None] if "query_mask" in masks else seen.new_ones(1)
    return [x.expand(-1, -1, *band.shape) for x in (band[None, None], seen & real, seen | ~real)]


def count(case, tiles, size):
    """A Count for each (kernel, Tile), of one head of all batches; size: rows and keys of a block that masks have."""
    masks, dense = case.masks("cpu"), case.B * case.Sq * case.Sk
    visible, found = 0, {(tile.rows, tile.keys): torch.zeros(2, dtype=torch.int64) for _, tile in tiles}

    def blocks(pairs, reduce, rows, keys, tile):
        """Whether any pair or all pairs of a block of rows x keys are seen, for each tile in it."""
        of_blocks = reduce(reduce(pairs.unflatten(2, (-1, rows)), 3).unflatten(3, (-1, keys)), 4)
        return of_blocks.repeat_interleave(rows // tile[0], 2).repeat_interleave(keys // tile[1], 3)

    step = max(size, *(tile.rows for _, tile in tiles))
    for first in range(0, case.Sq, step):
        band, seen, looked_at = _pairs(case, masks, first, first + step)
        every = torch.broadcast_shapes((case.B, 1, 1, 1), band.shape, seen.shape)
        visible += (band & seen).expand(every).count_nonzero().item()
        for tile, counts in found.items():
            block = max(tile[0], size), max(tile[1], size)
            reached = blocks(band, torch.any, *tile, tile) & blocks(seen, torch.any, *block, tile)
            whole = blocks(band, torch.all, *tile, tile) & blocks(looked_at, torch.all, *block, tile)
            some = torch.stack([reached, reached & ~whole], -1).expand(case.B, *(-1,) * 4)
            counts += some.flatten(0, 3).count_nonzero(0)
    return [Count(kernel, tile, *found[tile.rows, tile.keys].tolist(), visible, dense) for kernel, tile in tiles]


def _tiles(case, every):
    """(kernel, Tile) of the GPU's table for a case in half precision: its first tiles, or all that it may run."""
    unique, band = {}, tile_table.narrow(*case.sides)
    for kernel, width in itertools.product(KERNELS, (64, 128)):
        tiles = tile_table.tiles(kernel, GPU, 2, width, narrow=band)
        unique |= {(kernel, tile.rows, tile.keys): tile for tile in (tiles if every else tiles[:1])}
    return [(kernel, tile) for (kernel, *_), tile in unique.items()]


def lines(case, counts):
    """The Counts of a case, as lines."""
    share = counts[0].visible / counts[0].dense
    yield f"{case.B} x {case.Sq} tokens, {case.options}: {share:.1%} of all pairs are visible"
    for one in counts:
        ratio, size = one.computed / one.visible, f"{one.tile.rows} x {one.tile.keys}"
        over = "" if ratio <= GOAL else f", over the goal of {GOAL:g}"
        yield (
            f"    {one.kernel:<9}{size:<10} computes {ratio:.3f} of those{over}; saves "
            f"{1 - one.computed / one.dense:.1%} of the tiles; {one.masked / one.tiles:.1%} take a mask"
        )


def report(chosen, every):
    """Print the counts of cases, by the first tiles of each kernel or by every tile that it may fall back to."""
    for case in chosen:
        print(
            "\n".join(lines(case, count(case, _tiles(case, every), tile_table.block_mask_size(interpreted=False)))),
            flush=True,
        )
