"""Is packing sequences faster than padding them, and as fast as equal ones?    python -m fusedattn.bench.varlen

About 32k tokens in sequences of equal lengths, of any, of one that is long among many that are short, and of lengths
by Zipf: packed, by ours and by whoever else takes them so, and padded, by ours with masks of the real tokens. Equal
ones need no padding, so that ours is then the dense kernel. TFLOP/s are of the pairs within sequences alone, the sum of
squares of lengths. What padding wastes is counted, without a GPU.
"""

import sys

from fusedattn.launch import tiles

from . import attention, cases, contest, cost, providers, table
from .attention import Question

GOAL = 0.95  # of the dense kernel's speed, where all lengths are equal
GPU = 90  # whose tiles are counted
PACKED, PADDED = "fusedattn+packed:", "fusedattn:"


def waste(case):
    """A line: what padding adds to the tokens, the pairs and the memory of a case, and tiles to packed pairs."""
    lengths = case.lengths("cpu")
    tokens, pairs = int(lengths.sum()), int(lengths.square().sum())
    everything = case._replace(options="")
    held, ideal = (cost.ideal(each) / 2**30 for each in (everything, case))
    tile = tiles.tiles("forward", GPU, 2, case.D)[0]
    rows, keys = (-(-lengths // block) * block for block in (tile.rows, tile.keys))
    kind = case.words.get("lengths", "equal")
    return (
        f"{kind}: {case.B} sequences of {lengths.min()} to {lengths.max()}, {tokens} tokens; padded "
        f"{case.B * case.Sq / tokens:.2f} x the tokens ({held:.1f} GiB for {ideal:.1f}), "
        f"{case.B * case.Sq**2 / pairs:.2f} x the pairs; tiles of {tile.rows} x {tile.keys}, packed, "
        f"{int((rows * keys).sum()) / pairs:.3f} x the pairs"
    )


def _speed(row):
    return f"{row.ms_p50:.4g} ms {row.tflops:.4g} TFLOP/s"


def cells(written):
    """{(case, mode): {provider: row}} of what the last run timed, and of ours found right."""
    found = {}
    for row in table.last_run(written):
        if row.ms_p50 != "" and not (row.provider.startswith("fusedattn") and row.status == "wrong"):
            found.setdefault((table.case_of(row), row.mode), {})[row.provider] = row
    return found


def ours(timed, prefix):
    """Our row, packed or padded, of {provider: row}; None where it is not there."""
    return next((row for name, row in timed.items() if name.startswith(prefix)), None)


def over(written):
    """{mode: {case: the time of ours padded over that of ours packed}}"""
    found = {}
    for (case, mode), timed in cells(written).items():
        mine, other = ours(timed, PACKED), ours(timed, PADDED)
        if mine and other:
            found.setdefault(mode, {})[case] = other.ms_p50 / mine.ms_p50
    return found


def text(written):
    """What padding wastes, a line a case and mode with their time over ours, and whether the goal is met."""
    counted = [case for case in cases.VARLEN if case.D == 128 and not case.causal]
    lines = ["Counted, of bf16, width 2048, forward and backward:", *(f"    {waste(case)}" for case in counted)]
    lines += table.others(table.last_run(written))
    for (case, mode), timed in cells(written).items():
        mine = ours(timed, PACKED)
        said = "" if mine is None else f" {_speed(mine)}; theirs over it:"
        each = sorted((row for row in timed.values() if row is not mine), key=lambda row: row.ms_p50)
        theirs = (
            f"{row.provider} {row.ms_p50 / mine.ms_p50:.2f}" if mine else f"{row.provider} {_speed(row)}"
            for row in each
        )
        lines.append(f"{case.name} {mode}:{said} {'  '.join(theirs)}")
    ratios = over(written)
    for mode in attention.MODES[:2]:
        equal = {
            case: ratio for case, ratio in ratios.get(mode, {}).items() if not case.options and case.Sq >= table.LONG
        }
        lines.append(contest.goal(f"{mode}, equal lengths, >= {GOAL} of the dense kernel", equal, lambda _: GOAL))
    return "\n".join(lines)


def _tier(case, name):
    """FlexAttention is compiled for each case, after all else was measured."""
    return int(name == "flex+packed")


QUESTION = Question(__doc__, attention.MODES[:2], "varlen", "tiny-varlen", text, providers.usual_packed, _tier)


def main(arguments=None):
    return attention.main(arguments, QUESTION)


if __name__ == "__main__":
    sys.exit(main())
