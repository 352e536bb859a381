"""Which pipeline of the Hopper kernel is the fastest, and how near the best peer?    python -m fusedattn.bench.hopper

Each pipeline that `fusedattn.configs` has for a width, the universal kernel and the peers on the same inputs, forward
alone; a line a cell, the standings of the pipelines, and the goals. --tests FILE, of pytest's --junitxml, leaves out
the pipelines that did not pass every test there that has their name.
"""

import argparse
import math
import os
import statistics
import sys
import xml.etree.ElementTree
from typing import NamedTuple

from . import attention, providers, rows, table

UNIVERSAL = "fusedattn:triton"
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


class Cell(NamedTuple):
    """The rows of a case: {pipeline: row} of those that are right, ours for every GPU, the fastest peer; or None."""

    pipelines: dict
    universal: rows.Row | None
    peer: rows.Row | None

    @property
    def best(self) -> str | None:
        """The fastest pipeline."""
        return min(self.pipelines, key=lambda name: self.pipelines[name].ms_p50, default=None)

    def ratio(self, row) -> float | None:
        """The speed of a row over the peer's; None where one of them is not there."""
        return None if row is None or self.peer is None else self.peer.ms_p50 / row.ms_p50


def cells(written):
    """{case: Cell} of the last run."""
    found = {}
    for row in table.last_run(written):
        if row.ms_p50 != "":
            found.setdefault(table.case_of(row), []).append(row)
    return {case: _cell(timed) for case, timed in found.items()}


def _cell(timed):
    pipelines = {
        row.provider.removeprefix(providers.PIPELINE): row
        for row in timed
        if row.provider.startswith(providers.PIPELINE) and row.status == "ok"
    }
    universal = next((row for row in timed if row.provider == UNIVERSAL and row.status == "ok"), None)
    # One whose error is over our rule is a peer all the same.
    peers = [row for row in timed if not row.provider.startswith("fusedattn")]
    return Cell(pipelines, universal, min(peers, key=lambda row: row.ms_p50, default=None))


def failed(written):
    """The pipelines that some cell of the last run has no time of, or a wrong result."""
    written = [row for row in table.last_run(written) if row.provider.startswith(providers.PIPELINE)]
    return {row.provider.removeprefix(providers.PIPELINE) for row in written if row.status != "ok"}


def standings(found, out=()):
    """({pipeline: its speed over that of the fastest}, best first; how many cells) of Cells, less those that are out.

    It is the geometric mean over the cells in which all were timed.
    """
    names = dict.fromkeys(name for cell in found for name in cell.pipelines if name not in out)
    shared = [cell.pipelines for cell in found if names and names.keys() <= cell.pipelines.keys()]
    if not shared:
        return {}, 0
    fastest = [min(timed[name].ms_p50 for name in names) for timed in shared]
    speeds = {
        name: statistics.geometric_mean(
            least / timed[name].ms_p50 for least, timed in zip(fastest, shared, strict=True)
        )
        for name in names
    }
    return dict(sorted(speeds.items(), key=lambda item: -item[1])), len(shared)


def winners(written):
    """{D: the pipeline that stands first there, of those that never failed}."""
    found, out = cells(written), failed(written)
    each = {dim: standings([found[case] for case in found if case.D == dim], out)[0] for dim in _dims(found)}
    return {dim: next(iter(speeds)) for dim, speeds in each.items() if speeds}


def _dims(found):
    return dict.fromkeys(case.D for case in found)


def _beside(ratio, goal):
    """A ratio and the goal, in a column of 12."""
    text = "-" if ratio is None else f"{ratio:.2f}"
    return f"{text:>5}" + (f" ({goal:.2f})" if goal else " " * 7)


def _line(case, cell):
    name = f"d{case.D} {'causal' if case.causal else 'full'} s{case.Sq}"
    mine = cell.pipelines.get(cell.best)
    speed = "-" if mine is None else f"{mine.tflops:.4g}"
    peer = "-" if cell.peer is None else f"{cell.peer.provider} {cell.peer.tflops:.4g}"
    ratios = (cell.ratio(mine), goal(case)), (cell.ratio(cell.universal), OF_UNIVERSAL.get(case.D))
    return f"{name:<19}{cell.best or '-':<20}{speed:>8}  {'  '.join(_beside(*each) for each in ratios)}  {peer}"


def _standing(found, dim, out):
    """Lines of one width: of all its cells, of those that are causal and of those that are not."""
    for kind, causal in (("", (False, True)), (" full", (False,)), (" causal", (True,))):
        some = [found[case] for case in found if case.D == dim and case.causal in causal]
        speeds, count = standings(some, out)
        if speeds:
            said = ", ".join(f"{name} {speed:.3f}" for name, speed in speeds.items())
            yield f"d{dim}{kind}: {said} of the fastest, in {count} cells"


def _goal(what, ratios, ask):
    """Whether {case: ratio} are what ask(case) wants, as a line."""
    ratios = {case: ratio for case, ratio in ratios.items() if ratio is not None}
    if not ratios:
        return f"goal {what}: not measured"
    met = sum(ratio >= ask(case) for case, ratio in ratios.items())
    worst = min(ratios, key=lambda case: ratios[case] / ask(case))
    return f"goal {what}: met in {met} of {len(ratios)} cells, worst {ratios[worst]:.2f} ({worst.name})"


def _goals(found, first):
    """Lines: the goals, and how far they are met by the pipeline that stands first in its width."""
    mine = {case: cell.ratio(cell.pipelines.get(first.get(case.D))) for case, cell in found.items()}
    universal = {case: cell.ratio(cell.universal) for case, cell in found.items()}

    def of(ratios, meant):
        return {case: ratio for case, ratio in ratios.items() if meant(case)}

    for (dim, causal), asked in OF_HOPPER.items():
        some = of(mine, lambda case: (case.D, case.causal) == (dim, causal) and case.Sq > SHORT)  # noqa: B023
        yield _goal(f"hopper d{dim} {'causal' if causal else 'full'} S > {SHORT} >= {asked}", some, goal)
    yield _goal(f"hopper S <= {SHORT} >= {OF_SHORT}", of(mine, lambda case: case.Sq <= SHORT), goal)
    yield _goal(f"hopper everywhere >= {FLOOR}", mine, lambda case: FLOOR)
    for dim, asked in OF_UNIVERSAL.items():
        some = of(universal, lambda case: case.D == dim)  # noqa: B023
        yield _goal(f"universal d{dim} >= {asked}", some, lambda case: OF_UNIVERSAL[case.D])


def text(written):
    """The table, as it is printed."""
    last = table.last_run(written)
    if not last:
        return "no rows"
    first, found, out = last[0], cells(written), failed(written)
    ordered = sorted(found, key=lambda case: (case.D, case.causal, case.Sq))
    return "\n".join(
        [
            f"{first.gpu}, torch {first.torch}, triton {first.triton}, commit {first.commit}, {first.date}",
            *table.others(last),
            f"{'forward':<19}{'best pipeline':<20} TFLOP/s   peer (goal)     universal  best peer TFLOP/s",
            *(_line(case, found[case]) for case in ordered),
            *(line for dim in sorted(_dims(found)) for line in _standing(found, dim, out)),
            *([f"failed or refused in some cell, so out of the standings: {', '.join(sorted(out))}"] if out else []),
            *(f"first of d{dim}: {name}" for dim, name in winners(written).items()),
            "Speed over that of the best peer, by the pipeline that is first in its width:",
            *_goals(found, winners(written)),
        ]
    )


def proven(path):
    """Pipelines in names of tests that all passed, in a file of pytest's --junitxml; none where there is no file."""
    passed, others = set(), set()
    if os.path.exists(path):
        for test in xml.etree.ElementTree.parse(path).iter("testcase"):
            words = test.get("name", "").partition("[")[2].rstrip("]").split("-")
            # What is inside one is a failure, an error, or why it was skipped.
            (others if test.find("./*") is not None else passed).update(words)
    return {name for name in providers.pipelines() if name in passed - others}


def _providers(device):
    """FlexAttention is measured where it cannot run as well: a row says so."""
    peers = [name for name in providers.usual("cuda") if not name.startswith(("fusedattn", "naive", "sdpa:math"))]
    return [*(providers.PIPELINE + name for name in providers.pipelines()), UNIVERSAL, *peers]


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
    taken = {providers.PIPELINE + name for name in proven(own.tests)}

    def some(device):
        return [name for name in _providers(device) if name in taken or not name.startswith(providers.PIPELINE)]

    return attention.main(rest, QUESTION._replace(providers=some))


if __name__ == "__main__":
    sys.exit(main())
