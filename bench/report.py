"""Rows of a CSV as a table and sentences: the one reporter of `fusedattn bench` and `python -m fusedattn.bench`.

A row of ours that is wrong is in no ratio. A peer whose error is over our rule is a peer all the same.
"""

import collections
import fnmatch
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from fusedattn.cli.screen import error, tick

from . import cost
from .cases import DTYPES, Case
from .rows import Row, last_run

ON_A_CPU = "This is fusedattn on a CPU: this says nothing about its kernels, which need an NVIDIA GPU."
DISTURBED = 2.5  # where other work runs, all repeats of a step may take up to this many times as long: 2.1 was seen
UNSTEADY = 1.5  # a quiet machine's 80% quantile of times is below this many of its 20% quantile
LONG = 2048  # tokens from which on the goals are


def reason(row: Row) -> str:
    """Why a row has no time."""
    return "out of memory" if row.status == "oom" else row.status.removeprefix("unsupported: ")


def is_ours(row: Row) -> bool:
    return row.provider.startswith("fusedattn")


def fastest(rows: Sequence[Row], *patterns: str) -> Row | None:
    """The fastest of the rows that were timed, of ours of those that are right; patterns are of providers."""
    usable = (row for row in rows if row.ms_p50 != "" and not (is_ours(row) and row.status == "wrong"))
    matching = (row for row in usable if any(fnmatch.fnmatchcase(row.provider, one) for one in patterns or "*"))
    return min(matching, key=lambda row: row.ms_p50, default=None)


def kind(case: Case) -> Case:
    """What the points of one line of a plot share: all of a case but its batch and its length."""
    return case._replace(B=0, Sq=0 if case.Sq == case.Sk else case.Sq, Sk=0)


def unit(rows: Sequence[Row]) -> tuple[str, float]:
    """(the unit that fits the speeds of rows, how many of it are a TFLOP/s)."""
    most = max((row.tflops for row in rows if row.tflops != ""), default=1.0)
    return ("TFLOP/s", 1.0) if most >= 1.0 else ("GFLOP/s", 1e3)


def groups(rows: Sequence[Row]) -> dict[tuple[str, Case], list[Row]]:
    """{(mode, case): its rows}, sorted by mode, then by kind, then from short to long."""
    grouped = collections.defaultdict(list)
    for row in rows:
        grouped[row.mode, row.case].append(row)
    order = {name: place for place, name in enumerate(dict.fromkeys(x for m, c in grouped for x in (m, kind(c))))}
    return dict(sorted(grouped.items(), key=lambda one: (order[one[0][0]], order[kind(one[0][1])], one[0][1].Sk)))


class Judged(NamedTuple):
    """Rows whose ms_p50 is the time that they are judged by, between ms_p20 and ms_p80; why that is not the median."""

    rows: list[Row]
    why: str = ""


def judged(rows: Sequence[Row], busy: bool = False) -> Judged:
    """The rows as they were measured; or, of a machine that other work disturbs, with the least time of each.

    Other work makes times longer, never shorter: the least is the nearest to the time on a quiet machine.
    """
    unsteady = sum(row.ms_p50 != "" and row.ms_p80 > UNSTEADY * row.ms_p20 for row in rows)
    if unsteady > len(rows) / 10:
        why = f"{unsteady} of {len(rows)} times vary by more than half: other work on this machine disturbs them."
    elif busy:
        why = "Other work keeps this machine busy."
    else:
        return Judged(list(rows))
    least = [row if "" in (row.ms_p50, row.ms_min) else _by_the_least(row) for row in rows]
    return Judged(least, f"{why} Each is judged by the least of its repeats, and up to {DISTURBED:g} times is noise.")


def _by_the_least(row):
    faster = row.ms_p50 / row.ms_min
    rates = {name: rate and rate * faster for name, rate in (("tflops", row.tflops), ("gbps", row.gbps))}
    most = max(row.ms_p50, DISTURBED * row.ms_min)
    return row._replace(ms_p20=row.ms_min, ms_p50=row.ms_min, ms_p80=most, **rates)


def differ(one: Row, other: Row) -> bool:
    """Whether the ranges in which two times vary do not overlap."""
    return one.ms_p80 < other.ms_p20 or other.ms_p80 < one.ms_p20


def words(ratio: float, clear: bool = True) -> str:
    """The time of a peer over ours, in words; no number for a difference that is not clear."""
    if not clear:
        return "within noise"
    if f"{ratio:.2f}" == "1.00":
        return "as fast"
    return f"{ratio:.2f}x faster" if ratio > 1 else f"{1 / ratio:.2f}x slower"


class Standing(NamedTuple):
    """Ours beside others in one mode: their time over ours, in the cases that both ran."""

    mode: str
    ours: str
    other: str  # a provider, or those that were the fastest other of a case, most often first
    ratios: list[float]
    clear: list[bool]  # whether the two times of a ratio `differ`

    @property
    def median(self) -> float:
        return statistics.median(self.ratios)

    @property
    def faster(self) -> int:
        """In how many cases ours is clearly faster."""
        return sum(ratio > 1.0 and clear for ratio, clear in zip(self.ratios, self.clear, strict=True))

    @property
    def slower(self) -> int:
        """In how many cases ours is clearly slower."""
        return sum(ratio < 1.0 and clear for ratio, clear in zip(self.ratios, self.clear, strict=True))

    @property
    def is_clear(self) -> bool:
        """Whether most ratios are."""
        return 2 * sum(self.clear) > len(self.clear)


def standings(rows: Sequence[Row]) -> tuple[list[Standing], list[Standing]]:
    """(beside the fastest other of a case, one a mode; beside each other provider, one a mode and provider)."""
    best, each = collections.defaultdict(list), collections.defaultdict(list)
    for (mode, _), some in groups(rows).items():
        mine = fastest(some, "fusedattn*")
        others = [row for row in some if not is_ours(row) and row.ms_p50 != ""]
        if mine and others:
            best[mode].append((mine, min(others, key=lambda row: row.ms_p50)))
            for row in others:
                each[mode, row.provider].append((mine, row))
    return list(map(_standing, best.values())), list(map(_standing, each.values()))


def _standing(pairs):
    ours, others = (_often(row.provider for row in some) for some in zip(*pairs, strict=True))
    ratios = [other.ms_p50 / mine.ms_p50 for mine, other in pairs]
    return Standing(pairs[0][0].mode, ours, others, ratios, [differ(*pair) for pair in pairs])


def _often(names):
    """Names, the most frequent first."""
    return ", ".join(name for name, _ in collections.Counter(names).most_common())


class Goal(NamedTuple):
    """What a question asks of ours: value(case, its rows) of a mode, where it is known, against a number."""

    said: str
    ask: float
    value: Callable[[Case, list[Row]], float | None]
    mode: str = "forward"
    where: Callable[[Case], bool] = lambda case: True
    at_most: bool = False

    def line(self, rows: Sequence[Row]) -> str:
        """Whether the goal is met in the last run, as a sentence."""
        asked = ((case, some) for (mode, case), some in groups(rows).items() if mode == self.mode and self.where(case))
        values = {case: value for case, some in asked if (value := self.value(case, some)) is not None}
        said = f"goal {self.said} {'<=' if self.at_most else '>='} {self.ask:g}"
        if not values:
            return f"{said}: not measured"
        met = sum(value <= self.ask if self.at_most else value >= self.ask for value in values.values())
        worst = (max if self.at_most else min)(values, key=lambda case: values[case])
        median = statistics.median(values.values())
        number = f"met in {met} of {count(len(values), 'case')}, median {median:.3f}, worst {values[worst]:.3f}"
        return f"{said}: {number} ({worst.name})"


def over(*peers: str, mine: str = "fusedattn:*") -> Callable:
    """The value of a Goal: the time of the fastest peer of some patterns, or of all others, over that of ours."""

    def value(case, rows):
        others = rows if peers else [row for row in rows if not is_ours(row)]
        ours, other = fastest(rows, mine), fastest(others, *peers)
        return None if ours is None or other is None else other.ms_p50 / ours.ms_p50

    return value


def held(row: Row) -> float:
    """MiB in memory at the peak of a step, query, key and value included."""
    return row.peak_mib + cost.held(row.case) / 2**20


def over_ideal(case: Case, rows: list[Row]) -> float | None:
    """The value of a Goal: memory at the peak of ours over the least there can be."""
    mine = fastest(rows, "fusedattn:*")
    return None if mine is None or mine.peak_mib == "" else held(mine) * 2**20 / cost.ideal(case, mine.mode)


def shares(row: Row) -> tuple[float | None, float | None]:
    """(the share of the machine's products that a row reached, the share of its copies); None is not known."""
    return (
        row.tflops / row.matmul_tflops if row.matmul_tflops and row.tflops else None,
        row.gbps / row.copy_gbps if row.copy_gbps and row.gbps else None,
    )


def lines(judged: Judged, whys: Sequence[str] = (), goals: Sequence[Goal] = ()) -> Iterator[tuple[str, str | None]]:
    """(text, style of rich) of a run: a line a row, by mode and case; ratios; what is wrong; goals; the verdict."""
    rows, last = judged.rows, ""
    wide = max((len(row.provider) for row in rows), default=0)
    (speed, factor), shown = unit(rows), [name for name, column in _COLUMNS.items() if any(map(column, rows))]
    for (mode, case), some in groups(rows).items():
        if mode != last:
            heads = ["ms", speed, *shown, "fusedattn is", "error"]
            yield "", None
            yield f"{mode.upper().replace('_', ' + '):<{wide + 2}}{_cells(heads)}", "bold"
            last = mode
        yield case.name, "underline"
        best, mine = fastest(some), fastest(some, "fusedattn*")
        for row in some:
            text, style = _beside(row, mine, row is best, shown, factor)
            yield f"  {row.provider:<{wide}}{text}".rstrip(), style
    if rows:
        clock = " of CPU time, all threads together, wall the caller's" * ("wall" in shown)
        middle = "the least" if judged.why else "the median"
        note = f"ms is {middle}{clock}; error the largest, from float64; {tick()} is right."
        yield from (("", None), (f"Cases are B,Hq,Hkv,Sq,Sk,D; {note}", None), ("", None))
    ceilings = {row.dtype: row for row in rows if row.matmul_tflops != ""}
    if "matmul" in shown and ceilings:
        reached = [f"{DTYPES.get(x, x)} products {row.matmul_tflops:.4g} TFLOP/s" for x, row in ceilings.items()]
        copies = next(iter(ceilings.values())).copy_gbps
        yield f"This machine reached: {', '.join(reached)}, copies {copies:.4g} GB/s.", None
    yield from ((line, None) for line in _ratios(standings(rows)[1]))
    for row, why in zip(rows, whys, strict=False):
        if why:
            yield f"FAIL {row.provider}, {row.mode}, {row.case.name}: {why}", "red"
    yield from ((goal.line(rows), None) for goal in goals)
    yield from ((line, "bold red" if "WRONG" in line else "bold") for line in sentences(judged))


def _milliseconds(number):
    return "" if number == "" else f"{number:.{4 if number < 1 else 3}f}"


def _share(place):
    """The text of one of `shares`; of a machine that tells no memory at the peak, a CPU, they say little."""

    def column(row):
        share = shares(row)[place]
        return "" if share is None or row.peak_mib == "" else f"{share:.0%}"

    return column


# {head: text of a row} of columns that are shown where some row has them.
_COLUMNS = {
    "wall": lambda row: _milliseconds(row.ms_wall),
    "MiB": lambda row: "" if row.peak_mib == "" else f"{row.peak_mib:,.0f}",
    "matmul": _share(0),
    "copy": _share(1),
}


def _cells(texts):
    """Texts in columns, the last but one wide enough for how much faster something is."""
    *numbers, beside, error = texts
    return "".join(f"{text:>10}" for text in numbers) + f"{beside:>16}{error:>9}"


def _beside(row, mine, is_best, shown, factor):
    """(the text beside a provider, its style); shown: names of _COLUMNS."""
    if row.ms_p50 == "":
        return f"   {reason(row)}", "yellow"
    numbers = [_milliseconds(row.ms_p50), "" if row.tflops == "" else f"{factor * row.tflops:.1f}"]
    numbers += [_COLUMNS[name](row) for name in shown]
    beside = "" if mine is None or is_ours(row) else words(row.ms_p50 / mine.ms_p50, differ(row, mine))
    cells = _cells([*numbers, beside, "" if row.err_max == "" else error(row.err_max)])
    right = {"ok": tick(), "wrong": "FAIL"}.get(row.status, reason(row))
    style = "bold red" if row.status == "wrong" else "bold green" if is_best else None
    return f"{cells} {right}{' fastest' * is_best}", style


def _ratios(each):
    """Lines: how fast ours is beside each provider, a column a mode."""
    cells = {(one.other, one.mode): words(one.median, one.is_clear) for one in each}
    others, modes = (list(dict.fromkeys(names)) for names in zip(*cells, strict=True)) if cells else ([], [])
    wide = max(map(len, ["beside", *others])) + 2
    table = {"beside": modes} | {name: [cells.get((name, mode), "") for mode in modes] for name in others}
    if others:
        yield "fusedattn, median of the cases"
        yield from (f"    {x:<{wide}}{''.join(f'{text:<18}' for text in texts)}".rstrip() for x, texts in table.items())
        yield ""


def wrong(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """(ours, those of others) whose result is not within the tolerance."""
    bad = [row for row in rows if row.status == "wrong"]
    return [row for row in bad if is_ours(row)], [row for row in bad if not is_ours(row)]


def sentences(judged: Judged) -> list[str]:
    """The verdict in plain words."""
    rows = judged.rows
    best = {one.mode: one for one in standings(rows)[0]}
    lines = [_speed(mode, best.get(mode), rows) for mode in dict.fromkeys(row.mode for row in rows)]
    held = [row for row in rows if row.status in ("ok", "wrong")]
    of_ours, (mine, others) = sum(map(is_ours, held)), wrong(rows)
    if of_ours:
        bad = f"; {len(mine)} WRONG" if mine else ""
        right = f"{of_ours - len(mine)} of {count(of_ours, 'result')}"
        lines.append(f"fusedattn: {right} right, by the rule of its tests against float64{bad}.")
    if others:
        lines.append(f"Others: {len(others)} of {count(len(held) - of_ours, 'result')} not right by that rule.")
    missing = sum(row.ms_p50 == "" for row in rows)
    lines += [judged.why] * bool(judged.why)
    lines += [f"{missing} of {len(rows)} could not be measured; their rows say why."] * bool(missing)
    return lines + [ON_A_CPU] * any(row.gpu == "cpu" and is_ours(row) for row in rows)


def count(number: int, of: str) -> str:
    return f"{number} {of}{'s' * (number != 1)}"


def _speed(mode, standing, rows):
    some = [row for row in rows if row.mode == mode]
    if standing is None:
        if all(is_ours(row) for row in some):
            return f"{mode}: there is no other to compare with."
        if any(is_ours(row) for row in some):
            return f"{mode}: nothing to compare: no case has both a right result of fusedattn and a time of another."
        winners = [fastest(of_case) for of_case in groups(some).values()]
        return f"{mode}: the fastest of each case: {_often(row.provider for row in winners if row) or 'none'}."
    cases, clear, speed = len(standing.clear), sum(standing.clear), words(standing.median)
    other = (
        f"the fastest other, {standing.other}" if cases == 1 else f"the fastest other of each case ({standing.other})"
    )
    if standing.is_clear:
        verdict = f"{'are' if ',' in standing.ours else 'is'} {speed} {'as' if speed == 'as fast' else 'than'} {other}"
        verdict += "" if cases == 1 else f", by the median of {cases} cases"
    else:
        verdict = f"and {other}{',' * (cases == 1)} differ by no more than noise"
        verdict += "" if cases == 1 else f" in {cases - clear} of {cases} cases"
    wins = "" if cases == 1 else f" It is clearly faster in {standing.faster} and clearly slower in {standing.slower}."
    return f"{mode}: {standing.ours} {verdict}.{wins}"


def text(rows: Sequence[Row], goals: Sequence[Goal] = (), more: Iterable[str] = ()) -> str:
    """The last run in a CSV: the machine, what each provider could not do, `lines`, and more lines at the end."""
    if not (rows := last_run(rows)):
        return "no rows"
    first, statuses = rows[0], collections.defaultdict(collections.Counter)
    for row in rows:
        statuses[row.provider][row.status] += 1
    shown = [f"{first.gpu}, torch {first.torch}, triton {first.triton}, commit {first.commit}, {first.date}"]
    for provider, counts in statuses.items():
        shown.append(f"{provider}: {counts['ok']} ok")
        shown += [f"    {many} {status[:110]}" for status, many in counts.most_common(5) if status != "ok"]
    return "\n".join([*shown, *(line for line, _ in lines(Judged(rows), goals=goals)), *more])
