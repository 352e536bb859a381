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
NOISE = "within noise"


class Standing(NamedTuple):
    """Ours beside others in one mode: their time over ours, in each case that both ran."""

    mode: str
    ours: str
    other: str  # a provider, or those that were the fastest other of a case, most often first
    ratios: list[float]
    told: list[bool]  # of each, whether it is more than the noise of the two times

    @property
    def median(self) -> float:
        return statistics.median(self.ratios)

    @property
    def faster(self) -> int:
        """In how many cases ours is, beyond the noise."""
        return sum(ratio > 1.0 and told for ratio, told in zip(self.ratios, self.told, strict=True))

    @property
    def clear(self) -> bool:
        """Whether most ratios are more than noise."""
        return 2 * sum(self.told) > len(self.told)


class Judged(NamedTuple):
    """Rows whose ms_p50 is the time that they are judged by, between ms_p20 and ms_p80; why that is not the median."""

    rows: list[Row]
    why: str = ""


def judged(rows: Sequence[Row], busy: bool = False) -> Judged:
    """Rows as they were measured; or, of a machine that other work disturbs, by the least time of each.

    Other work makes times longer, never shorter: the least is the nearest to what a quiet machine takes.
    """
    unsteady = sum(row.ms_p50 != "" and row.ms_p80 > UNSTEADY * row.ms_p20 for row in rows)
    if unsteady > len(rows) / 10:
        why = f"{unsteady} of {len(rows)} times vary by more than half: other work on this machine disturbs them."
    elif busy:
        why = "Other work keeps this machine busy."
    else:
        return Judged(list(rows))
    return Judged([_by_the_least(row) for row in rows], f"{why} Each is judged by the least of its repeats.")


def _by_the_least(row):
    if row.ms_p50 == "" or row.ms_min == "":
        return row
    faster = {name: getattr(row, name) for name in ("tflops", "gbps")}
    faster = {name: each if each == "" else each * row.ms_p50 / row.ms_min for name, each in faster.items()}
    return row._replace(ms_p20=row.ms_min, ms_p50=row.ms_min, ms_p80=row.ms_p50, **faster)


def told(one: Row, other: Row) -> bool:
    """Whether two times differ by more than their noise: the ranges in which they vary do not meet."""
    return one.ms_p80 < other.ms_p20 or other.ms_p80 < one.ms_p20


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
        against = [(mine, peer) for (mine, _), peer in zip(pairs, peers, strict=True)]
        best.append(_standing(mode, ours, _often(peer.provider for peer in peers), against))
        for name in dict.fromkeys(row.provider for _, others in pairs for row in others):
            against = [(mine, row) for mine, others in pairs for row in others if row.provider == name]
            each.append(_standing(mode, ours, name, against))
    return best, each


def _standing(mode, ours, other, pairs):
    ratios = [theirs.ms_p50 / mine.ms_p50 for mine, theirs in pairs]
    return Standing(mode, ours, other, ratios, [told(mine, theirs) for mine, theirs in pairs])


def words(ratio: float, told: bool = True) -> str:
    """Their time over ours, as it is read; of one that noise may have made no number."""
    if not told:
        return NOISE
    if f"{ratio:.2f}" == "1.00":
        return "as fast"
    return f"{ratio:.2f}x faster" if ratio > 1 else f"{1 / ratio:.2f}x slower"


def wrong(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """(ours, those of others) whose result is not within the tolerance."""
    found = [row for row in rows if row.status == "wrong"]
    return [row for row in found if is_ours(row)], [row for row in found if not is_ours(row)]


def sentences(found: Judged) -> list[str]:
    """The verdict in plain words."""
    rows = found.rows
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
    if found.why:
        lines.append(found.why)
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
    if standing and not standing.clear:
        if len(standing.told) == 1:
            return f"{mode}: {standing.ours} and the fastest other, {standing.other}, differ by no more than noise."
        noisy = len(standing.told) - sum(standing.told)
        return (
            f"{mode}: {standing.ours} and the fastest other of each case ({standing.other}) differ by no more than "
            f"noise in {noisy} of {len(standing.told)} cases. It is the fastest of all in {standing.faster}."
        )
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
