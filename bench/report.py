"""Rows of a CSV as a table and sentences: the one reporter of `fusedattn bench` and `python -m fusedattn.bench`.

A row of ours that is wrong is in no ratio. A peer whose error is over our rule is a peer all the same.
"""

import collections
import fnmatch
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

from fusedattn.cli.screen import error, tick

from . import cost
from .cases import Case
from .rows import Row, last_run

NAIVE = "On a CPU fusedattn is its naive path: this says nothing about its kernels, which need an NVIDIA GPU."
DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
UNSTEADY = 1.5  # a quiet machine's 80% quantile of times is below this many of its 20% quantile
NOISE = "within noise"
REASON = 54  # letters of a status that fit beside a provider
LONG = 2048  # tokens from which on the goals are


def is_ours(row: Row) -> bool:
    return row.provider.startswith("fusedattn")


def _usable(row):
    return row.ms_p50 != "" and not (is_ours(row) and row.status == "wrong")


def fastest(rows: Sequence[Row], *patterns: str) -> Row | None:
    """The fastest of the rows that were timed, of ours of those that are right; patterns are of providers."""
    timed = [row for row in rows if _usable(row) and (not patterns or _matches(row, patterns))]
    return min(timed, key=lambda row: row.ms_p50, default=None)


def _matches(row, patterns):
    return any(fnmatch.fnmatchcase(row.provider, pattern) for pattern in patterns)


def kind(case: Case) -> Case:
    """What the points of one line of a plot share: all of a case but its batch and its length."""
    return case._replace(B=0, Sq=0 if case.Sq == case.Sk else case.Sq, Sk=0)


def unit(rows: Sequence[Row]) -> tuple[str, float]:
    """(the unit that fits the speeds of rows, how many of it are a TFLOP/s)."""
    most = max((row.tflops for row in rows if row.tflops != ""), default=1.0)
    return ("TFLOP/s", 1.0) if most >= 1.0 else ("GFLOP/s", 1e3)


def groups(rows: Sequence[Row]) -> dict[tuple[str, Case], list[Row]]:
    """{(mode, case): its rows}, sorted by mode, then by kind, then from short to long."""
    found = collections.defaultdict(list)
    for row in rows:
        found[row.mode, row.case].append(row)
    modes = list(dict.fromkeys(mode for mode, _ in found))
    kinds = list(dict.fromkeys(kind(case) for _, case in found))
    return {
        key: found[key] for key in sorted(found, key=lambda k: (modes.index(k[0]), kinds.index(kind(k[1])), k[1].Sk))
    }


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
    return Judged([_by_the_least(row) for row in rows], f"{why} Each is judged by the least of its repeats.")


def _by_the_least(row):
    if row.ms_p50 == "" or row.ms_min == "":
        return row
    rates = {name: getattr(row, name) for name in ("tflops", "gbps")}
    rates = {name: rate if rate == "" else rate * row.ms_p50 / row.ms_min for name, rate in rates.items()}
    return row._replace(ms_p20=row.ms_min, ms_p50=row.ms_min, ms_p80=row.ms_p50, **rates)


def told(one: Row, other: Row) -> bool:
    """Whether two times differ by more than their noise: the ranges in which they vary do not overlap."""
    return one.ms_p80 < other.ms_p20 or other.ms_p80 < one.ms_p20


def words(ratio: float, told: bool = True) -> str:
    """The time of a peer over ours, in words; no number for a difference that noise may have made."""
    if not told:
        return NOISE
    if f"{ratio:.2f}" == "1.00":
        return "as fast"
    return f"{ratio:.2f}x faster" if ratio > 1 else f"{1 / ratio:.2f}x slower"


class Standing(NamedTuple):
    """Ours beside others in one mode: their time over ours, in the cases that both ran."""

    mode: str
    ours: str
    other: str  # a provider, or those that were the fastest other of a case, most often first
    ratios: list[float]
    told: list[bool]  # whether a ratio is more than the noise of its two times

    @property
    def median(self) -> float:
        return statistics.median(self.ratios)

    @property
    def faster(self) -> int:
        """In how many cases ours is faster, beyond the noise."""
        return sum(ratio > 1.0 and told for ratio, told in zip(self.ratios, self.told, strict=True))

    @property
    def clear(self) -> bool:
        """Whether most ratios are more than noise."""
        return 2 * sum(self.told) > len(self.told)


def standings(rows: Sequence[Row]) -> tuple[list[Standing], list[Standing]]:
    """(beside the fastest other of a case, one a mode; beside each other provider, one a mode and provider)."""
    cells = collections.defaultdict(list)
    for (mode, _), some in groups(rows).items():
        mine = fastest(some, "fusedattn*")
        others = [row for row in some if not is_ours(row) and row.ms_p50 != ""]
        if mine and others:
            cells[mode].append((mine, others))
    best, each = [], []
    for mode, pairs in cells.items():
        ours = _often(mine.provider for mine, _ in pairs)
        peers = [(mine, min(others, key=lambda row: row.ms_p50)) for mine, others in pairs]
        best.append(_standing(mode, ours, _often(peer.provider for _, peer in peers), peers))
        for name in dict.fromkeys(row.provider for _, others in pairs for row in others):
            against = [(mine, row) for mine, others in pairs for row in others if row.provider == name]
            each.append(_standing(mode, ours, name, against))
    return best, each


def _standing(mode, ours, other, pairs):
    ratios = [theirs.ms_p50 / mine.ms_p50 for mine, theirs in pairs]
    return Standing(mode, ours, other, ratios, [told(mine, theirs) for mine, theirs in pairs])


def _often(names):
    """Names, the most frequent first."""
    return ", ".join(name for name, _ in collections.Counter(names).most_common())


class Goal(NamedTuple):
    """What a question asks of ours: value(case, its rows) of a mode, where it is known, against a number."""

    said: str
    ask: float
    value: Callable[[Case, list[Row]], float | None]
    mode: str
    where: Callable[[Case], bool] = lambda case: True
    at_most: bool = False

    def line(self, rows: Sequence[Row]) -> str:
        """Whether the goal is met in the last run, as a sentence."""
        found = {
            c: self.value(c, some) for (mode, c), some in groups(rows).items() if mode == self.mode and self.where(c)
        }
        found = {case: value for case, value in found.items() if value is not None}
        said = f"goal {self.said} {'<=' if self.at_most else '>='} {self.ask:g}"
        if not found:
            return f"{said}: not measured"
        met = sum(value <= self.ask if self.at_most else value >= self.ask for value in found.values())
        worst = (max if self.at_most else min)(found, key=lambda case: found[case])
        median = statistics.median(found.values())
        number = f"met in {met} of {count(len(found), 'case')}, median {median:.2f}, worst {found[worst]:.2f}"
        return f"{said}: {number} ({worst.name})"


def over(peer: str, mine: str = "fusedattn:*") -> Callable:
    """The value of a Goal: the time of the fastest peer of a pattern over that of the fastest of ours."""

    def value(case, rows):
        ours, other = fastest(rows, mine), fastest(rows, peer)
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


def name(row: Row) -> str:
    """The case of a row: sizes as --shape takes them, and its options."""
    words = [f"{row.B},{row.Hq},{row.Hkv},{row.Sq},{row.Sk},{row.D}"]
    words += [f"Dv {row.Dv}"] * (row.D != row.Dv) + ["causal"] * row.causal
    return " ".join([*words, DTYPES.get(row.dtype, row.dtype), *row.options.split()])


def lines(judged: Judged, whys: Sequence[str] = (), goals: Sequence[Goal] = ()) -> list[tuple[str, str | None]]:
    """(text, style of rich) of a run: a line a row, by mode and case; ratios; what is wrong; goals; the verdict."""
    rows, found, last = judged.rows, [], ""
    wide = max((len(row.provider) for row in rows), default=0)
    speed, factor = unit(rows)
    on_gpu = any(row.peak_mib != "" for row in rows)
    for (mode, _), some in groups(rows).items():
        if mode != last:
            heads = ["ms", speed, *["MiB", "matmul", "copy"] * on_gpu, "fusedattn is", "error"]
            found += [("", None), (f"{mode.upper().replace('_', ' + '):<{wide + 2}}{_cells(heads)}", "bold")]
            last = mode
        found.append((name(some[0]), "underline"))
        best, mine = fastest(some), fastest(some, "fusedattn*")
        found += [
            (f"  {row.provider:<{wide}}{text}".rstrip(), style)
            for row in some
            for text, style in [_beside(row, mine, row is best, on_gpu, factor)]
        ]
    if rows:
        time = "the least" if judged.why else "the median"
        note = f"ms is {time}; error the largest, from float64; {tick()} is right."
        found += [("", None), (f"Cases are B,Hq,Hkv,Sq,Sk,D; {note}", None), ("", None)]
        ceilings = {row.dtype: row for row in rows if row.matmul_tflops != ""}
        reached = [f"{DTYPES.get(x, x)} products {row.matmul_tflops:.4g} TFLOP/s" for x, row in ceilings.items()]
        reached += [f"copies {row.copy_gbps:.4g} GB/s" for row in list(ceilings.values())[:1]]
        found += [(f"This machine reached: {', '.join(reached)}.", None)] * bool(on_gpu and reached)
    found += [(line, None) for line in _ratios(standings(rows)[1])]
    for row, why in zip(rows, whys, strict=False):
        if why:
            found.append((f"FAIL {row.provider}, {row.mode}, {name(row)}: {why}", "red"))
    found += [(goal.line(rows), None) for goal in goals]
    return found + [(line, "bold red" if "WRONG" in line else "bold") for line in sentences(judged)]


def _cells(texts):
    """Texts in columns, the last but one wide enough for how much faster something is."""
    *numbers, beside, error = texts
    return "".join(f"{text:>10}" for text in numbers) + f"{beside:>16}{error:>9}"


def _beside(row, mine, is_best, on_gpu, factor):
    """(the text beside a provider, its style)."""
    if row.ms_p50 == "":
        return f"   {_reason(row.status)}", "yellow"
    numbers = [f"{row.ms_p50:.{4 if row.ms_p50 < 1 else 3}f}"]
    numbers.append("" if row.tflops == "" else f"{factor * row.tflops:.1f}")
    if on_gpu:
        numbers.append("" if row.peak_mib == "" else f"{row.peak_mib:,.0f}")
        numbers += ["" if share is None else f"{share:.0%}" for share in shares(row)]
    beside = "" if mine is None or is_ours(row) else words(row.ms_p50 / mine.ms_p50, told(row, mine))
    cells = _cells([*numbers, beside, "" if row.err_max == "" else error(row.err_max)])
    right = {"ok": tick(), "wrong": "FAIL"}.get(row.status, _reason(row.status))
    style = "bold red" if row.status == "wrong" else "bold green" if is_best else None
    return f"{cells} {right}{' fastest' * is_best}", style


def _reason(status):
    if status == "oom":
        return "out of memory"
    why = status.removeprefix("unsupported: ")
    return why if len(why) <= REASON else f"{why[: REASON - 3]}..."


def _ratios(each):
    """Lines: how fast ours is beside each provider, a column a mode."""
    modes = list(dict.fromkeys(one.mode for one in each))
    cells = {(one.other, one.mode): words(one.median, one.clear) for one in each}
    others = list(dict.fromkeys(one.other for one in each))
    wide = max(map(len, ["beside", *others])) + 2
    if others:
        yield "fusedattn, median of the cases"
        for first, texts in [("beside", modes), *((x, [cells.get((x, mode), "") for mode in modes]) for x in others)]:
            yield (f"    {first:<{wide}}" + "".join(f"{text:<18}" for text in texts)).rstrip()
        yield ""


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
    if standing is None:
        if all(is_ours(row) for row in some):
            return f"{mode}: there is no other to compare with."
        if any(is_ours(row) for row in some):
            return f"{mode}: nothing to compare: no case has both a right result of fusedattn and a time of another."
        winners = [fastest(of_case) for of_case in groups(some).values()]
        return f"{mode}: the fastest of each case: {_often(row.provider for row in winners if row) or 'none'}."
    cases, ours, other = len(standing.told), standing.ours, standing.other
    if cases == 1 and not standing.clear:
        return f"{mode}: {ours} and the fastest other, {other}, differ by no more than noise."
    others, wins = f"the fastest other of each case ({other})", f"It is the fastest of all in {standing.faster}."
    if not standing.clear:
        noisy = cases - sum(standing.told)
        return f"{mode}: {ours} and {others} differ by no more than noise in {noisy} of {cases} cases. {wins}"
    speed = words(standing.median)
    speed += " as" if speed == "as fast" else " than"
    if cases == 1:
        return f"{mode}: {ours} is {speed} the fastest other, {other}."
    return f"{mode}: {ours} is {speed} {others}, by the median of {cases} cases. {wins}"


def refused(rows: Sequence[Row]) -> list[str]:
    """Lines: how many rows of each provider are ok, and why the others are not."""
    found = []
    for provider in dict.fromkeys(row.provider for row in rows):
        counts = collections.Counter(row.status for row in rows if row.provider == provider)
        reasons = [f"\n    {many} {status[:110]}" for status, many in counts.most_common(5) if status != "ok"]
        found.append(f"{provider}: {counts['ok']} ok{''.join(reasons)}")
    return found


def text(rows: Sequence[Row], goals: Sequence[Goal] = (), more: Sequence[str] = ()) -> str:
    """The last run in a CSV: the machine, the lines of `lines`, goals included, and `more`."""
    rows = last_run(rows)
    if not rows:
        return "no rows"
    first = rows[0]
    about = f"{first.gpu}, torch {first.torch}, triton {first.triton}, commit {first.commit}, {first.date}"
    return "\n".join([about, *refused(rows), *(line for line, _ in lines(Judged(rows), goals=goals)), *more])
