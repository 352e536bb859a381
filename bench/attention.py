"""Do forward and backward keep up with the best peer on long prompts?    python -m fusedattn.bench.attention

Cases x providers x modes, the most important first, a row in the CSV as soon as it is measured, a short table last.
Other files ask other questions of the same engine.
"""

import gc
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from . import accuracy, calls, cases, ceilings, command, cost, providers, rows, table, timing, variants

MODES = ("forward", "backward", "forward_backward")
# Modes that time the same steps by another clock.
CLOCKS = {
    "wall": ("forward", timing.wall),
    "wall_forward_backward": ("forward_backward", timing.wall),
    "graph": ("forward", timing.graph),
}
# Who goes first when time is short: without us and the fast peers there is no ratio at all.
TIERS = {"sdpa:efficient": 1, "sdpa:math": 1, "flash-attn": 1, "fa4": 1, "xformers": 1, "flex": 2, "naive": 3}
TIERS |= {"fusedattn:naive": 4}
SLOW = {"sdpa:math": 1, "naive": 1, "fusedattn:naive": 2}  # with an option anybody else may be the peer
BROKEN = 3  # exit status: the GPU takes no more work from this process; start again with --resume
BREAKS = 2  # how often a provider may do that in one mode before it is not tried again


_LATE = frozenset(cases.MORE)


def tier(case, name):
    """When a provider is measured on a case: those of 0 first, in the order of the cases."""
    if case.options:
        return SLOW.get(name, 0)
    return TIERS.get(name, 0) + (2 if case in _LATE else 0)


class Question(NamedTuple):
    """What a file asks of this engine: in words, which modes, which table of cases on a GPU and without one."""

    doc: str  # its first line: the question, four spaces, the command that answers it
    modes: tuple = MODES
    on_gpu: str = "all"
    on_cpu: str = "tiny"
    shown: Callable[[Sequence], str] = table.text  # the answer, from rows
    providers: Callable[[str], list] = providers.usual  # of a device
    tier: Callable = tier


QUESTION = Question(__doc__)


def units(chosen, names, tier=tier):
    """(case, provider) in the order of importance: the fast providers through all cases, then the next."""
    work = [(case, name) for case in chosen for name in names if variants.concerns(name, case)]
    return sorted(work, key=lambda unit: tier(*unit))


def _is_ours(name, label):
    return label == name or (name in providers.OURS and label.startswith(f"{name}:"))


def _left(written, case, name, modes):
    """The modes that a run, broken off and now resumed, has yet to measure of a provider on a case."""
    own = [row for row in written if _is_ours(name, row.provider)]
    done = {row.mode for row in own if table.case_of(row) == case}
    broken = [row.mode for row in own if _broke(row.status)]
    return [mode for mode in modes if mode not in done and broken.count(mode) < BREAKS]


def _broke(status):
    """Whether a GPU broke down. One that has no driver did not: torch's nested tensors ask for one even on a CPU."""
    return ("CUDA error" in status and "driver version" not in status) or "Triton Error [CUDA]" in status


def measured(case, mode, call, tensors, truth, device, budget_ms):
    """The measured columns of one row, with a status, and what is wrong; truth None is a result nobody can judge."""
    kind, clock = CLOCKS.get(mode, (mode, timing.measure))
    if clock is timing.graph and torch.device(device).type != "cuda":
        raise calls.Unsupported("a CUDA graph needs a GPU")

    def judge(result):
        if truth is None:
            return "", "", ""
        return accuracy.judge(case, kind, calls.given_back(call, result), truth)

    with calls.around(kind, call):
        step = calls.step(kind, call, tensors, bare=True)
        found, why = columns(step, judge, case.dtype, device, budget_ms, clock)
    milliseconds = found["ms_p50"]
    found |= dict(tflops=cost.flops(case, kind) / milliseconds / 1e9, gbps=cost.moved(case, kind) / milliseconds / 1e6)
    return found, why


def columns(step, judge, dtype, device, budget_ms, clock):
    """What is measured of any step, with a status, and what is wrong; judge(result) is as `accuracy.judge` answers."""
    result, peak = timing.peak(step, device)
    error, eager, why = judge(result)
    del result
    times = clock(step, device, budget_ms)
    found = times.columns()
    found |= dict(peak_mib=peak, err_max=error, err_eager=eager, status="wrong" if why else "ok")
    return found | ceilings.measure(dtype, device)._asdict(), why


def unit(case, name, tensors, truth, modes, device, budget_ms):
    """(mode, provider, measured columns with a status, what to say of it) of one provider on one case, one by one."""
    label, refusal, call = name, None, None
    blind = providers.unchecked(case, name)
    try:
        label = providers.label(name, case, tensors)
        call = providers.find(name)(case, tensors)
    except Exception as error:  # a row like any other: what a peer cannot do is a result
        refusal = error
    for mode in modes:
        if call is None:
            yield mode, label, dict(status=status(refusal)), ""
            continue
        try:
            found, said = measured(case, mode, call, tensors, None if blind else truth, device, budget_ms)
            found |= dict(status=f"unchecked: {blind}") if blind else {}
        except Exception as error:
            found, said = dict(status=status(error)), ""
        yield mode, label, found, said


def out_of_memory(error):
    """Whether an error says so: on a CPU it is one of no type of its own."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def status(error):
    """What a row says that an error kept from being measured."""
    if out_of_memory(error):
        return "oom"
    text = str(error) if isinstance(error, calls.Unsupported) else f"{type(error).__name__}: {error}"
    # Of a crash of the GPU the first line says all, of the rest (advice on environment variables) nothing.
    return "unsupported: " + text.strip().partition("\n")[0][:300]


def run(chosen, names, modes, device, writer, machine, budget=None, budget_ms=100.0, resume=False, tier=tier):
    """Measure; True if all of it was, False if the budget ended first, None if the GPU broke down."""
    deadline = time.monotonic() + (budget if budget else float("inf"))
    work = units(chosen, names, tier)
    before = table.last_run(writer.rows) if resume else []
    drawn = tensors = truth = None
    for number, (case, name) in enumerate(work):
        left = _left(before, case, name, modes)
        if not left:
            continue
        if time.monotonic() > deadline:
            _say(f"the budget of {budget:g} s is over: {len(work) - number} of {len(work)} units are not measured")
            return False
        if drawn != case:
            drawn = tensors = truth = None  # free the last one first
            tensors = case.draw(device)
            truth, drawn = accuracy.truth(case, tensors), case
        for mode, label, found, said in unit(case, name, tensors, truth, left, device, budget_ms):
            writer.write(rows.row(machine, mode, label, case, **found))
            speed = f"{found['ms_p50']:10.4f} ms {found['tflops']:8.2f} TFLOP/s  " if "ms_p50" in found else ""
            _say(f"[{number + 1}/{len(work)}] {case.name} {label} {mode}: {speed}{found['status']} {said}")
            if _broke(found["status"]):
                return None
            if time.monotonic() > deadline:
                break
        gc.collect()
        if torch.device(device).type == "cuda":
            torch.cuda.empty_cache()
    return True


def _say(line):
    print(line.rstrip(), file=sys.stderr, flush=True)


def _list(text):
    return text.split(",")


def main(arguments=None, question=QUESTION):
    words = command.parser(question.doc)
    known = [*providers.PROVIDERS, *providers.ASIDE, "fusedattn:BACKEND", "fusedattn:hopper/PIPELINE"]
    known += ["fusedattn:backward/FORM"]
    words.add_argument(
        "--cases", choices=cases.TABLES, help=f"default: {question.on_gpu} on a GPU, {question.on_cpu} without"
    )
    words.add_argument("--providers", type=_list, help=f"some of {','.join(known)}")
    words.add_argument("--modes", type=_list, default=list(question.modes), help=",".join((*MODES, *CLOCKS)))
    words.add_argument("--resume", action="store_true", help="go on with the last run in the CSV")
    words.add_argument("--budget", type=float, help="seconds after which no more is started")
    options = words.parse_args(arguments)
    for name in options.providers or []:
        try:
            providers.find(name)
        except ValueError as error:
            words.error(str(error))
    if not set(options.modes) <= {*MODES, *CLOCKS}:
        words.error(f"--modes: expected some of {','.join((*MODES, *CLOCKS))}")

    on_gpu = torch.device(options.device).type == "cuda"
    names = options.providers or question.providers(options.device)
    writer = rows.Writer(options.csv)
    machine = rows.machine(options.device, options.commit)
    if options.resume and writer.rows:
        machine["date"] = writer.rows[-1].date
    _say(", ".join(f"{name} {value}" for name, value in machine.items() if value))
    chosen = cases.TABLES[options.cases or (question.on_gpu if on_gpu else question.on_cpu)]
    budget = options.budget, options.repeat_ms
    done = run(chosen, names, options.modes, options.device, writer, machine, *budget, options.resume, question.tier)
    print(question.shown(writer.rows))
    return BROKEN if done is None else 0


if __name__ == "__main__":
    sys.exit(main())
