"""What does the host do in one call of the kernels, step by step, without a GPU?

fa.attention for a stand-in GPU (tests/offline/absent.py): kernels are compiled, and launching one does nothing. The
rest is the host's part of an eager call, but for Triton's launcher in C and the driver behind it. Beside it
F.scaled_dot_product_attention on the CPU, of so few numbers that its time is the host's part as well.

A call like an earlier one replays its launches. That takes torch and Python: 0.15 us to 0.4 us to read a property of a
tensor, 1.7 us to make a tensor, 5 us for autograd to record a function, and some 30 calls of Python functions.
"""

import functools
import sys
from typing import NamedTuple

import torch
import torch.nn.functional as F
from fusedattn.bench import cases, rows
from fusedattn.bench.timing import interleaved

import fusedattn as fa
from fusedattn.launch import run
from fusedattn.replay import cache
from fusedattn.replay.cache import TENSORS
from tests.offline import absent

from . import questions

CASE = cases.Case(1, 8, 8, 128, 128, 64, 64, False, "bfloat16")
TINY = cases.Case(1, 1, 1, 8, 8, 8, 8, False, "float32")


class Step(NamedTuple):
    """A call that is timed, and torch's own beside it."""

    backend: str
    learned: bool
    peer: str
    goal_us: float


PLAIN, SDPA, SDPA_LEARNED = "fa.attention", "sdpa", "sdpa, with gradients"
CALLS = {
    PLAIN: Step("triton", False, SDPA, 12.0),
    "fa.attention, with gradients": Step("triton", True, SDPA_LEARNED, 25.0),
    "fa.attention on Hopper": Step("hopper", False, SDPA, 12.0),
    "fa.attention on Hopper, with gradients": Step("hopper", True, SDPA_LEARNED, 25.0),
}
NEW = "fa.attention of a new kind, as often as it takes to learn it"
FOUND, RUN, LAUNCHED, WHOLE = "found", "tensors made and kernels launched", "kernels launched", "repeated"


def _inputs(case, learned):
    return [x.requires_grad_(learned) for x in case.draw("cpu")[:3]]


def steps():
    """{what: a closure that does it}, for inside `absent.gpu`: whole calls, and what they consist of."""
    found = {}
    for name, (backend, learned, peer, _) in CALLS.items():
        inputs = _inputs(CASE, learned)
        found[peer] = functools.partial(F.scaled_dot_product_attention, *_inputs(TINY, learned))
        found[name] = functools.partial(fa.attention, *inputs, backend=backend)
        for _ in range(cache.RECORD_AFTER):
            out = found[name]()
        tensors = *inputs, *(None,) * (TENSORS - len(inputs))
        numbers = False, None, "bottom_right", None, None, 0.0, False, False, backend, torch.is_grad_enabled()
        again = cache.find(tensors, numbers)
        found[f"{name}: {FOUND}"] = functools.partial(cache.find, tensors, numbers)
        found[f"{name}: {WHOLE}"] = functools.partial(again, tensors)
        found[f"{name}: {RUN}"] = functools.partial(again.forward.run, tensors)
        found[f"{name}: {LAUNCHED}"] = functools.partial(again.forward.launch, again.forward.run(tensors))
    backward = functools.partial(torch.autograd.grad, out, inputs, torch.ones_like(out), retain_graph=True)
    return found | {"backward, and autograd's engine": backward}


def measured(blocks=40):
    """{name of a step: Times}, on one thread; the calls of a block follow each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with absent.gpu():
            every = steps()
            times = interleaved(every, blocks, calls=100)
            new = {NEW: lambda: (cache.forget(), [every[PLAIN]() for _ in range(cache.RECORD_AFTER)])}
            return times | interleaved(new, blocks, calls=10)
    finally:
        torch.set_num_threads(threads)


def report(times):
    """Lines: whole calls beside torch's, and what they consist of."""
    us = {name: 1e3 * each.p50 for name, each in times.items()}
    lines = [
        f"{CASE.name} on a GPU that is not there; torch's own: {TINY.name} on the CPU. Medians of blocks of calls."
    ]
    for name, (_, learned, peer, goal) in CALLS.items():
        part = {what: us[f"{name}: {what}"] for what in (FOUND, RUN, LAUNCHED, WHOLE)}
        lines.append(f"{name}: {us[name]:.1f} us, goal {goal:g}; {peer}: {us[peer]:.1f} us")
        lines += [
            f"    {cost:5.1f}  {what}"
            for what, cost in (
                ("what repeats it is found: types, addresses, guards in C++", part[FOUND]),
                ("tensors are made", part[RUN] - part[LAUNCHED]),
                ("arguments are bound, the kernel's own run is called", part[LAUNCHED]),
                ("autograd records it and keeps tensors" if learned else "results", part[WHOLE] - part[RUN]),
                ("Python's call of many arguments, and the rest", us[name] - part[FOUND] - part[WHOLE]),
            )
        ]
    peers = {step.peer for step in CALLS.values()}
    alone = [name for name in us if name not in peers and name not in CALLS and ":" not in name]
    return "\n".join([*lines, *(f"{name}: {us[name]:.1f} us" for name in alone)])


def main(arguments):
    options = questions.parser("launch_path", questions.OTHERS["launch_path"]).parse_args(arguments)
    if run.interpreting():
        sys.exit("launch_path: TRITON_INTERPRET is set, so nothing would be compiled; unset it")
    writer, machine = rows.Writer(options.csv), rows.machine("cpu", options.commit)
    times = measured()
    for name, each in times.items():
        ours = "sdpa" not in name
        backend = "hopper" if "Hopper" in name else "triton"
        provider, case = (f"fusedattn:{backend}", CASE) if ours else ("sdpa", TINY)
        said = "threads=1 " + ("absent " if ours else "") + name.replace(",", "").replace(":", "").replace(" ", "-")
        writer.write(rows.row(machine, "host", provider, case, options=said, **each.columns()))
    print(report(times))
    return 0
