"""fusedattn bench: attention against its peers on this machine, how fast each is and whether it is right."""

import contextlib
import importlib.util
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from ..bench import measure, plot, report, rows
from ..bench.cases import QUESTIONS, Case
from ..bench.providers import PROVIDERS
from .output import Output, Problem

BUDGET_MS = {"cpu": 300.0, "cuda": 100.0}  # how long a provider is timed
MODULES = QUESTIONS["module"].providers
PRESETS = {"quick": ["forward", "backward", "module"], "paper": ["forward", "backward"], "full": [*QUESTIONS]}
QUICK = {"cuda": (512, 4096), "cpu": (128, 512)}  # lengths
USUAL = {
    "cuda": ("fusedattn", "sdpa", "sdpa:cudnn", "sdpa:flash", "sdpa:efficient", "naive"),
    "cpu": ("fusedattn", "sdpa", "naive", "sdpa:math"),
}
Work = tuple[list[Case], list[str], list[str]]  # cases, providers, modes


def run(arguments) -> int:
    output, began = Output(arguments.json), time.monotonic()
    device, picture = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"), arguments.plot
    work = choose(arguments, device)
    if picture is not None:
        if importlib.util.find_spec("matplotlib") is None:
            raise Problem("matplotlib not installed: pip install 'fusedattn[bench]'")
        if Path(picture).suffix.lower() != ".png":  # a slip would write over something else
            raise Problem(f"plot: expected a name that ends in .png, got {picture}")
        if Path(picture).is_dir() or not Path(picture).resolve().parent.is_dir():
            raise Problem(f"plot: there is no folder for {picture}, or it is one itself")
    try:
        writer = rows.Writer(arguments.csv)
    except (OSError, ValueError) as error:
        raise Problem(f"csv: cannot append to {arguments.csv or 'it'}: {error}") from error
    total = sum(len(some) * len(names) * len(modes) for some, names, modes in work)
    name = torch.cuda.get_device_name() if device == "cuda" else "the CPU, one thread"
    output.say(f"{report.count(total, 'row')} on {name}, torch {torch.__version__}.")

    about, whys, ended = rows.machine(device, arguments.commit), [], None
    try:
        with output.progress("measuring", total) as advance:
            for some, names, modes in work:
                for row, why in measure.measure(about, some, names, modes, device, BUDGET_MS[device]):
                    whys.append(why)
                    with writing("csv", arguments.csv):
                        writer.write(row)
                    advance(f"{row.provider} {row.mode}, {row.case.name}")
                    if measure.broke(row.status):
                        raise Problem(f"the GPU broke down: {report.reason(row)}")
    except (KeyboardInterrupt, Problem) as error:  # the rows until then are shown
        ended = error

    written = writer.rows
    for line in report.lines(written, whys):
        output.say(line)
    for text in report.over_promise(written) if device == "cpu" else ():
        output.say(f"over what is promised for a CPU: {text}")
    if picture and plot.drawable(written):
        with writing("plot", picture):
            plot.figure(written).savefig(picture, format="png")
        output.say(f"{picture} is drawn.")
    elif picture:
        output.say(f"{picture} is not drawn: nothing was measured.")
        picture = None
    seconds, ok = round(time.monotonic() - began, 1), not report.wrong(written)
    output.say(f"{len(written)} of {total} rows ({seconds} s).")
    best, each = report.standings(written)
    plain = [{x: None if value == "" else value for x, value in row._asdict().items()} for row in written]
    output.finish(
        dict(ok=ok, complete=ended is None, seconds=seconds, versions=rows.versions(), device=device)
        | dict(preset=None if arguments.shape or arguments.questions else arguments.preset or "quick")
        | dict(rows=[row | dict(why=why) for row, why in zip(plain, whys, strict=True)])
        | dict(verdict=dict(text=report.sentences(written, best), fastest=_answers(best), each=_answers(each)))
        | dict(csv=arguments.csv, picture=picture)
    )
    if ended:
        raise ended
    return 0 if ok else 1


def _answers(standings):
    return [one.answer() for one in standings]


@contextlib.contextmanager
def writing(option: str, path: str | None) -> Iterator[None]:
    """Inside, an OSError, as of a full disk, is a Problem of a file that is written."""
    try:
        yield
    except OSError as error:
        raise Problem(f"{option}: cannot write {path}: {error.strerror or error}") from error


def choose(arguments, device: str) -> list[Work]:
    """Return what the options of the command ask for: cases x providers x modes, one after another."""
    names = _list("providers", arguments.providers, [*PROVIDERS, *MODULES[1:]])
    asked, preset = _list("mode", arguments.mode, [*measure.MODES, "graph"]), arguments.preset or "quick"
    questions = _list("question", arguments.questions, [*QUESTIONS]) or PRESETS[preset]
    if arguments.questions and (arguments.preset or arguments.shape):
        raise Problem("question: not allowed with --preset or --shape")
    work: list = [QUESTIONS[question].here(device) for question in questions]
    if preset == "quick" and not arguments.questions:
        work = [([x for x in some if x.Sq in QUICK[device]], *rest) for some, *rest in work]
    if arguments.shape:
        usual = "bfloat16" if device == "cuda" else "float32"
        dtypes = arguments.dtype or [usual]
        chosen = [Case(*x, x[-1], arguments.causal, dtype) for x in arguments.shape for dtype in dtypes]
        if "torch.nn" in names:  # only modules can stand beside it
            chosen = [x._replace(options="module") for x in chosen if x.Hq == x.Hkv and x.Sq == x.Sk]
        work = [(chosen, USUAL[device], ("forward", "backward"))]
    found = []
    for some, providers, modes in work:
        of_modules = any("module" in one.words for one in some)
        some = [one for one in some if one.causal or not arguments.causal]
        if arguments.dtype and not arguments.shape:
            some = [one._replace(dtype=dtype) for dtype in arguments.dtype for one in some]
        modes = asked or modes
        if of_modules:  # torch's module has no backward alone
            modes = ["forward_backward" if mode == "backward" else mode for mode in modes]
        if not of_modules or not names or {*names} & {*MODULES[1:]}:
            found.append((list(dict.fromkeys(some)), names or [*providers], list(dict.fromkeys(modes))))
    return found


def _list(option, texts, known):
    """Return the names in comma lists, each once; raise a Problem for an unknown name."""
    named = list(dict.fromkeys(name.strip() for text in texts or () for name in text.split(",")))
    if unknown := [name for name in named if name not in known]:
        raise Problem(f"{option}: there is no {', '.join(map(repr, unknown))}; there are {', '.join(known)}")
    return named
