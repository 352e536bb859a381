"""How rows are shown: a table a mode, ours beside each other provider, and the verdict."""

from collections.abc import Sequence

import torch

from ...bench import plots, table
from ...bench.rows import Row
from ..screen import Screen, error, tick
from . import verdict
from .presets import Preset

REASON = 60  # letters of why something did not run that fit into its row


def heading(device: str, chosen: Preset) -> str:
    threads = torch.get_num_threads()
    where = torch.cuda.get_device_name() if device == "cuda" else f"the CPU, {threads} thread{'s' * (threads != 1)}"
    counts = (f"{len(some)} {name}" for some, name in zip(chosen, ("cases", "providers", "modes"), strict=True))
    return f"{' x '.join(counts)} on {where}, torch {torch.__version__}."


def shape(row: Row) -> str:
    """Sizes as --shape takes them; a head of values that is not as wide as one of keys is named too."""
    sizes = f"{row.B},{row.Hq},{row.Hkv},{row.Sq},{row.Sk},{row.D}"
    return sizes if row.D == row.Dv else f"{sizes} Dv {row.Dv}"


def show(screen: Screen, rows: Sequence[Row], whys: Sequence[str]) -> None:
    """The tables, what is wrong, and the verdict."""
    grouped = verdict.groups(rows)
    memory = any(row.peak_mib != "" for row in rows)
    speed, factor = plots.unit(rows)
    columns = [
        "B,Hq,Hkv,Sq,Sk,D",
        "provider",
        "ms",
        speed,
        *["MiB"] * memory,
        "fusedattn is",
        "error / eager's",
        "right",
    ]
    for mode in dict.fromkeys(mode for mode, _ in grouped):
        lines = [line for key, some in grouped.items() if key[0] == mode for line in _lines(some, memory, factor)]
        screen.table(f"{mode}, median time", columns, lines, marks=True)
    _, each = verdict.standings(rows)
    modes = list(dict.fromkeys(one.mode for one in each))
    cells = {(one.other, one.mode): verdict.words(one.median) for one in each}
    lines = [
        [name, *(cells.get((name, mode), "") for mode in modes)] for name in dict.fromkeys(one.other for one in each)
    ]
    if lines:
        screen.table("fusedattn, by the median", ["beside", *modes], lines)
    for row, why in zip(rows, whys, strict=True):
        if why:
            said = f"{row.provider}, {row.mode}, {shape(row)} {_kind(row)}: {why}"
            screen.say(f"FAIL {said}", style="red" if verdict.is_ours(row) else None)
    for line in verdict.sentences(rows):
        screen.say(line, style="bold red" if "WRONG" in line else "bold")


def found(rows: Sequence[Row], whys: Sequence[str]) -> dict:
    """The same for a program: what was not measured is None."""
    best, each = verdict.standings(rows)
    plain = [
        {name: None if value == "" else value for name, value in row._asdict().items()} | dict(why=why)
        for row, why in zip(rows, whys, strict=True)
    ]
    speeds = dict(fastest=[_standing(one) for one in best], each=[_standing(one) for one in each])
    return dict(rows=plain, verdict=dict(text=verdict.sentences(rows)) | speeds)


def _standing(one):
    least, most = min(one.ratios), max(one.ratios)
    about = dict(mode=one.mode, ours=one.ours, other=one.other, cases=len(one.ratios), faster=one.faster)
    return about | dict(median=one.median, least=least, most=most)


def _kind(row):
    words = ["causal"] * row.causal + [table.DTYPES.get(row.dtype, row.dtype)] + row.options.split()
    return " ".join(words)


def _lines(rows, memory, factor):
    """The lines of one case in one mode: the case is named on the first two."""
    names = [shape(rows[0]), _kind(rows[0])]
    if len(rows) == 1:
        names = [" ".join(names)]
    names += [""] * (len(rows) - len(names))
    best, mine = verdict.fastest(rows), verdict.fastest([row for row in rows if verdict.is_ours(row)])
    for name, row in zip(names, rows, strict=True):
        mib = [] if not memory else ["" if row.peak_mib == "" else f"{row.peak_mib:8.0f}"]
        if row.ms_p50 == "":
            yield [name, row.provider, "", "", *mib, "", "", _status(row)]
            continue
        beside = "" if mine is None or verdict.is_ours(row) else verdict.words(row.ms_p50 / mine.ms_p50)
        errors = "" if row.err_max == "" else f"{error(row.err_max)} / {error(row.err_eager)}"
        right = _status(row) + " fastest" * (row is best)
        yield [name, row.provider, f"{row.ms_p50:9.3f}", f"{factor * row.tflops:7.1f}", *mib, beside, errors, right]


def _status(row):
    if row.status in ("ok", "wrong"):
        return tick() if row.status == "ok" else "FAIL"
    if row.status == "oom":
        return "out of memory"
    why = row.status.removeprefix("unsupported: ")
    return why if len(why) <= REASON else f"{why[: REASON - 3]}..."
