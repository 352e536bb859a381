"""The questions, by name: rows of one table for the engine of this file, and others with a main of their own.

The engine measures cases x providers x modes, the most important first; a row is in the CSV at once.
"""

import argparse
import functools
import gc
import importlib
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from fusedattn.bench import accuracy, attention, cases, cost, module, plots, providers, report, rows, timing
from fusedattn.bench.report import LONG, Goal, over

from fusedattn.launch import tiles as tile_table

from . import leaderboard

BROKEN = 3  # exit status: the GPU takes no more work from this process; start again with --resume
BREAKS = 2  # how often a provider may break the GPU in one mode before it is not tried again
# When a provider is measured, on a case without an option and with one: those of 0 first, in the order of the cases.
TIERS = {"sdpa:efficient": 1, "sdpa:math": 1, "flash-attn": 1, "fa4": 1, "xformers": 1, "flex": 2, "naive": 3}
TIERS |= {"fusedattn:naive": 4}
SLOW = {"sdpa:math": 1, "naive": 1, "fusedattn:naive": 2}
_MORE = frozenset(cases.MORE)


def tier(case, name):
    if case.options:  # any provider may be the fastest peer
        return SLOW.get(name, 0)
    return TIERS.get(name, 0) + (2 if case in _MORE else 0)


def flex_last(case, name):
    """A case at a time, so that the GPU is as warm for all of it; FlexAttention, which compiles for long, last."""
    return int(name.startswith("flex"))


def decode_tier(case, name):
    return 0 if name in ("fusedattn:cache", "sdpa:flash") else 2 if name.startswith("fusedattn:pages") else 1


def decode_providers(device):
    """Without FlexAttention, which compiles for a shape, and without those that compute all scores of all heads."""
    peers = [
        name for name in providers.usual(device) if not name.startswith(("fusedattn", "flex", "naive", "sdpa:math"))
    ]
    return ["fusedattn:cache", *peers, "fusedattn:pages=256", "fusedattn:pages=16", *["naive"] * (device == "cpu")]


def small_providers(device):
    """Without FlexAttention, which compiles for a shape, and fusedattn:naive, which is for long calls."""
    return ["sdpa", *(name for name in providers.usual(device) if name not in ("flex", "fusedattn:naive"))]


def waste(case):
    """A line: how much padding adds to the tokens, the pairs and the memory of a case, and tiles to packed pairs."""
    lengths = case.lengths("cpu")
    tokens, pairs = int(lengths.sum()), int(lengths.square().sum())
    padded, packed = (cost.ideal(one) / 2**30 for one in (case._replace(options=""), case))
    tile = tile_table.tiles("forward", 90, 2, case.D)[0]
    height, width = (-(-lengths // block) * block for block in (tile.rows, tile.keys))
    return (
        f"{case.words.get('lengths', 'equal')}: {case.B} sequences of {lengths.min()} to {lengths.max()}, {tokens} "
        f"tokens; padded {case.B * case.Sq / tokens:.2f} x the tokens ({padded:.1f} GiB for {packed:.1f}), "
        f"{case.B * case.Sq**2 / pairs:.2f} x the pairs; tiles of {tile.rows} x {tile.keys}, packed, "
        f"{int((height * width).sum()) / pairs:.3f} x the pairs"
    )


def padding(written):
    """Lines: `waste` of the mixtures of lengths, whatever the rows."""
    counted = [case for case in cases.VARLEN if case.D == 128 and not case.causal]
    return ["Counted, of bf16, width 2048, forward and backward:", *(f"    {waste(case)}" for case in counted)]


def peaks(written):
    """Lines: MiB of a provider at its peak, query, key and value included, and over the least there can be."""
    for (mode, case), some in report.groups(rows.last_run(written)).items():
        ideal = cost.ideal(case, mode) / 2**20
        held = {row.provider: report.held(row) for row in some if row.peak_mib != ""}
        if held:
            each = "  ".join(f"{name} {peak:.0f} ({peak / ideal:.2f})" for name, peak in held.items())
            yield f"{case.name} {mode}, MiB (over the ideal, {ideal:.0f}): {each}"


def _plain(case):
    return not case.options


def _long(case):
    return case.Sq >= LONG and not case.options


def _large(case):
    return cost.held(case) >= LARGE


def _is_short(case):
    return (case.B, case.Sk) == (1, 1024)


def _copy_share(case, some):
    mine = report.fastest(some, "fusedattn:cache")
    return None if mine is None else report.shares(mine)[1]


def _microseconds(case, some):
    mine = report.fastest(some, "fusedattn:cache")
    return None if mine is None else 1e3 * mine.ms_p50


LARGE = 256e6  # bytes of keys and values that no cache of a GPU holds
_ideal = "peak memory over q, k, v, out, lse and gradients"
MEMORY = Goal(_ideal, 1.2, report.over_ideal, "forward_backward", _plain, at_most=True)
SPEED = (
    Goal(f"forward, speed over the best SDPA backend's, S >= {LONG},", 0.75, over("sdpa:*"), "forward", _long),
    Goal(f"backward, speed over the best SDPA backend's, S >= {LONG},", 0.5, over("sdpa:*"), "backward", _long),
    MEMORY,
)
SMALL = (
    Goal("wall, time over that of torch's own,", 1.2, over("fusedattn*", "sdpa"), "wall", at_most=True),
    Goal("graph, time over that of torch's own,", 1.0, over("fusedattn*", "sdpa"), "graph", at_most=True),
)
DECODE = (
    Goal("share of a copy's speed from 256 MB on", 0.85, _copy_share, "forward", _large),
    Goal("speed over that of sdpa:flash from 256 MB on", 1.1, over("sdpa:flash", "fusedattn:cache"), "forward", _large),
    Goal("us for one sequence of 1024 keys in a graph", 8.0, _microseconds, "graph", _is_short, at_most=True),
)
_dense = over("fusedattn:*", "fusedattn+packed:*")
VARLEN = tuple(
    Goal(f"{mode}, equal lengths, speed over the dense kernel's,", 0.95, _dense, mode, _long)
    for mode in attention.MODES[:2]
)


class Question(NamedTuple):
    """A question to the engine: modes, the table of cases on a GPU, whose tiny- is for a CPU, providers, the report."""

    asks: str
    modes: tuple = attention.MODES
    table: str = "all"
    providers: Callable = providers.usual  # of a device
    tier: Callable = tier
    goals: tuple = ()
    more: Callable = lambda written: ()  # lines at the end of the report
    board: leaderboard.Board | None = None

    def cases(self, device):
        """The name of the table of cases for a device."""
        if torch.device(device).type == "cuda":
            return self.table
        return f"tiny-{self.table}" if f"tiny-{self.table}" in cases.TABLES else "tiny"

    def text(self, written):
        """The report of rows."""
        return self.board.text(written) if self.board else report.text(written, self.goals, self.more(written))


def _speed(asks, *modes):
    return Question(asks, modes, goals=[goal for goal in SPEED if goal.mode in modes])


def _board(asks, mode, table, board):
    return Question(asks, (mode,), table, board.providers, flex_last, board=board)


_hopper = "Which pipeline of the Hopper kernel is the fastest, and how near the best peer?"
_backward = "Which backward is the fastest, in one pass or two, and how near the best peer?"
_small = "Is a tiny call as quick as torch's own, with all that the host does (wall) and without (graph)?"
_decode = "Is one more token, after a cache or pages, bound by the bytes of the cache alone?"
_varlen = "Is packing sequences of unequal lengths faster than padding them, and as fast as equal ones?"
_peak = "How much memory does a step take at its peak on a GPU, beside the peers?"
QUESTIONS = {
    "attention": _speed("Do forward and backward keep up with the best peer on long prompts?", *attention.MODES),
    "forward": _speed("Does the forward keep up with the peers, from 512 tokens to 16384?", "forward"),
    "backward": _speed("Does the backward alone keep up with the peers, from 512 tokens to 16384?", "backward"),
    "training": _speed("Do forward and backward together keep up with the peers?", "forward_backward"),
    "options": Question("What does an option cost: bias, mask, dropout, softcap, window, weights?", table="options"),
    "peak": Question(_peak, ("forward", "forward_backward"), goals=[MEMORY], more=peaks),
    "small": Question(_small, tuple(attention.CLOCKS), "small", small_providers, goals=SMALL),
    "decode": Question(_decode, ("forward", "graph"), "decode", decode_providers, decode_tier, DECODE),
    "varlen": Question(_varlen, attention.MODES[:2], "varlen", providers.usual_packed, flex_last, VARLEN, padding),
    "hopper": _board(_hopper, "forward", "hopper", leaderboard.HOPPER),
    "backward_forms": _board(_backward, "backward", "backward", leaderboard.BACKWARD),
}


def units(chosen, names, tier=tier):
    """(case, provider) in the order of importance: the fast providers through all cases, then the next."""
    work = [(case, name) for case in chosen for name in names if providers.concerns(name, case)]
    return sorted(work, key=lambda unit: tier(*unit))


def _left(before, case, name, modes):
    """The modes that a run, broken off and now resumed, has yet to measure of a provider on a case."""
    ours = f"{name}:" if name in providers.OURS else name  # and the backend
    mine = [row for row in before if row.provider == name or (ours != name and row.provider.startswith(ours))]
    done = {row.mode for row in mine if row.case == case}
    broken = [row.mode for row in mine if _broke(row.status)]
    return [mode for mode in modes if mode not in done and broken.count(mode) < BREAKS]


def _broke(status):
    """Whether a GPU broke down. One without a driver did not: torch's nested tensors ask for one even on a CPU."""
    return ("CUDA error" in status and "driver version" not in status) or "Triton Error [CUDA]" in status


def run(chosen, names, modes, writer, machine, options, tier=tier):
    """Measure; True if all of it was, False if the budget ended first, None if the GPU broke down.

    options: of the command line, with device, budget, repeat_ms and resume.
    """
    deadline = time.monotonic() + (options.budget or float("inf"))
    work = units(chosen, names, tier)
    before = rows.last_run(writer.rows) if options.resume else []
    drawn = tensors = truth = None
    for number, (case, name) in enumerate(work):
        left = _left(before, case, name, modes)
        if left and time.monotonic() > deadline:
            over = f"the budget of {options.budget:g} s is over"
            say(f"{over}: {len(work) - number} of {len(work)} units are not measured")
            return False
        if left and drawn != case:
            drawn = tensors = truth = None  # free the last one first
            tensors = case.draw(options.device)
            truth, drawn = accuracy.truth(case, tensors), case
        unit = case, name, tensors, truth, left, options.device, options.repeat_ms
        for row, why in attention.measure_all(machine, *unit) if left else ():
            writer.write(row)
            say(f"[{number + 1}/{len(work)}] {told(row, why)}")
            if _broke(row.status):
                return None
            if time.monotonic() > deadline:
                break
        gc.collect()
        if torch.device(options.device).type == "cuda":
            torch.cuda.empty_cache()
    return True


def told(row, why):
    """A row as a line of progress."""
    speed = "" if row.ms_p50 == "" else f"{row.ms_p50:10.4f} ms  "
    speed += "" if row.tflops == "" else f"{row.tflops:8.2f} TFLOP/s  "
    return f"{row.case.name} {row.provider} {row.mode}: {speed}{row.status} {why}"


def say(line):
    print(line.rstrip(), file=sys.stderr, flush=True)


def parser(name, asks, csv=True):
    """The options that every question has."""
    words = argparse.ArgumentParser(prog=f"python -m fusedattn.bench {name}", description=asks)
    words.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    words.add_argument("--repeat-ms", type=float, default=100.0, help="how long a row is timed, about")
    if csv:
        words.add_argument("--csv", help="append to this file")
        words.add_argument("--commit", help="the commit that the rows name, where git cannot tell")
    return words


def engine_parser(name, asks):
    """And those that only the engine's have."""
    words = parser(name, asks)
    words.add_argument("--cases", choices=cases.TABLES)
    words.add_argument("--resume", action="store_true", help="go on with the last run in the CSV")
    words.add_argument("--budget", type=float, help="seconds after which no more is started")
    return words


def opened(options):
    """(the Writer of a command's CSV, the machine's columns); a run that is resumed keeps its date."""
    writer, machine = rows.Writer(options.csv), rows.machine(options.device, options.commit)
    if getattr(options, "resume", False) and writer.rows:
        machine["date"] = writer.rows[-1].date
    return writer, machine


def ask(name, arguments):
    """Answer a question of the table."""
    question, every = QUESTIONS[name], (*attention.MODES, *attention.CLOCKS)
    words = engine_parser(name, question.asks)
    known = ",".join(
        [*providers.PROVIDERS, *providers.ASIDE, "fusedattn:BACKEND", *(f"{x}FORM" for x in providers.FORMS)]
    )
    words.add_argument("--providers", type=lambda text: text.split(","), help=f"some of {known}")
    words.add_argument("--modes", type=lambda text: text.split(","), default=question.modes, help=",".join(every))
    words.add_argument("--tests", help="of pytest's --junitxml: time only the forms that passed every test there")
    options = words.parse_args(arguments)
    names = options.providers or question.providers(options.device)
    for name in names:
        try:
            providers.find(name)
        except ValueError as error:
            words.error(str(error))
    if not set(options.modes) <= {*every}:
        words.error(f"--modes: expected some of {','.join(every)}")
    if options.tests is not None:
        names = leaderboard.proven(names, options.tests)
    writer, machine = opened(options)
    say(", ".join(f"{name} {value}" for name, value in machine.items() if value))
    chosen = cases.TABLES[options.cases or question.cases(options.device)]
    done = run(chosen, names, options.modes, writer, machine, options, question.tier)
    print(question.text(writer.rows))
    return BROKEN if done is None else 0


def measure_each(name, chosen, measure, arguments, more=lambda written: ()):
    """Answer a question whose measure(machine, case, device, budget in ms) yields (row, what is wrong or "").

    chosen: {"cuda" or "cpu": cases}. more: of rows, lines at the end of the report.
    """
    options = parser(name, OTHERS[name]).parse_args(arguments)
    writer, machine = opened(options)
    for case in chosen[torch.device(options.device).type]:
        for row, why in measure(machine, case, options.device, options.repeat_ms):
            writer.write(row)
            say(told(row, why))
    print(report.text(writer.rows, more=more(writer.rows)))
    return 0


def time_modules(arguments):
    def measure(machine, case, device, budget_ms):
        return module.measure_all(machine, case, module.MODES, device, budget_ms)

    return measure_each("module", {"cuda": cases.MODULE, "cpu": cases.TABLES["tiny-module"]}, measure, arguments)


def print_ceilings(arguments):
    options = parser("ceilings", OTHERS["ceilings"], csv=False).parse_args(arguments)
    for dtype in report.DTYPES:
        reached = timing.ceilings(dtype, options.device, options.repeat_ms)
        print(f"{dtype}: products {reached.matmul_tflops:.4g} TFLOP/s, copies {reached.copy_gbps:.4g} GB/s")
    return 0


def show(name, arguments):
    """The rows of a file as text, or as pictures."""
    words = argparse.ArgumentParser(prog=f"python -m fusedattn.bench {name}", description=OTHERS[name])
    words.add_argument("csv", metavar="FILE", help="rows that a benchmark wrote")
    if name == "plots":
        words.add_argument("--out", metavar="PNG", required=True, help="where to save the picture")
    options = words.parse_args(arguments)
    try:
        written = rows.read(options.csv)
        if name == "plots":
            plots.draw(written).savefig(options.out, format="png")
        else:
            print(report.text(written, SPEED))
    except (OSError, ValueError, ImportError) as error:
        words.error(str(error))
    return 0


def _late(name, function="main"):
    """The main of a module of this folder; imported late, for some import Triton, and one a stand-in for a GPU."""
    return lambda arguments: getattr(importlib.import_module(f"fusedattn.bench.dev.{name}"), function)(arguments)


# {question: what it asks} and {question: its main(arguments)}.
OTHERS = {
    "module": "Is our module faster than torch.nn.MultiheadAttention?",
    "end_to_end": "How many tokens a second does the demo's model take?",
    "minilm": "Does a real model of Hugging Face get faster by one line?",
    "skipping": "What does skipping blocks save, and how near is it to the ideal?",
    "host": "What host time does fa.attention add to the naive formula on a CPU?",
    "launch_path": "What does the host do in one call of the kernels, step by step, without a GPU?",
    "ceilings": "How fast does this machine multiply and copy?",
    "tune": "Which tiles are fastest on this GPU?",
    "warm": "Compiles, many at a time, what the questions on a GPU will need.",
    "table": "How did the last run in a CSV compare with the peers?",
    "plots": "How does speed grow with length, and what bounds it? Pictures of the last run in a CSV.",
}
MAINS = {name: _late(name) for name in ("skipping", "host", "launch_path", "tune", "warm")}
MAINS |= {name: _late("models", name) for name in ("end_to_end", "minilm")}
MAINS |= {"module": time_modules, "ceilings": print_ceilings}
MAINS |= {name: functools.partial(show, name) for name in ("table", "plots")}
MAINS |= {name: functools.partial(ask, name) for name in QUESTIONS}


def main(arguments=None):
    """Answer the question that the first argument names; without one it is "attention"."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments[:1] in (["--help"], ["-h"]):
        print("python -m fusedattn.bench [QUESTION] [--help]\n")
        asks = {name: question.asks for name, question in QUESTIONS.items()} | OTHERS
        print("\n".join(f"  {name:<16}{text}" for name, text in asks.items()))
        return 0
    name = "attention" if not arguments or arguments[0].startswith("-") else arguments.pop(0)
    if name not in MAINS:
        say(f"fusedattn.bench: there is no question {name!r}; there are {', '.join(MAINS)}")
        return 2
    return MAINS[name](arguments)
