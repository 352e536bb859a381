"""fusedattn bench: attention against its peers on this machine, how fast each is and whether it is right."""

import time
from collections.abc import Sequence
from pathlib import Path

import torch

from ...bench import plots, report, rows
from .. import machine
from ..screen import Problem, Screen, need
from . import measuring, presets


def run(given) -> int:
    screen, began = Screen(given.json), time.monotonic()
    device = presets.device()
    chosen = presets.choose(given, on_gpu=device == "cuda")
    _check_plot(given.plot)
    writer = _writer(given.csv)
    count = measuring.count(chosen)
    busy = device == "cpu" and machine.busy()
    if busy:
        # Threads of one step wait for each other at every operation, a time slice each where one has no core: steps of
        # 0.05 ms then take 8 to 80 ms, again and again, and no least or median of them says what a quiet machine takes.
        torch.set_num_threads(1)
    screen.say(_heading(device, chosen))
    if device == "cpu":
        if busy:
            screen.say("Other work keeps this machine busy: one thread is timed, and the least of its times counts.")
        if given.preset in ("paper", "full"):
            screen.say(f"{given.preset} is made for a GPU and takes hours on a CPU; --preset quick takes a minute.")

    written: list[rows.Row] = []
    whys: list[str] = []
    ended: BaseException | None = None
    try:
        with screen.progress("measuring", count) as advance:
            for row, why in measuring.measure(chosen, device):
                writer.write(row)
                written.append(row)
                whys.append(why)
                advance(f"{row.provider} {row.mode}, {report.name(row)}")
    except (KeyboardInterrupt, Problem) as error:  # the rows until then are shown
        ended = error

    judged = report.judged(written, busy)
    for text, style in report.lines(judged, whys):
        screen.say(text, style=style)
    picture = _drawn(given.plot, written)
    if given.plot:
        screen.say(f"{picture} is drawn." if picture else f"{given.plot} is not drawn: nothing was measured.")
    seconds = round(time.monotonic() - began, 1)
    screen.say(f"{len(written)} of {count} rows ({seconds} s).")
    ok = not report.wrong(written)[0]
    answer = dict(ok=ok, complete=ended is None, seconds=seconds, versions=machine.versions(), device=device)
    answer |= dict(threads=torch.get_num_threads(), preset=None if given.shape else given.preset or "quick")
    screen.finish(answer | _answer(written, judged, whys) | dict(csv=given.csv, picture=picture))
    if ended:
        raise ended
    return 0 if ok else 1


def _heading(device: str, chosen: presets.Preset) -> str:
    threads = report.count(torch.get_num_threads(), "thread")
    where = torch.cuda.get_device_name() if device == "cuda" else f"the CPU, {threads}"
    counts = [report.count(len(some), of) for some, of in zip(chosen[:3], ("case", "provider", "mode"), strict=True)]
    if chosen.modules:
        counts[-1] += f", {report.count(len(chosen.modules), 'module')}"
    return f"{' x '.join(counts)} on {where}, torch {torch.__version__}."


def _answer(written: Sequence[rows.Row], judged: report.Judged, whys: Sequence[str]) -> dict:
    """The rows as they were measured, and the verdict, for JSON: a column that was not measured is None."""
    best, each = report.standings(judged.rows)
    plain = [
        {column: None if value == "" else value for column, value in row._asdict().items()} | dict(why=why)
        for row, why in zip(written, whys, strict=True)
    ]
    speeds = dict(fastest=[_standing(one) for one in best], each=[_standing(one) for one in each])
    by = "ms_min" if judged.why else "ms_p50"
    return dict(rows=plain, verdict=dict(text=report.sentences(judged), by=by) | speeds)


def _standing(one):
    about = dict(mode=one.mode, ours=one.ours, other=one.other, cases=len(one.ratios), faster=one.faster)
    about |= dict(within_noise=len(one.told) - sum(one.told), median=one.median)
    return about | dict(least=min(one.ratios), most=max(one.ratios))


def _check_plot(path):
    if path:
        need("matplotlib")
        if not Path(path).resolve().parent.is_dir():
            raise Problem(f"plot: there is no folder {Path(path).resolve().parent}")


def _drawn(path, written):
    """The path of the picture, or None: rows without a speed make none."""
    if not path or not plots.drawable(written):
        return None
    plots.draw(written).savefig(path, format="png")
    return path


def _writer(path):
    try:
        return rows.Writer(path)
    except (OSError, ValueError) as error:
        raise Problem(f"csv: cannot append to {path}: {error}") from error
