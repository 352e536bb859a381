"""What rows say: how fast ours is beside each other provider and the fastest of a case, and whether it is right."""

import collections
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from ...bench import plots, table
from ...bench.plots import is_ours
from ...bench.rows import Row

NAIVE = "On a CPU fusedattn is its naive path: this says nothing about its kernels, which need an NVIDIA GPU."
UNSTEADY = 1.5  # 80% quantile of times over the 20% one that a quiet machine stays below


class Standing(NamedTuple):
    """Ours beside others in one mode: their time over ours, in each case that both ran."""

    mode: str
    ours: str
    other: str  # a provider, or those that were the fastest other of a case, most often first
    ratios: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.ratios)

    @property
    def faster(self) -> int:
        """In how many cases ours is."""
        return sum(ratio > 1.0 for ratio in self.ratios)


def fastest(rows: Sequence[Row]) -> Row | None:
    """The fastest of those that were timed. One of ours has to be right; that an error of others is over our rule
    does not make them slower."""
    timed = [row for row in rows if row.ms_p50 != "" and not (is_ours(row) and row.status == "wrong")]
    return min(timed, key=lambda row: row.ms_p50, default=None)


def groups(rows: Sequence[Row]) -> dict[tuple, list[Row]]:
    """{(mode, case): its rows}, a mode after the other, in each a line of a picture after the other, short to long."""
    found = collections.defaultdict(list)
    for row in rows:
        found[row.mode, table.case_of(row)].append(row)
    modes = list(dict.fromkeys(mode for mode, _ in found))
    kinds = list(dict.fromkeys(plots.kind(case) for _, case in found))

    def place(key):
        mode, case = key
        return modes.index(mode), kinds.index(plots.kind(case)), case.Sk

    return {key: found[key] for key in sorted(found, key=place)}


def standings(rows: Sequence[Row]) -> tuple[list[Standing], list[Standing]]:
    """(beside the fastest other of each case, one a mode; beside each other provider, one a mode and provider)."""
    cells: dict[str, list[tuple[Row, list[Row]]]] = collections.defaultdict(list)
    for (mode, _), some in groups(rows).items():
        mine = fastest([row for row in some if is_ours(row)])
        others = [row for row in some if not is_ours(row) and row.ms_p50 != ""]
        if mine and others:
            cells[mode].append((mine, others))
    best, each = [], []
    for mode, pairs in cells.items():
        ours = _often(mine.provider for mine, _ in pairs)
        peers = [min(others, key=lambda row: row.ms_p50) for _, others in pairs]
        ratios = [peer.ms_p50 / mine.ms_p50 for (mine, _), peer in zip(pairs, peers, strict=True)]
        best.append(Standing(mode, ours, _often(peer.provider for peer in peers), ratios))
        for name in dict.fromkeys(row.provider for _, others in pairs for row in others):
            ratios = [row.ms_p50 / mine.ms_p50 for mine, others in pairs for row in others if row.provider == name]
            each.append(Standing(mode, ours, name, ratios))
    return best, each


def words(ratio: float) -> str:
    """Their time over ours, as it is read."""
    if f"{ratio:.2f}" == "1.00":
        return "as fast"
    return f"{ratio:.2f}x faster" if ratio > 1 else f"{1 / ratio:.2f}x slower"


def wrong(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """(ours, those of others) whose result is not within the tolerance."""
    found = [row for row in rows if row.status == "wrong"]
    return [row for row in found if is_ours(row)], [row for row in found if not is_ours(row)]


def sentences(rows: Sequence[Row]) -> list[str]:
    """The verdict in plain words."""
    best = {one.mode: one for one in standings(rows)[0]}
    lines = [_speed(mode, best.get(mode), rows) for mode in dict.fromkeys(row.mode for row in rows)]
    judged = [row for row in rows if row.status in ("ok", "wrong")]
    of_ours, (mine, others) = sum(map(is_ours, judged)), wrong(rows)
    if of_ours:
        bad = f"; {len(mine)} WRONG" if mine else ""
        right = f"{of_ours - len(mine)} of {count(of_ours, 'result')}"
        lines.append(f"fusedattn: {right} right, by the rule of its tests against float64{bad}.")
    if others:
        lines.append(f"Others: {len(others)} of {count(len(judged) - of_ours, 'result')} not right by that rule.")
    unsteady = [row for row in rows if row.ms_p50 != "" and row.ms_p80 > UNSTEADY * row.ms_p20]
    if len(unsteady) > len(rows) / 10:
        lines.append(
            f"{len(unsteady)} of {len(rows)} times vary by more than half: other work on this machine disturbs them."
        )
    missing = sum(row.ms_p50 == "" for row in rows)
    if missing:
        lines.append(f"{missing} of {len(rows)} could not be measured; their rows say why.")
    if any(row.gpu == "cpu" and is_ours(row) for row in rows):
        lines.append(NAIVE)
    return lines


def count(number: int, of: str) -> str:
    return f"{number} {of}{'s' * (number != 1)}"


def _speed(mode, standing, rows):
    some = [row for row in rows if row.mode == mode]
    if standing:
        speed, cases = words(standing.median), len(standing.ratios)
        speed += " as" if speed == "as fast" else " than"
        if cases == 1:
            return f"{mode}: {standing.ours} is {speed} the fastest other, {standing.other}."
        return (
            f"{mode}: {standing.ours} is {speed} the fastest other of each case ({standing.other}), by the median of "
            f"{cases} cases. It is the fastest of all in {standing.faster}."
        )
    if all(is_ours(row) for row in some):
        return f"{mode}: there is no other to compare with."
    if any(is_ours(row) for row in some):
        return f"{mode}: nothing to compare: no case has both a right result of fusedattn and a time of another."
    winners = [fastest(of_case) for of_case in groups(some).values()]
    return f"{mode}: the fastest of each case: {_often(row.provider for row in winners if row) or 'none'}."


def _often(names):
    """Names, the most frequent first."""
    return ", ".join(name for name, _ in collections.Counter(names).most_common())
