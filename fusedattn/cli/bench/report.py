"""How rows are shown: a mode after the other, in each the providers of a case under each other, and the verdict."""

from collections.abc import Sequence

import torch

from ...bench import plots, table
from ...bench.rows import Row
from ..screen import Screen, error, tick
from . import verdict
from .presets import Preset

REASON = 54  # letters of why something did not run that fit beside its name


def heading(device: str, chosen: Preset) -> str:
    threads = verdict.count(torch.get_num_threads(), "thread")
    where = torch.cuda.get_device_name() if device == "cuda" else f"the CPU, {threads}"
    counts = [verdict.count(len(some), of) for some, of in zip(chosen[:3], ("case", "provider", "mode"), strict=True)]
    if chosen.modules:
        counts[-1] += f", {verdict.count(len(chosen.modules), 'module')}"
    return f"{' x '.join(counts)} on {where}, torch {torch.__version__}."


def name(row: Row) -> str:
    """The case of a row: sizes as --shape takes them, and what else it is."""
    words = [f"{row.B},{row.Hq},{row.Hkv},{row.Sq},{row.Sk},{row.D}"]
    words += [f"Dv {row.Dv}"] * (row.D != row.Dv) + ["causal"] * row.causal
    return " ".join([*words, table.DTYPES.get(row.dtype, row.dtype), *row.options.split()])


def show(screen: Screen, judged: verdict.Judged, whys: Sequence[str]) -> None:
    """The rows, what is wrong, and the verdict."""
    rows = judged.rows
    memory = any(row.peak_mib != "" for row in rows)
    wide = max((len(row.provider) for row in rows), default=0)
    speed, factor = plots.unit(rows)
    last = ""
    for (mode, _), some in verdict.groups(rows).items():
        if mode != last:
            heads = _cells(["ms", speed, *["MiB"] * memory, "fusedattn is", "error"])
            screen.say(f"\n{mode.upper().replace('_', ' + '):<{wide + 2}}{heads}", style="bold")
            last = mode
        screen.say(name(some[0]), style="underline")
        for line, style in _lines(some, memory, factor):
            screen.say(f"  {line[0]:<{wide}}{line[1]}".rstrip(), style=style)
    if rows:
        time = "the least" if judged.why else "the median"
        screen.say(f"\nCases are B,Hq,Hkv,Sq,Sk,D; ms is {time}; error the largest, from float64; {tick()} is right.\n")

    _, each = verdict.standings(rows)
    modes = list(dict.fromkeys(one.mode for one in each))
    others = list(dict.fromkeys(one.other for one in each))
    cells = {(one.other, one.mode): verdict.words(one.median, one.clear) for one in each}
    if others:
        lines = [[other, *(cells.get((other, mode), "") for mode in modes)] for other in others]
        screen.table("fusedattn, median of the cases", ["beside", *modes], lines)
    for row, why in zip(rows, whys, strict=True):
        if why:
            screen.say(f"FAIL {row.provider}, {row.mode}, {name(row)}: {why}", style="red")
    for line in verdict.sentences(judged):
        screen.say(line, style="bold red" if "WRONG" in line else "bold")


def found(rows: Sequence[Row], judged: verdict.Judged, whys: Sequence[str]) -> dict:
    """The same for a program, rows as they were measured: what was not is None."""
    best, each = verdict.standings(judged.rows)
    plain = [
        {column: None if value == "" else value for column, value in row._asdict().items()} | dict(why=why)
        for row, why in zip(rows, whys, strict=True)
    ]
    speeds = dict(fastest=[_standing(one) for one in best], each=[_standing(one) for one in each])
    by = "ms_min" if judged.why else "ms_p50"
    return dict(rows=plain, verdict=dict(text=verdict.sentences(judged), by=by) | speeds)


def _standing(one):
    least, most = min(one.ratios), max(one.ratios)
    about = dict(mode=one.mode, ours=one.ours, other=one.other, cases=len(one.ratios), faster=one.faster)
    about |= dict(within_noise=len(one.told) - sum(one.told))
    return about | dict(median=one.median, least=least, most=most)


def _cells(texts):
    """Texts under each other, the one before the last wide enough for how much faster something is."""
    *numbers, beside, error = texts
    return "".join(f"{text:>10}" for text in numbers) + f"{beside:>16}{error:>9}"


def _lines(rows, memory, factor):
    """((provider, what stands beside it), style) of the rows of one case in one mode."""
    best, mine = verdict.fastest(rows), verdict.fastest([row for row in rows if verdict.is_ours(row)])
    for row in rows:
        if row.ms_p50 == "":
            yield (row.provider, f"   {_reason(row.status)}"), "yellow"
            continue
        numbers = [f"{row.ms_p50:.3f}", f"{factor * row.tflops:.1f}"]
        numbers += [f"{row.peak_mib:,.0f}" if row.peak_mib != "" else ""] * memory
        beside = "" if mine is None or verdict.is_ours(row) else _beside(row, mine)
        cells = _cells([*numbers, beside, "" if row.err_max == "" else error(row.err_max)])
        right = {"ok": tick(), "wrong": "FAIL"}.get(row.status, _reason(row.status))
        style = "bold red" if row.status == "wrong" else "bold green" if row is best else None
        yield (row.provider, f"{cells} {right}{' fastest' * (row is best)}"), style


def _beside(row, mine):
    return verdict.words(row.ms_p50 / mine.ms_p50, verdict.told(row, mine))


def _reason(status):
    if status == "oom":
        return "out of memory"
    why = status.removeprefix("unsupported: ")
    return why if len(why) <= REASON else f"{why[: REASON - 3]}..."
