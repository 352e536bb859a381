"""Which pipeline of the Hopper kernel is the fastest, and how near the best peer?    python -m fusedattn.bench.hopper

Each pipeline that `launch.tiles` has for a width, the universal kernel and the peers on the same inputs, forward
alone; a line a cell, the standings of the pipelines, and the goals. --tests FILE, of pytest's --junitxml, leaves out
the pipelines that did not pass every test there that has their name.
"""

import argparse
import math
import os
import sys
import xml.etree.ElementTree

from . import attention, contest, providers, variants

CONTEST = contest.Contest(variants.PIPELINE, "fusedattn:triton")
# Goals: speed over that of the best peer. By (D, causal), of more than SHORT tokens.
OF_HOPPER = {
    (64, False): 1.15,
    (64, True): 1.15,
    (128, False): 0.95,
    (128, True): 1.0,
    (256, False): 1.5,
    (256, True): 1.5,
}
SHORT, OF_SHORT = 1024, 0.95  # up to so many tokens
FLOOR = 0.85  # in no cell less, by the kernel for Hopper
OF_UNIVERSAL = {128: 0.80, 64: 0.95}


def goal(case):
    """What is asked of the kernel for Hopper on a case."""
    return OF_SHORT if case.Sq <= SHORT else OF_HOPPER[case.D, case.causal]


def _show(case, cell):
    ratios = (cell.ratio(cell.forms.get(cell.best)), goal(case)), (cell.ratio(cell.other), OF_UNIVERSAL.get(case.D))
    return contest.line(case, cell, ratios)


def _goals(found, first):
    """Lines: the goals, and how far they are met by the pipeline that stands first in its width."""
    mine = {case: cell.ratio(cell.forms.get(first.get(case.D))) for case, cell in found.items()}
    universal = {case: cell.ratio(cell.other) for case, cell in found.items()}

    def of(ratios, meant):
        return {case: ratio for case, ratio in ratios.items() if meant(case)}

    for (dim, causal), asked in OF_HOPPER.items():
        some = of(mine, lambda case: (case.D, case.causal) == (dim, causal) and case.Sq > SHORT)  # noqa: B023
        yield contest.goal(f"hopper d{dim} {'causal' if causal else 'full'} S > {SHORT} >= {asked}", some, goal)
    yield contest.goal(f"hopper S <= {SHORT} >= {OF_SHORT}", of(mine, lambda case: case.Sq <= SHORT), goal)
    yield contest.goal(f"hopper everywhere >= {FLOOR}", mine, lambda case: FLOOR)
    for dim, asked in OF_UNIVERSAL.items():
        some = of(universal, lambda case: case.D == dim)  # noqa: B023
        yield contest.goal(f"universal d{dim} >= {asked}", some, lambda case: OF_UNIVERSAL[case.D])


def text(written):
    """The table, as it is printed."""
    header = f"{'forward':<19}{'best pipeline':<20} TFLOP/s   peer (goal)     universal  best peer TFLOP/s"
    return contest.text(written, CONTEST, header, _show, _goals)


def proven(path):
    """Pipelines in names of tests that all passed, in a file of pytest's --junitxml; none where there is no file."""
    passed, others = set(), set()
    if os.path.exists(path):
        for test in xml.etree.ElementTree.parse(path).iter("testcase"):
            words = test.get("name", "").partition("[")[2].rstrip("]").split("-")
            # What is inside one is a failure, an error, or why it was skipped.
            (others if test.find("./*") is not None else passed).update(words)
    return {name for name in variants.pipelines() if name in passed - others}


def _providers(device):
    """FlexAttention is measured where it cannot run as well: a row says so."""
    peers = [name for name in providers.usual("cuda") if not name.startswith(("fusedattn", "naive", "sdpa:math"))]
    return [*(variants.PIPELINE + name for name in variants.pipelines()), CONTEST.other, *peers]


def _tier(case, name):
    """A cell at a time, so that the GPU is as warm for all of it; what compiles for long comes last."""
    return math.inf if name == "flex" else 0


QUESTION = attention.Question(__doc__, ("forward",), "hopper", "tiny-hopper", text, _providers, _tier)


def main(arguments=None):
    words = argparse.ArgumentParser(add_help=False)
    words.add_argument("--tests")
    own, rest = words.parse_known_args(arguments)
    if own.tests is None:
        return attention.main(rest, QUESTION)
    taken = {variants.PIPELINE + name for name in proven(own.tests)}

    def some(device):
        return [name for name in _providers(device) if name in taken or not name.startswith(variants.PIPELINE)]

    return attention.main(rest, QUESTION._replace(providers=some))


if __name__ == "__main__":
    sys.exit(main())
