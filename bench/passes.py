"""Which backward is the fastest, one pass or two, and how near the best peer?    python -m fusedattn.bench.passes

The backward in two passes, and in one by each of its tiles, with dq added by the copy engine and by the threads, ours
as it comes and the peers on the same inputs, on a graph that is kept; a line a cell, the standings, and the goals.
"""

import math
import sys

from . import attention, contest, providers, variants

CONTEST = contest.Contest(variants.BACKWARD, "fusedattn:triton")
# Goals: speed over that of the best peer, by D; over FlexAttention; and in no cell less.
OF_BEST = {128: 0.85, 64: 1.0, 256: 1.2}
OF_FLEX, FLOOR = 1.3, 0.7


def goal(case):
    """What is asked of ours on a case."""
    return OF_BEST[case.D]


def _show(case, cell):
    mine = cell.forms.get(cell.best)
    return contest.line(case, cell, ((cell.ratio(mine), goal(case)), (cell.ratio(cell.other), goal(case))))


def _goals(found, first):
    """Lines: the goals, and how far they are met by the form that stands first in its width."""
    mine = {case: cell.forms.get(first.get(case.D)) for case, cell in found.items()}
    best = {case: cell.ratio(mine[case]) for case, cell in found.items()}
    for dim, asked in OF_BEST.items():
        for causal in (False, True):
            some = {case: best[case] for case in best if (case.D, case.causal) == (dim, causal)}
            yield contest.goal(f"backward d{dim} {'causal' if causal else 'full'} >= {asked}", some, goal)
    yield contest.goal(f"backward everywhere >= {FLOOR}", best, lambda case: FLOOR)
    flex = {case: cell.ratio(mine[case], "flex") for case, cell in found.items()}
    yield contest.goal(f"backward over FlexAttention everywhere >= {OF_FLEX}", flex, lambda case: OF_FLEX)


def text(written):
    """The table, as it is printed."""
    header = f"{'backward':<19}{'best form':<20} TFLOP/s   peer (goal)     as it comes  best peer TFLOP/s"
    return contest.text(written, CONTEST, header, _show, _goals)


def _providers(device):
    peers = [name for name in providers.usual("cuda") if not name.startswith(("fusedattn", "naive", "sdpa:math"))]
    return [*(variants.BACKWARD + name for name in variants.backwards()), CONTEST.other, *peers]


def _tier(case, name):
    """A cell at a time, so that the GPU is as warm for all of it; what compiles for long comes last."""
    return math.inf if name == "flex" else 0


QUESTION = attention.Question(__doc__, ("backward",), "backward", "tiny-backward", text, _providers, _tier)

if __name__ == "__main__":
    sys.exit(attention.main(question=QUESTION))
