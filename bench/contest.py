"""Forms of one of our kernels side by side, with another of ours and the peers: cells, standings, goals."""

import statistics
from typing import NamedTuple

from . import rows, table


class Contest(NamedTuple):
    """What a contest is of: names of forms begin with `prefix` as providers; `other` is ours that they are to beat."""

    prefix: str
    other: str


class Cell(NamedTuple):
    """The rows of a case: {form: row} of those that are right, the other of ours, the fastest peer; or None.

    peers are all of them, by their names.
    """

    forms: dict
    other: rows.Row | None
    peer: rows.Row | None
    peers: dict

    @property
    def best(self) -> str | None:
        """The fastest form."""
        return min(self.forms, key=lambda name: self.forms[name].ms_p50, default=None)

    def ratio(self, row, peer=None) -> float | None:
        """The speed of a row over that of a peer, by default the fastest; None where one of them is not there."""
        peer = self.peers.get(peer) if peer else self.peer
        return None if row is None or peer is None else peer.ms_p50 / row.ms_p50


def cells(written, contest):
    """{case: Cell} of the last run."""
    found = {}
    for row in table.last_run(written):
        if row.ms_p50 != "":
            found.setdefault(table.case_of(row), []).append(row)
    return {case: _cell(timed, contest) for case, timed in found.items()}


def _cell(timed, contest):
    right = [row for row in timed if row.status == "ok"]
    forms = {row.provider.removeprefix(contest.prefix): row for row in right if row.provider.startswith(contest.prefix)}
    other = next((row for row in right if row.provider == contest.other), None)
    # One whose error is over our rule is a peer all the same.
    peers = {row.provider: row for row in timed if not row.provider.startswith("fusedattn")}
    return Cell(forms, other, min(peers.values(), key=lambda row: row.ms_p50, default=None), peers)


def failed(written, contest):
    """The forms that some cell of the last run has no time of, or a wrong result."""
    written = [row for row in table.last_run(written) if row.provider.startswith(contest.prefix)]
    return {row.provider.removeprefix(contest.prefix) for row in written if row.status != "ok"}


def standings(found, out=()):
    """({form: its speed over that of the fastest}, best first; how many cells) of Cells, less those that are out.

    It is the geometric mean over the cells in which all were timed.
    """
    names = dict.fromkeys(name for cell in found for name in cell.forms if name not in out)
    shared = [cell.forms for cell in found if names and names.keys() <= cell.forms.keys()]
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


def winners(written, contest):
    """{D: the form that stands first there, of those that never failed}."""
    found, out = cells(written, contest), failed(written, contest)
    each = {dim: standings([found[case] for case in found if case.D == dim], out)[0] for dim in _dims(found)}
    return {dim: next(iter(speeds)) for dim, speeds in each.items() if speeds}


def _dims(found):
    return dict.fromkeys(case.D for case in found)


def beside(ratio, goal):
    """A ratio and the goal, in a column of 12."""
    text = "-" if ratio is None else f"{ratio:.2f}"
    return f"{text:>5}" + (f" ({goal:.2f})" if goal else " " * 7)


def line(case, cell, ratios):
    """A line of the table: the best form of a cell, ratios with their goals, the best peer."""
    name = f"d{case.D} {'causal' if case.causal else 'full'} s{case.Sq}"
    mine = cell.forms.get(cell.best)
    speed = "-" if mine is None else f"{mine.tflops:.4g}"
    peer = "-" if cell.peer is None else f"{cell.peer.provider} {cell.peer.tflops:.4g}"
    return f"{name:<19}{cell.best or '-':<20}{speed:>8}  {'  '.join(beside(*each) for each in ratios)}  {peer}"


def _standing(found, dim, out):
    """Lines of one width: of all its cells, of those that are causal and of those that are not."""
    for kind, causal in (("", (False, True)), (" full", (False,)), (" causal", (True,))):
        some = [found[case] for case in found if case.D == dim and case.causal in causal]
        speeds, count = standings(some, out)
        if speeds:
            said = ", ".join(f"{name} {speed:.3f}" for name, speed in speeds.items())
            yield f"d{dim}{kind}: {said} of the fastest, in {count} cells"


def goal(what, ratios, ask):
    """Whether {case: ratio} are what ask(case) wants, as a line."""
    ratios = {case: ratio for case, ratio in ratios.items() if ratio is not None}
    if not ratios:
        return f"goal {what}: not measured"
    met = sum(ratio >= ask(case) for case, ratio in ratios.items())
    worst = min(ratios, key=lambda case: ratios[case] / ask(case))
    return f"goal {what}: met in {met} of {len(ratios)} cells, worst {ratios[worst]:.2f} ({worst.name})"


def text(written, contest, header, show, goals):
    """What is printed: a line a cell by show(case, cell), the standings, and goals(cells, first of each width)."""
    last = table.last_run(written)
    if not last:
        return "no rows"
    first, found, out = last[0], cells(written, contest), failed(written, contest)
    ordered, win = sorted(found, key=lambda case: (case.D, case.causal, case.Sq)), winners(written, contest)
    return "\n".join(
        [
            f"{first.gpu}, torch {first.torch}, triton {first.triton}, commit {first.commit}, {first.date}",
            *table.others(last),
            header,
            *(show(case, found[case]) for case in ordered),
            *(each for dim in sorted(_dims(found)) for each in _standing(found, dim, out)),
            *([f"failed or refused in some cell, so out of the standings: {', '.join(sorted(out))}"] if out else []),
            *(f"first of d{dim}: {name}" for dim, name in win.items()),
            "Speed over that of the best peer, by the one that is first in its width:",
            *goals(found, win),
        ]
    )
