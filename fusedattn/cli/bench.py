"""fusedattn bench: times attention against its peers, and checks the results."""

import importlib.util
import time
from pathlib import Path

import torch

from ..bench import measure, plot, report, rows
from ..bench.cases import QUESTIONS, Case
from ..bench.providers import PROVIDERS
from . import machine
from .output import Output, Problem, check_file, check_names

BUDGET_MS = {"cpu": 300.0, "cuda": 100.0}  # milliseconds for measuring one provider
MODULES = QUESTIONS["cpu"]["module"][1]
PRESETS = {"quick": ["forward", "backward", "module"], "paper": ["forward", "backward"], "full": [*QUESTIONS["cpu"]]}
QUICK = {"cuda": (512, 4096), "cpu": (128, 512)}  # lengths Sq
USUAL = {
    "cuda": ("fusedattn", "sdpa", "sdpa:cudnn", "sdpa:flash", "sdpa:efficient", "naive"),
    "cpu": ("fusedattn", "sdpa", "naive", "sdpa:math"),
}


def run(arguments, output: Output) -> int:
    began, path, picture = time.monotonic(), arguments.csv, arguments.plot
    machine.check_device(arguments.device)
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    work = choose(arguments, device)
    if picture is not None:
        if importlib.util.find_spec("matplotlib") is None:
            raise Problem("plot: needs matplotlib: pip install 'fusedattn[bench]'")
        if Path(picture).suffix.lower() != ".png":  # a mistyped name must not overwrite another file
            raise Problem(f"plot: expected a name that ends in .png, got {picture or 'nothing'}")
        check_file("plot", picture)
    if path is not None:
        check_file("csv", path)
        try:
            rows.create(path)
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise Problem(f"csv: cannot append to {path}: {why}") from error
    if not (total := sum(len(some) * len(names) * len(modes) for some, names, modes in work)):
        raise Problem("no case fits all of the options: change --providers, --causal or --shape")
    name = torch.cuda.get_device_name() if device == "cuda" else "the CPU, one thread"
    output.say(f"{total} rows on {name}, torch {torch.__version__}.")

    about, written, ended = rows.machine(device, arguments.commit), [], None
    try:
        with output.progress("measuring", total) as advance:
            for some, names, modes in work:
                for row in measure.measure(about, some, names, modes, device, BUDGET_MS[device]):
                    written.append(row)
                    if path is not None:
                        try:
                            rows.append(path, row)
                        except OSError as error:  # a full disk
                            raise Problem(f"csv: cannot write {path}: {error.strerror or error}") from error
                    advance(f"{row.provider} {row.mode}, {row.case.name}")
                    if measure.broke(row.status):
                        raise Problem(f"the GPU stopped working: {report.reason(row)}")
    except (KeyboardInterrupt, Problem, OSError) as error:  # show the rows so far
        ended = error
    complete = ended is None

    for line in report.lines(written):
        output.say(line)
    if picture and plot.drawable(written):
        try:
            plot.figure(written).savefig(picture, format="png")
            output.say(f"Plot: {picture}")
        except OSError as error:
            ended = ended or Problem(f"plot: cannot write {picture}: {error.strerror or error}")
            picture = None
    elif picture:
        output.say("No plot: nothing was measured.")
        picture = None
    seconds, ok = round(time.monotonic() - began, 1), not report.wrong(written)
    output.say(f"{len(written)} of {total} rows ({seconds} s).")
    plain = [{x: None if value == "" else value for x, value in row._asdict().items()} for row in written]
    preset = None if arguments.shape or arguments.questions else arguments.preset or "quick"
    each = [one._asdict() for one in report.standings(written)]
    verdict = dict(text=report.sentences(written), each=each)
    answer = dict(ok=ok, complete=complete, seconds=seconds, versions=rows.versions(), device=device, preset=preset)
    output.finish(answer | dict(rows=plain, verdict=verdict, csv=path, picture=picture))
    if ended:
        raise ended
    return 0 if ok else 1


def choose(arguments, device: str) -> list[tuple[list[Case], list[str], list[str]]]:
    names = _list("providers", arguments.providers, [*PROVIDERS, *MODULES[1:]])
    asked, preset = _list("mode", arguments.mode, [*measure.MODES, "graph"]), arguments.preset or "quick"
    if "graph" in asked and device == "cpu":
        raise Problem(f"mode: expected some of {', '.join(measure.MODES)}, got graph: a CUDA graph needs a GPU")
    questions = _list("question", arguments.questions, PRESETS["full"]) or PRESETS[preset]
    given = [f"{name} {x}" for name in ("questions", "preset", "shape") if (x := getattr(arguments, name))]
    if len(given) > 1:
        raise Problem(f"question: expected questions, --preset or --shape, but not two, got {' and '.join(given)}")
    work: list = [QUESTIONS[device][question] for question in questions]
    if preset == "quick" and not arguments.questions:
        work = [([x for x in some if x.Sq in QUICK[device]], *rest) for some, *rest in work]
    if arguments.shape:
        dtypes = arguments.dtype or ["bfloat16" if device == "cuda" else "float32"]
        chosen = [Case(*x, x[-1], arguments.causal, dtype) for x in arguments.shape for dtype in dtypes]
        if "torch.nn" in names:  # torch.nn is compared as a whole module
            chosen = [x._replace(options="module") for x in chosen if x.Hq == x.Hkv and x.Sq == x.Sk]
        work = [(chosen, USUAL[device], ("forward", "backward"))]
    found = []
    for some, providers, modes in work:
        of_modules = any("module" in one.words for one in some)
        some = [one for one in some if one.causal or not arguments.causal]
        if arguments.dtype and not arguments.shape:
            some = [one._replace(dtype=dtype) for dtype in arguments.dtype for one in some]
        modes = asked or modes
        if of_modules:  # modules are never timed by their backward alone
            modes = ["forward_backward" if mode == "backward" else mode for mode in modes]
        if not of_modules or not names or {*names} & {*MODULES[1:]}:
            found.append((list(dict.fromkeys(some)), names or [*providers], list(dict.fromkeys(modes))))
    return found


def _list(option, texts, known):
    named = list(dict.fromkeys(name.strip() for text in texts or () for name in text.split(",")))
    check_names(option, named, known)
    return named
