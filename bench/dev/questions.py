"""The questions, by name: rows of one table for the engine, and others with a main of their own.

The engine measures cases x providers x modes, the most important first; a row is in the CSV at once.
"""

import argparse
import importlib
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from fusedattn.bench import cases, cost, cpu, engine, module, providers, report, rows, timing
from fusedattn.bench.report import LONG, Goal, over

from fusedattn.backends import BACKENDS
from fusedattn.launch import tiles as tile_table

from . import models

BEGAN = time.monotonic()
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


def decode_providers(device):
    """Without FlexAttention, which compiles for a shape, and without those that compute all scores of all heads."""
    peers = providers.usual(device, "fusedattn", "flex", "naive", "sdpa:math")
    return ["fusedattn:cache", *peers, "fusedattn:pages=256", "fusedattn:pages=16", *["naive"] * (device == "cpu")]


def decode_tier(case, name):
    return 0 if name in ("fusedattn:cache", "sdpa:flash") else 2 if name.startswith("fusedattn:pages") else 1


def waste(case):
    """A line: how much padding adds to the tokens, the pairs and the memory of a case, and tiles to packed pairs."""
    lengths, kind = case.lengths("cpu"), case.words.get("lengths", "equal")
    tokens, pairs = int(lengths.sum()), int(lengths.square().sum())
    padded, packed = (cost.ideal(one) / 2**30 for one in (case._replace(options=""), case))
    tile = tile_table.tiles("forward", 90, 2, case.D)[0]
    height, width = (-(-lengths // block) * block for block in (tile.rows, tile.keys))
    return (
        f"{kind}: {case.B} sequences of {lengths.min()} to {lengths.max()}, {tokens} tokens; padded "
        f"{case.B * case.Sq / tokens:.2f} x the tokens ({padded:.1f} GiB for {packed:.1f}), "
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


def _long(case):
    return case.Sq >= LONG and not case.options


def _large(case):
    return cost.held(case) >= LARGE


def _of_cache(value):
    """The value of a Goal: a function of the row of ours, of a full cache."""

    def of_rows(case, some):
        mine = report.fastest(some, "fusedattn:cache")
        return None if mine is None else value(mine)

    return of_rows


LARGE = 256e6  # bytes of keys and values that no cache of a GPU holds
_least = "peak memory over q, k, v, out, lse and gradients"
MEMORY = Goal(_least, 1.2, report.over_ideal, "forward_backward", lambda case: not case.options, at_most=True)
_best = f"speed over the best SDPA backend's, S >= {LONG},"
SPEED = [Goal(f"{x}, {_best}", ask, over("sdpa:*"), x, _long) for x, ask in (("forward", 0.75), ("backward", 0.5))]
SPEED.append(MEMORY)
SMALL = [
    Goal(f"{mode}, time over that of torch's own,", ask, over("fusedattn*", mine="sdpa"), mode, at_most=True)
    for mode, ask in (("wall", 1.2), ("graph", 1.0))
]
_flash, _microseconds = over("sdpa:flash", mine="fusedattn:cache"), _of_cache(lambda row: 1e3 * row.ms_p50)
_short = "us for one sequence of 1024 keys in a graph"
DECODE = [
    Goal("share of a copy's speed from 256 MB on", 0.85, _of_cache(lambda row: report.shares(row)[1]), where=_large),
    Goal("speed over that of sdpa:flash from 256 MB on", 1.1, _flash, where=_large),
    Goal(_short, 8.0, _microseconds, "graph", lambda case: (case.B, case.Sk) == (1, 1024), at_most=True),
]
_equal, _dense = "equal lengths, speed over the dense kernel's,", over("fusedattn:*", mine="fusedattn+packed:*")
VARLEN = [Goal(f"{mode}, {_equal}", 0.95, _dense, mode, _long) for mode in engine.MODES[:2]]


class Question(NamedTuple):
    """A question to the engine: modes, the table of cases on a GPU, whose tiny- is for a CPU, providers, the report."""

    modes: Sequence = engine.MODES
    table: str = "all"
    providers: Callable = providers.usual  # of a device
    tier: Callable = tier
    goals: Sequence = ()
    more: Callable = lambda written: ()  # lines at the end of the report
    prepare: Callable = engine.prepare

    def cases(self, device):
        """The name of the table of cases for a device."""
        if torch.device(device).type == "cuda":
            return self.table
        return f"tiny-{self.table}" if f"tiny-{self.table}" in cases.TABLES else "tiny"

    def text(self, written):
        """The report of rows."""
        return report.text(written, self.goals, list(self.more(written)))


def _small(device):
    """Without FlexAttention, which compiles for a shape, and fusedattn:naive, which is for long calls."""
    return ["sdpa", *providers.usual(device, "flex", "fusedattn:naive")]


def _speed(*modes):
    return Question(modes, goals=[goal for goal in SPEED if goal.mode in modes])


def _whole(modes, table, names, **more):
    return Question(modes, table, lambda device: [*names], flex_last, **more)


ASKS = {
    "attention": "Do forward and backward keep up with the best peer on long prompts?",
    "forward": "Does the forward keep up with the peers, from 512 tokens to 16384?",
    "backward": "Does the backward alone keep up with the peers, from 512 tokens to 16384?",
    "training": "Do forward and backward together keep up with the peers?",
    "options": "What does an option cost: bias, mask, dropout, softcap, window, weights?",
    "peak": "How much memory does a step take at its peak on a GPU, beside the peers?",
    "small": "Is a tiny call as quick as torch's own, with all that the host does (wall) and without (graph)?",
    "decode": "Is one more token, after a cache or pages, bound by the bytes of the cache alone?",
    "varlen": "Is packing sequences of unequal lengths faster than padding them, and as fast as equal ones?",
    "module": "Is our module faster than torch.nn.MultiheadAttention?",
    "minilm": "Does a real model of Hugging Face get faster by one line?",
    "skipping": "What does skipping blocks save, and how near is it to the ideal?",
    "tangent": "What does a tangent, forward mode, cost beside the output?",
    "cpu": "What does a CPU user get, beside torch's own and the formula?",
    "ceilings": "How fast does this machine multiply and copy?",
    "sanitize": "Do sanitizers find anything, and has each kernel the same bits a thousand times?",
    "warm": "Compiles, many at a time, what the questions on a GPU will need.",
    "table": "How did the last run in a CSV compare with the peers?",
    "plots": "How does speed grow with length, and what bounds it? Pictures of the last run in a CSV.",
}
# Those of ASKS that the engine answers; each other one has a main of its own.
QUESTIONS = {
    "attention": _speed(*engine.MODES),
    "forward": _speed("forward"),
    "backward": _speed("backward"),
    "training": _speed("forward_backward"),
    "options": Question(table="options"),
    "peak": Question(("forward", "forward_backward"), goals=[MEMORY], more=peaks),
    "small": Question(tuple(engine.CLOCKS), "small", _small, goals=SMALL),
    "decode": Question(("forward", "graph"), "decode", decode_providers, decode_tier, DECODE),
    "varlen": Question(engine.MODES[:2], "varlen", providers.usual_packed, flex_last, VARLEN, padding),
    "module": _whole(module.MODES, "module", module.PROVIDERS),
    "minilm": _whole(("forward",), "minilm", models.IMPLEMENTATIONS, more=models.speeds, prepare=models.Bert),
}


def units(chosen, names, modes, tier=tier):
    """(case, provider, mode) in the order of importance: the fast providers through all cases, then the next."""
    return sorted(engine.units(chosen, names, modes), key=lambda unit: tier(*unit[:2]))


def _left(work, before):
    """The units that a run, broken off and now resumed, has yet to measure."""

    def is_left(case, name, mode):
        labels = [name, *(f"{name}:{backend}" for backend in BACKENDS if name in providers.OURS)]
        mine = [row for row in before if row.mode == mode and row.provider in labels]
        return sum(engine.broke(row.status) for row in mine) < BREAKS and all(row.case != case for row in mine)

    return [unit for unit in work if is_left(*unit)]


def run(work, writer, machine, options, prepare=engine.prepare, measure=engine.measure):
    """Measure until the budget ends; False if the GPU broke down. options: device, repeat_ms, budget and resume."""
    work = _left(work, rows.last_run(writer.rows)) if options.resume else work
    deadline, done = BEGAN + (options.budget or float("inf")), 0
    in_time = itertools.takewhile(lambda _: time.monotonic() <= deadline, work)
    for row, why in measure(machine, in_time, options.device, options.repeat_ms, prepare):
        done += 1
        writer.write(row)
        say(f"[{done}/{len(work)}] {progress(row, why)}")
        if engine.broke(row.status):
            return False
    if done < len(work):
        say(f"the budget of {options.budget:g} s is over: {len(work) - done} of {len(work)} rows are not measured")
    return True


def progress(row, why):
    """A row as a line."""
    speed = "" if row.ms_p50 == "" else f"{row.ms_p50:10.4f} ms  "
    speed += "" if row.tflops == "" else f"{row.tflops:8.2f} TFLOP/s  "
    return f"{row.case.name} {row.provider} {row.mode}: {speed}{row.status} {why}"


def say(line):
    print(line.rstrip(), file=sys.stderr, flush=True)


OPTIONS = {
    "device": dict(default="cuda" if torch.cuda.is_available() else "cpu"),
    "repeat-ms": dict(type=float, default=100.0, help="how long a row is timed, about"),
    "csv": dict(help="append to this file"),
    "commit": dict(help="the commit that the rows name, where git cannot tell"),
    "cases": dict(choices=cases.TABLES),
    "resume": dict(action="store_true", help="go on with the last run in the CSV"),
    "budget": dict(type=float, help="seconds after which no more is started"),
}


def parser(name, *more):
    """The options that every question has, and more of OPTIONS."""
    words = argparse.ArgumentParser(prog=f"python -m fusedattn.bench {name}", description=ASKS[name])
    for option in ("device", "repeat-ms", "csv", "commit", *more):
        words.add_argument(f"--{option}", **OPTIONS[option])
    return words


def opened(options):
    """(the Writer of a command's CSV, the machine's columns); a run that is resumed keeps its date."""
    writer, machine = rows.Writer(options.csv), rows.machine(options.device, options.commit)
    if getattr(options, "resume", False) and writer.rows:
        machine["date"] = writer.rows[-1].date
    return writer, machine


def ask(name, arguments):
    """Answer a question of the table."""
    question, every = QUESTIONS[name], list(dict.fromkeys([*engine.MODES, *engine.CLOCKS, *QUESTIONS[name].modes]))
    words = parser(name, "cases", "resume", "budget")
    known = f"{','.join([*providers.PROVIDERS, *providers.ASIDE])},fusedattn:BACKEND"
    words.add_argument("--providers", type=lambda text: text.split(","), help=f"some of {known}")
    words.add_argument("--modes", type=lambda text: text.split(","), default=question.modes, help=",".join(every))
    words.add_argument("--without", metavar="PREFIX", help="leave out the providers whose names begin so")
    options = words.parse_args(arguments)
    usual = question.providers(options.device)
    names = options.providers or usual
    for one in names:
        try:
            one in usual or providers.find(one)
        except ValueError as error:
            words.error(str(error))
    if not set(options.modes) <= {*every}:
        words.error(f"--modes: expected some of {','.join(every)}")
    if options.without:
        names = [name for name in names if not name.startswith(options.without)]
    writer, machine = opened(options)
    say(", ".join(f"{name} {value}" for name, value in machine.items() if value))
    chosen = cases.TABLES[options.cases or question.cases(options.device)]
    work = units(chosen, names, options.modes, question.tier)
    well = run(work, writer, machine, options, question.prepare)
    print(question.text(writer.rows))
    return 0 if well else BROKEN


def ask_cpu(arguments):
    """Answer what a CPU user gets: parts of cases whose providers take turns."""
    words = parser("cpu", "resume", "budget")
    words.add_argument(
        "--size", choices=cpu.SIZES, default="full", help="quick takes a minute, tiny shows that it works"
    )
    words.set_defaults(budget=300.0)
    options = words.parse_args([*arguments, "--device", "cpu"])
    parts = cpu.SIZES[options.size]
    writer, machine = opened(options)
    run(cpu.units(parts, cpu.threads(options.size)), writer, machine, options, measure=cpu.measure)
    print(report.text(writer.rows, cpu.goals(parts)))
    return 0


def print_ceilings(arguments):
    options = parser("ceilings").parse_args(arguments)
    for dtype in cases.DTYPES:
        reached = timing.ceilings(dtype, options.device, options.repeat_ms)
        print(f"{dtype}: products {reached['matmul_tflops']:.4g} TFLOP/s, copies {reached['copy_gbps']:.4g} GB/s")
    return 0


def show(name, arguments):
    """The rows of a file as text, or as pictures."""
    words = argparse.ArgumentParser(prog=f"python -m fusedattn.bench {name}", description=ASKS[name])
    words.add_argument("csv", metavar="FILE", help="rows that a benchmark wrote")
    if name == "plots":
        words.add_argument("--out", metavar="PNG", required=True, help="where to save the picture")
    options = words.parse_args(arguments)
    try:
        written = rows.read(options.csv)
        if name == "plots":
            cpu.draw(written).savefig(options.out, format="png")
        else:
            print(report.text(written, SPEED))
    except (OSError, ValueError, ImportError) as error:
        words.error(str(error))
    return 0


def main(arguments=None):
    """Answer the question that the first argument names; without one it is "attention"."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments[:1] in (["--help"], ["-h"]):
        print("python -m fusedattn.bench [QUESTION] [--help]\n")
        print("\n".join(f"  {name:<16}{said}" for name, said in ASKS.items()))
        return 0
    name = "attention" if not arguments or arguments[0].startswith("-") else arguments.pop(0)
    if name not in ASKS:
        say(f"fusedattn.bench: there is no question {name!r}; there are {', '.join(ASKS)}")
        return 2
    if name in QUESTIONS:
        return ask(name, arguments)
    if name in ("table", "plots"):
        return show(name, arguments)
    if name == "cpu":
        return ask_cpu(arguments)
    if name == "ceilings":
        return print_ceilings(arguments)
    return importlib.import_module(f"fusedattn.bench.dev.{name}").main(arguments)  # late: some import Triton
