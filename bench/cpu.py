"""What does a CPU user get?    fusedattn bench, on a CPU, or python -m fusedattn.bench cpu

Ours as it comes beside what one has now: torch's SDPA, the formula, compiled FlexAttention, torch's modules, a model of
Transformers. The times are CPU time, of providers in turns, so that other work on the machine slows none of them more
than another; `ms_wall` is the caller's time. What is asked of ours stands in PARTS, beside what is measured.
With more threads than one set OMP_WAIT_POLICY=passive: a thread that waits by spinning takes CPU time as well.
"""

import contextlib
import ctypes
import itertools
import multiprocessing
import operator
import pathlib
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

import torch

from fusedattn.cli.machine import cores

from . import cases, engine, plots, rows, timing
from .calls import Unsupported
from .report import Goal, fastest, over

BOTH = ("forward", "forward_backward")
LONG, LONGEST = 1024, 2048  # tokens up to which it is quick; up to which the formula, which holds all weights, is timed
RETURNED_FROM = 1 << 16  # bytes from which on a child's memory goes back to the system as soon as it is freed
M_MMAP_THRESHOLD = -3  # of glibc's malloc.h


def microseconds_more(case, some):
    """The value of a Goal: the time of ours less that of torch's own."""
    mine, bare = fastest(some, "fusedattn*"), fastest(some, "sdpa")
    return None if mine is None or bare is None else 1e3 * (mine.ms_p50 - bare.ms_p50)


def over_slice(case, some):
    """The value of a Goal: the time of ours, but for OVERHEAD, over that of a cache that is sliced by hand."""
    mine, by_hand = fastest(some, "fusedattn*"), fastest(some, "sdpa+slice")
    return None if mine is None or by_hand is None else (mine.ms_p50 - OVERHEAD / 1e3) / by_hand.ms_p50


def memory_over(case, some):
    """The value of a Goal: what ours adds to memory over what torch's own adds."""
    peaks = {row.provider.partition(":")[0]: row.peak_mib for row in some if row.peak_mib != ""}
    return peaks["fusedattn"] / peaks["sdpa"] if peaks.get("sdpa") and "fusedattn" in peaks else None


OVERHEAD = 40.0  # microseconds that decode may take on top
_over_sdpa = over("fusedattn*", mine="sdpa")


class Part(NamedTuple):
    """A part of the question: cases, who computes them, in which modes, and what is asked of ours, at most."""

    said: str
    cases: Sequence[cases.Case]
    ask: float
    names: Sequence[str] = ("fusedattn", "sdpa")
    modes: Sequence[str] = BOTH
    value: Callable = _over_sdpa

    def goals(self):
        """What is asked, a Goal a mode."""
        return [Goal(f"{x}, {self.said}", self.ask, self.value, x, self._has, at_most=True) for x in self.modes]

    def _has(self, case):
        return plain(case) in self.cases


def _lengths(dtype):
    return [case for case in cases.CPU_LENGTHS if case.dtype == dtype]


PARTS = (
    Part("float32, time over that of sdpa", _lengths("float32"), 1.1, ("fusedattn", "sdpa", "naive")),
    Part("bfloat16, time over that of sdpa", _lengths("bfloat16"), 1.1),
    Part("a mask, a bias, grouped heads, time over that of sdpa", cases.CPU_OPTIONS, 1.1),
    Part("half of the keys padding, time over that of sdpa", cases.CPU_KEYS, 0.75, ("fusedattn", "sdpa", "flex")),
    Part("a window, time over that of sdpa", cases.CPU_WINDOW, 0.6, ("fusedattn", "sdpa", "flex")),
    Part(
        "packed, time over that of sdpa with a mask",
        cases.CPU_PACKED,
        0.9,
        ("fusedattn+packed", "sdpa", "flex+packed"),  # not nested tensors: torch takes 404 ms by them, 85 with a mask
    ),
    Part(
        f"decode less {OVERHEAD:g} us, time over that of a slice and sdpa",
        cases.CPU_DECODE,
        1.15,
        ("fusedattn:cache", "sdpa+slice"),
        BOTH[:1],
        over_slice,
    ),
    Part("Llama's prefill, time over that of sdpa", cases.CPU_LLAMA, 1.1, modes=BOTH[:1]),
    Part(
        "a module, time over that of torch.nn",
        cases.CPU_MODULE,
        1.05,
        ("fusedattn", "fusedattn.compat", "torch.nn"),
        value=over("fusedattn:*", mine="torch.nn"),
    ),
    Part(
        "a converted encoder, time over that of torch.nn",
        cases.CPU_ENCODER,
        1.05,
        ("fusedattn.compat", "torch.nn"),
        value=over("fusedattn.compat:*", mine="torch.nn"),
    ),
    Part("us that a call takes more than one of sdpa", cases.CPU_CALL, 25.0, modes=BOTH[:1], value=microseconds_more),
    Part("memory added, over what sdpa adds", cases.CPU_MEMORY, 1.5, value=memory_over),
)


def _quick(part):
    """A part without its long cases, those in bfloat16, and what is compiled."""
    few = [case for case in part.cases if case.Sq <= LONG and case.dtype == "float32"]
    return part._replace(cases=few, names=[name for name in part.names if not name.startswith("flex")])


def _tiny(part):
    """A part of cases of the same kinds, to see that it works."""
    smaller = [
        case._replace(
            B=min(case.B, 2), D=8, Dv=8, Sq=min(case.Sq, 16), Sk=min(case.Sk, 24 if case.Sq < case.Sk else 16)
        )
        for case in part.cases
    ]
    return _quick(part._replace(cases=list(dict.fromkeys(smaller))))


# {size: its parts}: tiny in seconds, to see that it works; quick in a minute; full in five.
SIZES = {"full": PARTS, "quick": tuple(part for part in map(_quick, PARTS) if part.cases)}
SIZES["tiny"] = tuple(part for part in map(_tiny, PARTS) if part.cases)


def goals(parts):
    """What is asked of ours in some parts."""
    return [goal for part in parts for goal in part.goals()]


def threads(size):
    """How many threads are timed, one after another: in full two as well, where there are as many cores."""
    return (1, 2) if size == "full" and cores() > 1 else (1,)


def plain(case):
    """A case without the number of threads."""
    return case._replace(options=" ".join(word for word in case.options.split() if not word.startswith("threads=")))


def concerns(case, name, mode, count):
    """Whether a provider is timed: the formula for the picture, FlexAttention, which compiles for long, forward alone.

    It has no backward on a CPU.
    """
    if name == "naive":
        return count == 1 and case.Sq <= LONGEST
    return not name.startswith("flex") or (mode, count) == ("forward", 1)


def units(parts, counts):
    """(case, provider, mode) of each row, those that are timed in turns in a row; a case has its number of threads.

    Those that take long come last.
    """
    every = [
        (case._replace(options=f"{case.options} threads={count}".strip()), name, mode)
        for part in parts
        for case in part.cases
        for count in (counts[-1:] if "memory" in case.words else counts)
        for mode in part.modes
        for name in part.names
        if concerns(case, name, mode, count)
    ]
    return sorted(every, key=lambda unit: 0 if unit[0].Sq <= LONG or "memory" in unit[0].words else unit[0].Sq)


def measure(machine, units, device, budget_ms, prepare=engine.prepare):
    """Yield (row, what is wrong or "") of each unit, as `engine.measure` does."""
    before = torch.get_num_threads()
    try:
        for case, of_case in itertools.groupby(units, key=lambda unit: plain(unit[0])):
            workload, refused = None, ""
            if "memory" not in case.words:
                try:
                    workload = prepare(case, device)
                except Exception as error:
                    if not (engine.out_of_memory(error) or isinstance(error, Unsupported)):
                        raise
                    refused = engine.status(error)
            for (timed, mode), of_cell in itertools.groupby(of_case, key=operator.itemgetter(0, 2)):
                names, count = [name for _, name, _ in of_cell], int(timed.words["threads"])
                torch.set_num_threads(count)
                if refused:
                    found = [(name, dict(status=refused), "") for name in names]
                elif workload is None:
                    found = (_in_a_child(case, name, mode, count) for name in names)
                else:
                    found = _in_turns(workload, names, mode, budget_ms)
                for label, measured, why in found:
                    yield rows.row(machine, mode, label, timed, **measured), why
    finally:
        torch.set_num_threads(before)


def _in_turns(workload, names, mode, budget_ms):
    """[(label, columns, what is wrong or "")] of providers: each is judged, then all are timed, a turn of each."""
    found, steps = {}, {}
    with contextlib.ExitStack() as inside:
        for name in names:
            label = name
            try:
                label, provider = workload.label(name), workload.setup(name)
                step = inside.enter_context(workload.step(mode, provider))
                found[name] = label, *engine.judged(workload, name, provider, mode, step())
                steps[name] = step
            except Exception as error:  # what a provider cannot do is a row
                found[name] = label, dict(status=engine.status(error)), ""
        for name, (times, wall) in timing.in_turns(steps, budget_ms).items():
            found[name][1].update(engine.timed(workload, mode, times), ms_wall=wall)
    return list(found.values())


def _in_a_child(case, name, mode, count):
    """(label, columns, "") of a provider in a process of its own, whose memory nothing else has used."""
    try:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as child:
            label, mib, milliseconds = child.submit(added, case, name, mode, count).result()
    except Exception as error:
        return name, dict(status=engine.status(error)), ""
    columns = timing.quantiles([milliseconds]).columns() | dict(peak_mib=mib, ms_wall=milliseconds)
    return label, columns | dict(status="unchecked: its memory alone is asked for"), ""


def added(case, name, mode, count):
    """(label, MiB that one step adds to the memory of this process at its peak, the milliseconds that it takes)."""
    torch.set_num_threads(count)
    with contextlib.suppress(AttributeError, OSError):  # glibc alone has it
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, RETURNED_FROM)
    case = case._replace(options="")
    for one in (case._replace(Sq=64, Sk=64), case):  # the first loads what is loaded once
        workload = engine.prepare(one, "cpu")
        provider = workload.setup(name)
        with workload.step(mode, provider) as step:
            forget_peak()
            before, began = peak(), time.perf_counter()
            result = step()
            milliseconds, mib = 1e3 * (time.perf_counter() - began), (peak() - before) / 2**20
            del result
    return workload.label(name), mib, milliseconds


def peak():
    """The most bytes that this process has had in memory at once."""
    status = pathlib.Path("/proc/self/status")
    if status.exists():  # getrusage would know of the process that started this one
        return 2**10 * int(re.search(r"VmHWM:\s+(\d+)", status.read_text())[1])
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS, which has no /proc


def forget_peak():
    """Let `peak` begin at what is in memory now, where the system can."""
    with contextlib.suppress(OSError):
        pathlib.Path("/proc/self/clear_refs").write_text("5")


def draw(written):
    """The picture of rows: of this question speed over length, of one thread in float32; of others all of `plots`."""
    drawn = [row for row in rows.last_run(written) if row.case.words.get("threads") == "1"]
    drawn = [row for row in drawn if plain(row.case) in PARTS[0].cases]
    return plots.speed(drawn) if drawn else plots.draw(written)
