"""What does skipping blocks save, and how near is it to the ideal?

Half of all tokens padding, a mask of 8 documents, a window of 1024 keys, in 16384 tokens. Without a GPU it counts: the
pairs in the tiles that the kernels' own lists name, at the tiles of an H100, beside the pairs that are visible.
On a GPU it measures: forward and backward, with the masks as they are and with a plan of them, beside a call that hides
nothing and FlexAttention with the same block mask; and the time to make the plan, or that block mask.
"""

import os
import subprocess
import sys
from typing import NamedTuple

import torch
from fusedattn.bench import cases, peers, report, rows, timing

import fusedattn as fa
from fusedattn.call.form import Arguments
from fusedattn.call.rules import checked
from fusedattn.launch import tiles as tile_table
from fusedattn.naive import formula

from . import questions

GOAL = 1.1  # pairs computed over those that are visible
GPU = 90  # whose tiles are counted
KERNELS = {"forward": False, "dq": False, "dkdv": True, "one_pass": True}  # whether its lists are by keys
PROVIDERS = ("fusedattn", "fusedattn+plan", "flex")


class Count(NamedTuple):
    """The tiles that a kernel computes, how many of them take a mask, and pairs: theirs, visible, all."""

    kernel: str
    rows: int
    keys: int
    tiles: int
    masked: int
    computed: int
    visible: int
    dense: int

    @property
    def ratio(self) -> float:
        return self.computed / self.visible


def _distinct(blocks):
    """(the different ones of (n, ...) blocks of bools, the number of that one for each of the n)."""
    contents, number = torch.unique(blocks.flatten(1).view(torch.int64), dim=0, return_inverse=True)
    return contents.view(torch.bool).view(-1, *blocks.shape[1:]), number


def block_mask(masks, size):
    """`launch.blocks.block_mask` of masks whose lengths are multiples of the size of a block, by its own kernel.

    It marks each different block once, for a mark depends on nothing but the block: of the 65,536 of a grid of 16384 x
    16384 a few dozen differ, and the interpreter takes 12 ms for each.
    """
    from fusedattn.launch.blocks import block_mask as marks_of

    found = {}
    for name, mask in masks.items():
        if name == "mask":
            batch, heads, height, width = mask.shape
            places = (batch, heads, height // size, width // size)
            blocks = mask.reshape(*places[:3], size, -1, size).transpose(3, 4).reshape(-1, 1, size, size)
        else:
            blocks = mask.reshape(-1, size)
            places = (len(mask), 1, 1, -1) if name == "key_mask" else (len(mask), 1, -1, 1)
        contents, number = _distinct(blocks)
        found[name] = contents, number.view(places)
    numbers = torch.broadcast_tensors(*(number for _, number in found.values()))
    together, place = torch.unique(torch.stack(numbers, -1).flatten(0, -2), dim=0, return_inverse=True)
    columns = zip(found.items(), together.unbind(1), strict=True)
    blocks = {name: contents[column] for (name, (contents, _)), column in columns}
    marks = marks_of(*(blocks.get(name) for name in ("mask", "key_mask", "query_mask")), None, None, size)
    return marks.flatten()[place].view(numbers[0].shape)


def _pairs_visible(call, step=1024):
    batch, _, length, _ = call.query.shape
    total = 0
    for first in range(0, length, step):
        last = min(first + step, length)
        seen = formula.visible(call, first, last)
        total += int(seen.expand(batch, 1, last - first, call.key.shape[2]).count_nonzero())
    return total


def count(case, tiles, size):
    """A Count for each (kernel, Tile), of one head of all batches; it needs Triton's interpreter."""
    from fusedattn.kernels.vocabulary.walk import ALL, SOME

    from fusedattn.launch import blocks

    masks = case.masks("cpu")
    dtype, widths = getattr(torch, case.dtype), ((case.Sq, case.D), (case.Sk, case.D), (case.Sk, case.Dv))
    tensors = (torch.zeros((), dtype=dtype).expand(case.B, 1, *width) for width in widths)  # they take no memory
    call = checked(Arguments(*tensors, **case.arguments(masks)))
    # Where there is no mask kernels walk ranges: those of lists of a grid where the band alone hides.
    marks = block_mask(masks, size) if masks else torch.full((1, 1, 1, 1), SOME.value | ALL.value, dtype=torch.uint8)
    visible, counts = _pairs_visible(call), []
    for kernel, tile in tiles:
        lists = blocks.tile_lists(call, marks, size, tile, KERNELS[kernel]).base
        masked, bare = (int(lists[:, :, fully::2, 0].sum()) for fully in (0, 1))
        area, total = tile.rows * tile.keys, -(-case.Sq // tile.rows) * -(-case.Sk // tile.keys) * case.B
        some = masked + bare
        counts.append(Count(kernel, tile.rows, tile.keys, some, masked, some * area, visible, total * area))
    return counts


def _tiles(case, every):
    """(kernel, Tile) of the GPU's table for a case in half precision: its first tiles, or all that it may run."""
    found = {}
    for kernel in KERNELS:
        for width in (64, 128):
            tiles = tile_table.tiles(kernel, GPU, 2, width, narrow=tile_table.narrow(*case.sides))
            found |= {(kernel, tile.rows, tile.keys): tile for tile in (tiles if every else tiles[:1])}
    return [(kernel, tile) for (kernel, *_), tile in found.items()]


def told(case, counts):
    """The Counts of a case, as lines."""
    share = counts[0].visible / (case.B * case.Sq * case.Sk)
    lines = [f"{case.B} x {case.Sq} tokens, {case.options}: {share:.1%} of all pairs are visible"]
    for one in counts:
        met = "" if one.ratio <= GOAL else f", over the goal of {GOAL:g}"
        lines.append(
            f"    {one.kernel:<9}{f'{one.rows} x {one.keys}':<10} computes {one.ratio:.3f} "
            f"of those{met}; saves {1 - one.computed / one.dense:.1%} of the tiles; "
            f"{one.masked / one.tiles:.1%} take a mask"
        )
    return "\n".join(lines)


def _count_all(chosen, every, arguments):
    """Print the counts; in a process of its own where Triton would not interpret, for it asks once, when imported."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        command = [sys.executable, "-m", "fusedattn.bench", "skipping", *arguments]
        return subprocess.run(command, env=dict(os.environ, TRITON_INTERPRET="1")).returncode
    for case in chosen:
        print(told(case, count(case, _tiles(case, every), tile_table.block_mask_size(GPU))), flush=True)
    return 0


def time_all(chosen, writer, machine, options):
    """Measure, a row in the CSV each; returns as `questions.run`."""
    dense = list(dict.fromkeys(case._replace(options="") for case in chosen))
    done = questions.run([*chosen, *dense], PROVIDERS, ("forward", "backward"), writer, machine, options)
    for case in () if done is None else chosen:
        tensors = case._replace(Hq=1, Hkv=1).draw(options.device)
        plans = {"flex": lambda case=case, tensors=tensors: peers.block_mask(case, tensors)}
        if tensors.masks:
            plans["fusedattn+plan"] = lambda tensors=tensors: fa.plan(**tensors.masks)
        for provider, step in plans.items():
            times = timing.measure(step, options.device, options.repeat_ms)
            writer.write(rows.row(machine, "plan", provider, case, **times.columns()))
    return done


def over_dense(written):
    """Lines of rows: the time of a case with options over that of our call of the same size that hides nothing."""
    timed = [row for row in rows.last_run(written) if row.ms_p50 != ""]
    dense = {(row.case, row.mode): row.ms_p50 for row in timed if not row.options and report.is_ours(row)}
    for row in timed:
        base = dense.get((row.case._replace(options=""), row.mode))
        if row.options and base:
            yield f"{row.case.name} {row.mode} {row.provider}: {row.ms_p50 / base:.2f} of dense"


def main(arguments):
    words = questions.engine_parser("skipping", questions.OTHERS["skipping"])
    words.add_argument("--every-tile", action="store_true", help="count the tiles a GPU may fall back to as well")
    words.set_defaults(cases="skipping")
    options = words.parse_args(arguments)
    chosen = cases.TABLES[options.cases]
    if torch.device(options.device).type != "cuda":
        return _count_all(chosen, options.every_tile, arguments)
    writer, machine = questions.opened(options)
    done = time_all(chosen, writer, machine, options)
    print(report.text(writer.rows, more=list(over_dense(writer.rows))))
    return questions.BROKEN if done is None else 0
