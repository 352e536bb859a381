"""What does skipping blocks save, and how near is it to the ideal?    python -m fusedattn.bench.skipping

Half of all tokens padding, a mask of 8 documents, a window of 1024 keys, in 16384 tokens. Without a GPU it counts: the
pairs in the tiles that the kernels' own lists name, at the tiles of an H100, beside the pairs that are visible.
On a GPU it measures: forward and backward, with the masks as they are and with a plan of them, beside a call that hides
nothing and FlexAttention with the same block mask; and what making the plan, or that block mask, takes.
"""

import argparse
import os
import subprocess
import sys
from typing import NamedTuple

import torch

import fusedattn as fa
from fusedattn.call.form import Arguments
from fusedattn.call.rules import checked
from fusedattn.naive import formula

from . import attention, cases, peers, rows, table, timing

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
    """(the different ones of (n, ...) blocks of bools, which of them each one is)."""
    contents, number = torch.unique(blocks.flatten(1).view(torch.int64), dim=0, return_inverse=True)
    return contents.view(torch.bool).view(-1, *blocks.shape[1:]), number


def marks(masks, grain):
    """`launch.mark` of masks whose lengths are multiples of the grain, by the kernel that fills them.

    It marks each different block once, for a mark depends on nothing but the block: of the 65,536 of a grid of 16384 x
    16384 a few dozen differ, and the interpreter takes 12 ms for each.
    """
    from fusedattn.launch.blocks import mark

    found = {}
    for name, mask in masks.items():
        if name == "mask":
            batch, heads, height, width = mask.shape
            places = (batch, heads, height // grain, width // grain)
            blocks = mask.reshape(*places[:3], grain, -1, grain).transpose(3, 4).reshape(-1, 1, grain, grain)
        else:
            blocks = mask.reshape(-1, grain)
            places = (len(mask), 1, 1, -1) if name == "key_mask" else (len(mask), 1, -1, 1)
        contents, number = _distinct(blocks)
        found[name] = contents, number.view(places)
    numbers = torch.broadcast_tensors(*(number for _, number in found.values()))
    together, place = torch.unique(torch.stack(numbers, -1).flatten(0, -2), dim=0, return_inverse=True)
    blocks = {
        name: contents[each] for (name, (contents, _)), each in zip(found.items(), together.unbind(1), strict=True)
    }
    each = mark(*(blocks.get(name) for name in ("mask", "key_mask", "query_mask")), None, None, grain)
    return each.flatten()[place].view(numbers[0].shape)


def _call(case, masks):
    """The Call of one head of a case, with tensors that take no memory."""
    query, key, value = (
        torch.zeros((), dtype=getattr(torch, case.dtype)).expand(case.B, 1, length, dim)
        for length, dim in ((case.Sq, case.D), (case.Sk, case.D), (case.Sk, case.Dv))
    )
    return checked(Arguments(query, key, value, **case.arguments(masks)))


def _pairs_visible(call, step=1024):
    batch, _, length, _ = call.query.shape
    total = 0
    for first in range(0, length, step):
        last = min(first + step, length)
        seen = formula.visible(call, first, last)
        total += int(seen.expand(batch, 1, last - first, call.key.shape[2]).count_nonzero())
    return total


def count(case, tiles, grain):
    """A Count of each (kernel, tile), of one head of all batches; it takes Triton's interpreter."""
    from fusedattn.kernels.vocabulary.walk import ALL, SOME

    from fusedattn.launch import blocks

    masks = case.masks("cpu")
    call = _call(case, masks)
    # Where there is no mask kernels walk ranges: those of lists of a grid where the band alone hides.
    found = marks(masks, grain) if masks else torch.full((1, 1, 1, 1), SOME.value | ALL.value, dtype=torch.uint8)

    def listed(tile, by_keys):
        """(tiles that take a mask, all tiles) of the lists of a kernel."""
        lists = blocks.list_blocks(call, found, grain, tile, by_keys).base
        masked, bare = (int(lists[:, :, fully::2, 0].sum()) for fully in (0, 1))
        return masked, masked + bare

    visible, counts = _pairs_visible(call), []
    for kernel, tile in tiles:
        masked, some = listed(tile, KERNELS[kernel])
        area, total = tile.rows * tile.keys, -(-case.Sq // tile.rows) * -(-case.Sk // tile.keys) * case.B
        counts.append(Count(kernel, tile.rows, tile.keys, some, masked, some * area, visible, total * area))
    return counts


def _tiles(case, every):
    """(kernel, Tile) of the GPU's table for a case in half precision: the ones it takes first, or those it may take."""
    from fusedattn.launch import tiles as configs

    found = {}
    for kernel in KERNELS:
        for width in (64, 128):
            tiles = configs.tiles(kernel, GPU, 2, width, narrow=configs.narrow(*case.sides))
            found |= {(kernel, tile.rows, tile.keys): tile for tile in (tiles if every else tiles[:1])}
    return [(kernel, tile) for (kernel, *_), tile in found.items()]


def report(case, counts):
    """What was counted of a case, as lines."""
    first = counts[0]
    share = first.visible / (case.B * case.Sq * case.Sk)
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
        command = [sys.executable, "-m", "fusedattn.bench.skipping", *arguments]
        return subprocess.run(command, env=dict(os.environ, TRITON_INTERPRET="1")).returncode
    from fusedattn.launch import tiles as configs

    for case in chosen:
        print(report(case, count(case, _tiles(case, every), configs.grain(GPU))), flush=True)
    return 0


def _plans(case, device):
    """{provider: what makes its plan of the masks of a case}"""
    tensors = case._replace(Hq=1, Hkv=1).draw(device)
    steps = {"flex": lambda: peers.block_mask(case, tensors)}
    if tensors.masks:
        steps["fusedattn+plan"] = lambda: fa.plan(**tensors.masks)
    return steps


def time_all(chosen, device, writer, machine, budget=None, budget_ms=100.0, resume=False):
    """Measure, a row each; what `attention.run` returns."""
    dense = list(dict.fromkeys(case._replace(options="") for case in chosen))
    modes = ("forward", "backward")
    done = attention.run([*chosen, *dense], PROVIDERS, modes, device, writer, machine, budget, budget_ms, resume=resume)
    for case in () if done is None else chosen:
        for provider, step in _plans(case, device).items():
            times = timing.measure(step, device, budget_ms)
            measured = times.columns()
            writer.write(rows.row(machine, "plan", provider, case, **measured))
    return done


def compared(written):
    """The last run as lines: a case and mode a line, times over that of our call that hides nothing."""
    written = [row for row in table.last_run(written) if row.ms_p50 != ""]
    times = {(table.case_of(row), row.mode, row.provider.partition(":")[0]): row.ms_p50 for row in written}
    lines = []
    for case in dict.fromkeys(case for case, _, _ in times if case.options):
        lines.append(case.name)
        for mode in ("forward", "backward"):
            base = times.get((case._replace(options=""), mode, "fusedattn"))
            here = {name: times[case, mode, name] for name in PROVIDERS if (case, mode, name) in times}
            over = {name: f" ({each / base:.2f} of dense)" if base else "" for name, each in here.items()}
            said = ", ".join(f"{name} {each:.4g} ms{over[name]}" for name, each in here.items())
            lines.append(f"    {mode:<9} {said}")
        made = [f"{name} {times[case, 'plan', name]:.4g} ms" for name in PROVIDERS if (case, "plan", name) in times]
        lines.append(f"    {'plan':<9} {', '.join(made)}")
    return "\n".join(lines)


def main(arguments=None):
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog="python -m fusedattn.bench.skipping", description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu counts")
    parser.add_argument("--cases", choices=cases.TABLES, default="skipping")
    parser.add_argument("--every-tile", action="store_true", help="count the tiles a GPU may fall back to as well")
    parser.add_argument("--csv", help="append times to this file")
    parser.add_argument("--resume", action="store_true", help="go on with the last run in the CSV")
    parser.add_argument("--budget", type=float, help="seconds after which no more is timed")
    parser.add_argument("--repeat-ms", type=float, default=100.0, help="how long a row is timed, about")
    parser.add_argument("--commit", help="what the rows say, where git cannot tell")
    options = parser.parse_args(arguments)
    chosen = cases.TABLES[options.cases]
    if torch.device(options.device).type != "cuda":
        return _count_all(chosen, options.every_tile, arguments)
    writer, machine = rows.Writer(options.csv), rows.machine(options.device, options.commit)
    if options.resume and writer.rows:
        machine["date"] = writer.rows[-1].date
    done = time_all(chosen, options.device, writer, machine, options.budget, options.repeat_ms, options.resume)
    print(compared(writer.rows))
    return attention.BROKEN if done is None else 0


if __name__ == "__main__":
    sys.exit(main())
