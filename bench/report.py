"""Benchmark results as text: a table of rows, ratios of times within a run, and a summary in sentences."""

import collections
import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .cases import PAPER, Case
from .rows import Row

ON_A_CPU = "These times are of a CPU. They say nothing about the kernels, which need an NVIDIA GPU."
RATIO, MORE_US = 1.10, 100.0  # the aim: a CPU call takes at most RATIO times PyTorch's time, or MORE_US longer


def reason(row: Row) -> str:
    return "out of memory" if row.status == "oom" else row.status.removeprefix("unsupported: ")


def is_ours(row: Row) -> bool:
    return row.provider.startswith("fusedattn")


def fastest(rows: Sequence[Row], ours: bool) -> Row | None:
    """Return the fastest timed row, or None. ours: among fusedattn's rows that are not wrong, else other providers'."""
    usable = (row for row in rows if row.ms_p50 != "" and is_ours(row) == ours and not (ours and row.status == "wrong"))
    return min(usable, key=lambda row: row.ms_p50, default=None)


def kind(case: Case) -> Case:
    """Return a case without batch size and length. All cases of one kind share a panel of a plot."""
    return case._replace(B=0, Sq=0 if case.Sq == case.Sk else case.Sq, Sk=0)


def unit(rows: Sequence[Row]) -> tuple[str, float]:
    """Return (unit of speed for the rows, factor from TFLOP/s to this unit)."""
    most = max((row.tflops for row in rows if row.tflops != ""), default=1.0)
    return ("TFLOP/s", 1.0) if most >= 1.0 else ("GFLOP/s", 1e3)


def groups(rows: Sequence[Row]) -> list[list[Row]]:
    """Return the rows of each mode and case of a run, sorted by mode, `kind` and length."""
    grouped = collections.defaultdict(list)
    for row in rows:
        grouped[row.date, row.mode, row.case].append(row)
    order = list(dict.fromkeys(x for _, mode, case in grouped for x in (mode, kind(case))))
    places = {key: (order.index(key[1]), order.index(kind(key[2])), key[2].Sk) for key in grouped}
    return [grouped[key] for key in sorted(grouped, key=places.__getitem__)]


def compared(rows: Sequence[Row], without: str = "") -> Iterator[tuple[list[Row], Row, Row]]:
    """Yield (a group, fusedattn's fastest row in it, fastest row of another provider, except `without`)."""
    for some in groups(rows):
        mine, other = fastest(some, ours=True), fastest([x for x in some if x.provider != without], ours=False)
        if mine and other:
            yield some, mine, other


def last_runs(rows: Sequence[Row], providers: Sequence[str]) -> list[list[Row]]:
    """Return the rows of the providers for each mode and case in PAPER, from the last run that timed all of them."""
    last = {}
    for some in sorted(groups(rows), key=lambda some: some[0].date):
        run = {row.provider: row for row in some if row.status == "ok" and row.case in PAPER}
        if run.keys() >= {*providers}:
            last[some[0].mode, some[0].case] = [run[name] for name in providers]
    return list(last.values())


def differ(one: Row, other: Row) -> bool:
    """Return True if the 20% to 80% ranges of two times do not overlap."""
    return one.ms_p80 < other.ms_p20 or other.ms_p80 < one.ms_p20


def words(ratio: float, clear: bool = True) -> str:
    """Return the ratio of another provider's time to fusedattn's in words, such as "1.20x faster"."""
    if not clear:
        return "within noise"
    if f"{ratio:.2f}" == "1.00":
        return "as fast"
    return f"{ratio:.2f}x faster" if ratio > 1 else f"{1 / ratio:.2f}x slower"


def count(number: int, of: str) -> str:
    return f"{number} {of}{'s' * (number != 1)}"


class Standing(NamedTuple):
    """Comparison of fusedattn's times with another provider's, in one mode, for the cases that both have run."""

    mode: str
    ours: str
    other: str
    cases: int
    faster: int  # cases in which fusedattn is faster and the times `differ`
    within_noise: int  # cases in which the times do not `differ`
    median: float  # median ratio of the other provider's time to fusedattn's; least, most: the extremes
    least: float
    most: float

    @property
    def text(self) -> str:
        speed = words(self.median, clear=2 * self.within_noise < self.cases)
        speed += {"within noise": " of", "as fast": " as"}.get(speed, " than")
        counts = "median of {cases} cases, clearly faster in {faster}, within noise in {within_noise}"
        counts = f" ({counts.format_map(self._asdict())})" * (self.cases > 1)
        return f"{self.mode}: {self.ours} is {speed} {self.other}{counts}"


def standings(rows: Sequence[Row]) -> tuple[list[Standing], list[Standing]]:
    """Return the Standings of each mode against each case's fastest other provider, and against each provider."""
    best, each = collections.defaultdict(list), collections.defaultdict(list)
    for some, mine, other in compared(rows):
        best[mine.mode].append((mine, other))
        for row in some:
            if not is_ours(row) and row.ms_p50 != "":
                each[mine.mode, row.provider].append((mine, row))
    return list(map(_standing, best.values())), list(map(_standing, each.values()))


def _standing(pairs):
    names = (collections.Counter(row.provider for row in some).most_common() for some in zip(*pairs, strict=True))
    ours, others = (", ".join(name for name, _ in each) for each in names)
    ratios, clear = [other.ms_p50 / mine.ms_p50 for mine, other in pairs], [differ(*pair) for pair in pairs]
    faster = sum(differs and ratio > 1 for differs, ratio in zip(clear, ratios, strict=True))
    counts = len(pairs), faster, len(pairs) - sum(clear)
    return Standing(pairs[0][0].mode, ours, others, *counts, statistics.median(ratios), min(ratios), max(ratios))


def lines(rows: Sequence[Row], whys: Sequence[str] = ()) -> Iterator[str]:
    """Yield the text of a run: a line for each row, by mode and case; the reasons for wrong results; a summary."""
    width, (speed, factor), last = max((len(row.provider) for row in rows), default=0), unit(rows), ""
    for some in groups(rows):
        mode, mine = some[0].mode, fastest(some, ours=True)
        if mode != last:
            heads = "".join(f"{head:>10}" for head in ("ms", speed, "GB/s", "MiB"))
            yield f"\n{mode.upper().replace('_', ' + '):<{width + 2}}{heads}{'fusedattn is':>16}{'error':>9}"
            last = mode
        yield some[0].case.name
        for row in some:
            if row.ms_p50 == "":
                yield f"  {row.provider:<{width}}   {reason(row)}"
                continue
            numbers = row.ms_p50, factor * row.tflops, row.gbps, row.peak_mib
            cells = "".join(f"{'' if x == '' else format(x, '.4g'):>10}" for x in numbers)
            beside = "" if mine is None or is_ours(row) else words(row.ms_p50 / mine.ms_p50, differ(row, mine))
            right = "FAIL" if row.status == "wrong" else reason(row)
            found = "" if row.err_max == "" else f"{row.err_max:.1e}"
            yield f"  {row.provider:<{width}}{cells}{beside:>16}{found:>9} {right}"
    yield "\nCases are B,Hq,Hkv,Sq,Sk,D; ms is the median; error is the largest, against float64.\n"
    for row, why in zip(rows, whys, strict=False):
        if why:
            yield f"FAIL {row.provider}, {row.mode}, {row.case.name}: {why}"
    yield from sentences(rows)


def wrong(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row.status == "wrong" and is_ours(row)]


def sentences(rows: Sequence[Row]) -> list[str]:
    best, each = standings(rows)
    said = [one.text for one in each]
    # If one provider is the fastest in all cases, the sentence about this provider is enough.
    several = [one for one in best if ", " in one.other]
    said += [one._replace(other=f"the fastest other of each case ({one.other})").text for one in several]
    for mode in dict.fromkeys(row.mode for row in rows):
        if all(one.mode != mode for one in best):
            said.append(f"{mode}: no comparison: no case has both a right result of fusedattn and another's time")
    held = [row for row in rows if row.status in ("ok", "wrong")]
    ours, bad = sum(map(is_ours, held)), len(wrong(rows))
    others, others_bad = len(held) - ours, sum(row.status == "wrong" for row in held) - bad
    if ours:
        said.append(f"fusedattn: {ours - bad} of {count(ours, 'result')} right by the tests' rule against float64")
        said[-1] += f"; {bad} WRONG" * bool(bad)
    said += [f"Others: {others_bad} of {count(others, 'result')} not right by that rule"] * bool(others_bad)
    missing = sum(row.ms_p50 == "" for row in rows)
    said += [f"{missing} of {count(len(rows), 'row')} could not be measured; their lines say why"] * bool(missing)
    return said + [ON_A_CPU] * any(row.gpu == "cpu" and is_ours(row) for row in rows)


def over_promise(rows: Sequence[Row]) -> list[str]:
    """Return the CPU calls that are slower than our aim (RATIO, MORE_US), as text."""
    return [
        f"{mine.case.name} {mine.mode}: {mine.ms_p50:.3f} ms beside {other.ms_p50:.3f} ms of {other.provider}"
        for _, mine, other in compared(rows, without="naive")
        if mine.ms_p50 > max(RATIO * other.ms_p50, other.ms_p50 + MORE_US / 1e3)
    ]
