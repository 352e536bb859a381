"""Benchmark results as text: a table of rows, ratios of times within a run, and a summary in sentences."""

import collections
import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .cases import PAPER, Case
from .rows import Row

ON_A_CPU = "These times are of a CPU. They say nothing about the kernels, which need an NVIDIA GPU."


def reason(row: Row) -> str:
    return "out of memory" if row.status == "oom" else row.status.removeprefix("unsupported: ")


def is_ours(row: Row) -> bool:
    return row.provider.startswith("fusedattn")


def fastest(rows: Sequence[Row], ours: bool) -> Row | None:
    """Return the fastest timed row, or None. ours: among fusedattn's rows that are not wrong, else other providers'."""
    usable = (row for row in rows if row.ms_p50 != "" and is_ours(row) == ours and not (ours and row.wrong))
    return min(usable, key=lambda row: row.ms_p50, default=None)


def kind(case: Case) -> Case:
    """Return a case without batch size and length. All cases of one kind share a panel of a plot."""
    return case._replace(B=0, Sq=0 if case.Sq == case.Sk else case.Sq, Sk=0)


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


def words(ratio: float) -> str:
    """Return the ratio of another provider's time to fusedattn's in words, such as "1.20x faster"."""
    return f"{ratio:.2f}x faster" if ratio >= 1 else f"{1 / ratio:.2f}x slower"


def beside(row: Row, ours: Row) -> str:
    """Return how fast fusedattn is beside a row, in words; "within noise" if the 20% to 80% ranges overlap."""
    apart = row.ms_p80 < ours.ms_p20 or ours.ms_p80 < row.ms_p20
    return words(row.ms_p50 / ours.ms_p50) if apart else "within noise"


class Standing(NamedTuple):
    """Ratios of another provider's times to fusedattn's, in one mode, for the cases that both have run."""

    mode: str
    other: str
    cases: int
    median: float
    least: float
    most: float

    @property
    def text(self) -> str:
        cases = f" (median of {self.cases} cases; ratios {self.least:.2f} to {self.most:.2f})" * (self.cases > 1)
        return f"{self.mode}: fusedattn is {words(self.median)} than {self.other}{cases}"


def standings(rows: Sequence[Row]) -> list[Standing]:
    """Return the Standing of each mode and other provider."""
    ratios = collections.defaultdict(list)
    for some, mine, _ in compared(rows):
        for row in some:
            if not is_ours(row) and row.ms_p50 != "":
                ratios[mine.mode, row.provider].append(row.ms_p50 / mine.ms_p50)
    return [Standing(*key, len(x), statistics.median(x), min(x), max(x)) for key, x in ratios.items()]


def lines(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the text of a run: a line for each row, by mode and case; a summary."""
    width, last = max((len(row.provider) for row in rows), default=0), ""
    for some in groups(rows):
        mode, mine = some[0].mode, fastest(some, ours=True)
        if mode != last:
            heads = "".join(f"{head:>10}" for head in ("ms", "TFLOP/s", "GB/s", "MiB"))
            yield f"\n{mode.upper().replace('_', ' + '):<{width + 2}}{heads}{'fusedattn is':>16}{'error':>9}"
            last = mode
        yield some[0].case.name
        for row in some:
            if row.ms_p50 == "":
                yield f"  {row.provider:<{width}}   {reason(row)}"
                continue
            numbers = row.ms_p50, row.tflops, row.gbps, row.peak_mib
            cells = "".join(f"{'' if x == '' else format(x, '.4g'):>10}" for x in numbers)
            speed = "" if mine is None or is_ours(row) else beside(row, mine)
            found = "" if row.err_max == "" else f"{row.err_max:.1e}"
            yield f"  {row.provider:<{width}}{cells}{speed:>16}{found:>9} {reason(row)}"
    yield "\nCases are B,Hq,Hkv,Sq,Sk,D; ms is the median; error is the largest, against float64.\n"
    yield from sentences(rows)


def wrong(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row.wrong and is_ours(row)]


def sentences(rows: Sequence[Row]) -> list[str]:
    said = [one.text for one in standings(rows)]
    held = [row for row in rows if row.status == "ok" or row.wrong]
    ours, bad = sum(map(is_ours, held)), len(wrong(rows))
    others, others_bad = len(held) - ours, sum(row.wrong for row in held) - bad
    if ours:
        said.append(f"fusedattn: {ours - bad} of {ours} results right by the tests' rule against float64")
        said[-1] += f"; {bad} WRONG" * bool(bad)
    said += [f"Others: {others_bad} of {others} results not right by that rule"] * bool(others_bad)
    missing = sum(row.ms_p50 == "" for row in rows)
    said += [f"{missing} of {len(rows)} rows could not be measured; their lines say why"] * bool(missing)
    return said + [ON_A_CPU] * any(row.gpu == "cpu" and is_ours(row) for row in rows)
