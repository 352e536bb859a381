"""fusedattn bench: attention against its peers on this machine, how fast each is and whether it is right."""

import os
import time
from collections.abc import Sequence

import torch

from ...bench import cpu, engine, plots, report, rows
from .. import machine
from ..screen import Problem, Screen, check_output, need, writing
from . import presets

# How long a row is timed, about: a CPU has slow steps, and a median wants some of them.
BUDGET_MS = {"cpu": 300.0, "cuda": 100.0}


def run(arguments) -> int:
    screen, began = Screen(arguments.json), time.monotonic()
    device, plot = presets.device(), arguments.plot
    preset = presets.choose(arguments, on_gpu=device == "cuda")
    if plot is not None:
        need("matplotlib")
        check_output("plot", plot)
        if arguments.csv and os.path.realpath(arguments.csv) == os.path.realpath(plot):
            raise Problem(f"plot: {plot} is where the rows go")
    try:
        writer = rows.Writer(arguments.csv)
    except (OSError, ValueError) as error:
        raise Problem(f"csv: cannot append to {arguments.csv or 'it'}: {error}") from error
    busy = device == "cpu" and machine.busy()
    if busy:
        # Threads of one step wait for each other at every operation, a time slice each where one has no core: steps of
        # 0.05 ms then take 8 to 80 ms, again and again, and no least or median of them says what a quiet machine takes.
        torch.set_num_threads(1)
    threads = (1,) if busy else cpu.threads(arguments.preset)
    work = presets.units(preset, threads)
    screen.say(_of_parts(preset, threads, work) if preset.parts else _heading(device, preset))
    if busy:
        screen.say("Other work keeps this machine busy: one thread is timed, and the least of its times counts.")
    if device == "cpu" and not preset.parts and arguments.preset in ("paper", "full"):
        screen.say(f"{arguments.preset} is made for a GPU and takes hours on a CPU; --preset quick takes a minute.")

    measure = cpu.measure if preset.parts else engine.measure
    written: list[rows.Row] = []
    whys: list[str] = []
    ended: BaseException | None = None
    try:
        with screen.progress("measuring", len(work)) as advance:
            for row, why in measure(rows.machine(device), work, device, BUDGET_MS[device]):
                with writing("csv", arguments.csv):
                    writer.write(row)
                written.append(row)
                whys.append(why)
                advance(f"{row.provider} {row.mode}, {row.case.name}")
                if engine.broke(row.status):
                    raise Problem(f"the GPU broke down: {row.status.removeprefix('unsupported: ')}")
    except (KeyboardInterrupt, Problem) as error:  # the rows until then are shown
        ended = error

    judged = report.judged(written, busy)
    for text, style in report.lines(judged, whys):
        screen.say(text, style=style)
    picture = plot if plot and plots.drawable(written) else None
    if picture:
        with writing("plot", picture):
            cpu.draw(written).savefig(picture, format="png")
    if plot:
        screen.say(f"{plot} is drawn, by medians." if picture else f"{plot} is not drawn: nothing was measured.")
    seconds, ok = round(time.monotonic() - began, 1), not report.wrong(written)[0]
    screen.say(f"{len(written)} of {len(work)} rows ({seconds} s).")
    answer = dict(ok=ok, complete=ended is None, seconds=seconds, versions=machine.versions(), device=device)
    answer |= dict(threads=torch.get_num_threads(), preset=None if arguments.shape else arguments.preset or "quick")
    screen.finish(answer | _answer(written, judged, whys) | dict(csv=arguments.csv, picture=picture))
    if ended:
        raise ended
    return 0 if ok else 1


def _heading(device: str, preset: presets.Preset) -> str:
    where = torch.cuda.get_device_name() if device == "cuda" else "the CPU"
    where += "" if device == "cuda" else f", {report.count(torch.get_num_threads(), 'thread')}"
    counts = [report.count(len(some), of) for some, of in zip(preset[:3], ("case", "provider", "mode"), strict=True)]
    modules = f", {report.count(len(preset.modules), 'module')}" if preset.modules else ""
    return f"{' x '.join(counts)}{modules} on {where}, torch {torch.__version__}."


def _of_parts(preset: presets.Preset, threads: Sequence[int], work: Sequence) -> str:
    counts = " and ".join(report.count(number, "thread") for number in threads)
    return f"{report.count(len(work), 'row')} on the CPU, {counts}, torch {torch.__version__}."


def _answer(written: Sequence[rows.Row], judged: report.Judged, whys: Sequence[str]) -> dict:
    """The rows as they were measured, and the verdict, for JSON: a column that was not measured is None."""
    plain = []
    for row, why in zip(written, whys, strict=True):
        values = {column: None if value == "" else value for column, value in row._asdict().items()}
        plain.append(values | dict(why=report.reason(row) if row.ms_p50 == "" else why))
    best, each = ([_standing(one) for one in some] for some in report.standings(judged.rows))
    by = "ms_min" if judged.why else "ms_p50"
    return dict(rows=plain, verdict=dict(text=report.sentences(judged), by=by, fastest=best, each=each))


def _standing(one):
    about = dict(mode=one.mode, ours=one.ours, other=one.other, cases=len(one.ratios), faster=one.faster)
    about |= dict(within_noise=len(one.clear) - sum(one.clear), median=one.median)
    return about | dict(least=min(one.ratios), most=max(one.ratios))
