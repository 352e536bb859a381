"""Rows as text: a table, ratios within a run, and the verdict in words.

A wrong row of ours is in no ratio. A peer whose error is over our rule is a peer all the same.
"""

import collections
import math
import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .cases import Case
from .rows import Row

ON_A_CPU = "This is fusedattn on a CPU: this says nothing about its kernels, which need an NVIDIA GPU."
RATIO, MORE_US = 1.10, 100.0  # on a CPU: a call takes at most RATIO of PyTorch's time, or MORE_US more


def reason(row: Row) -> str:
    """Return why a row has no time."""
    return "out of memory" if row.status == "oom" else row.status.removeprefix("unsupported: ")


def is_ours(row: Row) -> bool:
    return row.provider.startswith("fusedattn")


def fastest(rows: Sequence[Row], ours: bool) -> Row | None:
    """Return the fastest timed row of ours, of right results alone, or of the others."""
    usable = (row for row in rows if row.ms_p50 != "" and is_ours(row) == ours and not (ours and row.status == "wrong"))
    return min(usable, key=lambda row: row.ms_p50, default=None)


def kind(case: Case) -> Case:
    """Return a case without batch and length: what the points of one line of a plot share."""
    return case._replace(B=0, Sq=0 if case.Sq == case.Sk else case.Sq, Sk=0)


def unit(rows: Sequence[Row]) -> tuple[str, float]:
    """Return (the unit of speed that fits the rows, how many of it are a TFLOP/s)."""
    most = max((row.tflops for row in rows if row.tflops != ""), default=1.0)
    return ("TFLOP/s", 1.0) if most >= 1.0 else ("GFLOP/s", 1e3)


def groups(rows: Sequence[Row]) -> dict[tuple[str, Case], list[Row]]:
    """Return {(mode, case): its rows}, by mode, then by kind, then from short to long."""
    grouped = collections.defaultdict(list)
    for row in rows:
        grouped[row.mode, row.case].append(row)
    order = {name: place for place, name in enumerate(dict.fromkeys(x for m, c in grouped for x in (m, kind(c))))}
    return dict(sorted(grouped.items(), key=lambda one: (order[one[0][0]], order[kind(one[0][1])], one[0][1].Sk)))


def differ(one: Row, other: Row) -> bool:
    """Return whether the ranges in which two times vary do not overlap."""
    return one.ms_p80 < other.ms_p20 or other.ms_p80 < one.ms_p20


def words(ratio: float, clear: bool = True) -> str:
    """Return the time of a peer over ours in words, without a number where the difference is not clear."""
    if not clear:
        return "within noise"
    if f"{ratio:.2f}" == "1.00":
        return "as fast"
    return f"{ratio:.2f}x faster" if ratio > 1 else f"{1 / ratio:.2f}x slower"


def error(number: float) -> str:
    """Return an error in few letters: 3.6e-4."""
    if not math.isfinite(number) or number == 0.0:
        return f"{number:.0f}"
    digits, exponent = f"{number:.1e}".split("e")
    return f"{digits}e{int(exponent)}"


def count(number: int, of: str) -> str:
    return f"{number} {of}{'s' * (number != 1)}"


class Standing(NamedTuple):
    """Ours beside another provider in one mode: its time over ours, in the cases that both ran."""

    mode: str
    ours: str
    other: str  # or several: the fastest other of each case, most often first
    ratios: list[float]
    clear: list[bool]  # whether the two times of a ratio `differ`

    @property
    def text(self) -> str:
        return words(statistics.median(self.ratios), 2 * sum(self.clear) > len(self.clear))

    def answer(self) -> dict:
        """Return the fields of a JSON object."""
        clear = [ratio for ratio, is_clear in zip(self.ratios, self.clear, strict=True) if is_clear]
        return dict(
            mode=self.mode, ours=self.ours, other=self.other, cases=len(self.ratios),
            faster=sum(ratio > 1 for ratio in clear), within_noise=len(self.ratios) - len(clear),
            median=statistics.median(self.ratios), least=min(self.ratios), most=max(self.ratios),
        )  # fmt: skip


def standings(rows: Sequence[Row]) -> tuple[list[Standing], list[Standing]]:
    """Return (a Standing a mode beside the fastest other of each case, a Standing a mode and other provider)."""
    best, each = collections.defaultdict(list), collections.defaultdict(list)
    for (mode, _), some in groups(rows).items():
        mine, other = fastest(some, ours=True), fastest(some, ours=False)
        if mine and other:
            best[mode].append((mine, other))
            for row in some:
                if not is_ours(row) and row.ms_p50 != "":
                    each[mode, row.provider].append((mine, row))
    return list(map(_standing, best.values())), list(map(_standing, each.values()))


def _standing(pairs):
    names = (collections.Counter(row.provider for row in some).most_common() for some in zip(*pairs, strict=True))
    ours, others = (", ".join(name for name, _ in each) for each in names)
    ratios = [other.ms_p50 / mine.ms_p50 for mine, other in pairs]
    return Standing(pairs[0][0].mode, ours, others, ratios, [differ(*pair) for pair in pairs])


def lines(rows: Sequence[Row], whys: Sequence[str] = ()) -> Iterator[str]:
    """Yield the text of a run: a line a row, by mode and case, ratios, what is wrong, and the verdict."""
    wide, (speed, factor), last = max((len(row.provider) for row in rows), default=0), unit(rows), ""
    for (mode, case), some in groups(rows).items():
        if mode != last:
            heads = "".join(f"{head:>10}" for head in ("ms", speed, "GB/s", "MiB"))
            yield f"\n{mode.upper().replace('_', ' + '):<{wide + 2}}{heads}{'fusedattn is':>16}{'error':>9}"
            last = mode
        yield case.name
        mine = fastest(some, ours=True)
        for row in some:
            if row.ms_p50 == "":
                yield f"  {row.provider:<{wide}}   {reason(row)}"
                continue
            numbers = row.ms_p50, factor * row.tflops, row.gbps, row.peak_mib
            cells = "".join(f"{'' if x == '' else format(x, '.4g'):>10}" for x in numbers)
            beside = "" if mine is None or is_ours(row) else words(row.ms_p50 / mine.ms_p50, differ(row, mine))
            right = {"wrong": "FAIL"}.get(row.status, reason(row))
            found = "" if row.err_max == "" else error(row.err_max)
            yield f"  {row.provider:<{wide}}{cells}{beside:>16}{found:>9} {right}"
    yield "\nCases are B,Hq,Hkv,Sq,Sk,D; ms is the median; error the largest, from float64.\n"
    best, each = standings(rows)
    for one in each:
        cases = count(len(one.ratios), "case")
        yield f"{one.mode}: beside {one.other} {one.ours} is {one.text}, by the median of {cases}"
    for row, why in zip(rows, whys, strict=False):
        if why:
            yield f"FAIL {row.provider}, {row.mode}, {row.case.name}: {why}"
    yield from sentences(rows, best)


def wrong(rows: Sequence[Row]) -> list[Row]:
    """Return our rows whose result is not within the tolerance."""
    return [row for row in rows if row.status == "wrong" and is_ours(row)]


def sentences(rows: Sequence[Row], best: Sequence[Standing]) -> list[str]:
    """Return the verdict in plain words."""
    said = []
    for mode in dict.fromkeys(row.mode for row in rows):
        one = next((one for one in best if one.mode == mode), None)
        if one is None:
            said.append(f"{mode}: nothing to compare: no case has both a right result of fusedattn and another's time.")
        else:
            about, cases = one.answer(), count(len(one.ratios), "case")
            said.append(f"{mode}: {one.ours} is {one.text} beside the fastest other of each case ({one.other}).")
            if len(one.ratios) > 1:
                said[-1] += f" Clearly faster in {about['faster']} of {cases}, within noise in {about['within_noise']}."
    held = [row for row in rows if row.status in ("ok", "wrong")]
    ours, bad = sum(map(is_ours, held)), len(wrong(rows))
    if ours:
        right = f"{ours - bad} of {count(ours, 'result')}"
        said.append(
            f"fusedattn: {right} right, by the rule of its tests against float64{f'; {bad} WRONG' * bool(bad)}."
        )
    others = sum(row.status == "wrong" for row in held) - bad
    said += [f"Others: {others} of {count(len(held) - ours, 'result')} not right by that rule."] * bool(others)
    missing = sum(row.ms_p50 == "" for row in rows)
    said += [f"{missing} of {count(len(rows), 'row')} could not be measured; their lines say why."] * bool(missing)
    if any(row.gpu == "cpu" and is_ours(row) for row in rows):
        said.append(ON_A_CPU)
    return said


def over_promise(rows: Sequence[Row]) -> list[str]:
    """Return the CPU calls that take longer than they may."""
    over = []
    for (mode, case), some in groups(rows).items():
        mine, other = fastest(some, ours=True), fastest([x for x in some if x.provider != "naive"], ours=False)
        if mine and other:
            allowed = max(RATIO * other.ms_p50, other.ms_p50 + MORE_US / 1e3)
            if mine.ms_p50 > allowed:
                over.append(
                    f"{case.name} {mode}: {mine.ms_p50:.3f} ms beside {other.ms_p50:.3f} ms of {other.provider}"
                )
    return over
