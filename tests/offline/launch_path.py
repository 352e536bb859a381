"""What does the host do in one call of the kernels, step by step, without a GPU?

fa.attention for a stand-in GPU (absent.py): kernels are compiled, and launching one does nothing. The
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
from fusedattn.bench.dev import questions
from fusedattn.bench.timing import interleaved

import fusedattn as fa
from fusedattn.launch import run
from fusedattn.replay import cache

from . import absent

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
BACKWARD, NEW = "backward, and autograd's engine", "fa.attention of a new kind, as often as it takes to learn it"
FIND, RUN, LAUNCH, REPLAY = "found", "tensors made and kernels launched", "kernels launched", "repeated"


def steps():
    """{what: a closure that does it}, for inside `absent.gpu`: whole calls, and what they consist of."""
    every = {}
    for name, (backend, learned, peer, _) in CALLS.items():
        inputs, tiny = ([x.requires_grad_(learned) for x in case.draw("cpu")[:3]] for case in (CASE, TINY))
        every[peer] = functools.partial(F.scaled_dot_product_attention, *tiny)
        every[name] = functools.partial(fa.attention, *inputs, backend=backend)
        for _ in range(cache.RECORD_AFTER):
            out = every[name]()
        tensors = *inputs, *(None,) * (cache.TENSORS - len(inputs))
        numbers = False, None, "bottom_right", None, None, 0.0, False, False, backend, torch.is_grad_enabled()
        replay = cache.find(tensors, numbers)
        every |= {
            f"{name}: {FIND}": functools.partial(cache.find, tensors, numbers),
            f"{name}: {REPLAY}": functools.partial(replay, tensors),
            f"{name}: {RUN}": functools.partial(replay.forward.run, tensors),
            f"{name}: {LAUNCH}": functools.partial(replay.forward.launch, replay.forward.run(tensors)),
        }
    every[BACKWARD] = functools.partial(torch.autograd.grad, out, inputs, torch.ones_like(out), retain_graph=True)
    return every


def measured(blocks=40):
    """{name of a step: Times}; the calls of a block follow each other."""
    with absent.gpu():
        every = steps()
        times = interleaved(every, blocks, calls=100)
        new = {NEW: lambda: (cache.forget(), [every[PLAIN]() for _ in range(cache.RECORD_AFTER)])}
        return times | interleaved(new, blocks, calls=10)


def report(times):
    """Lines: whole calls beside torch's, and what they consist of."""
    us = {name: 1e3 * each.p50 for name, each in times.items()}
    yield f"{CASE.name} on a GPU that is not there; torch's own: {TINY.name} on the CPU. Medians of blocks of calls."
    for name, (_, learned, peer, goal) in CALLS.items():
        find, run, launch, replay = (us[f"{name}: {what}"] for what in (FIND, RUN, LAUNCH, REPLAY))
        yield f"{name}: {us[name]:.1f} us, goal {goal:g}; {peer}: {us[peer]:.1f} us"
        yield f"    {find:5.1f}  what repeats it is found: types, addresses, guards in C++"
        yield f"    {run - launch:5.1f}  tensors are made"
        yield f"    {launch:5.1f}  arguments are bound, the kernel's own run is called"
        yield f"    {replay - run:5.1f}  {'autograd records it and keeps tensors' if learned else 'results'}"
        yield f"    {us[name] - find - replay:5.1f}  Python's call of many arguments, and the rest"
    yield from (f"{name}: {us[name]:.1f} us" for name in (BACKWARD, NEW))


def main(arguments):
    options = questions.parser("launch_path").parse_args([*arguments, "--device", "cpu"])
    if run.interpreting():
        sys.exit("launch_path: TRITON_INTERPRET is set, so nothing would be compiled; unset it")
    (writer, machine), times = questions.opened(options), measured()
    for name, each in times.items():
        ours = "sdpa" not in name
        provider = f"fusedattn:{'hopper' if 'Hopper' in name else 'triton'}" if ours else "sdpa"
        words = "threads=1 " + ("absent " if ours else "") + name.replace(",", "").replace(":", "").replace(" ", "-")
        writer.write(rows.row(machine, "host", provider, CASE if ours else TINY, options=words, **each.columns()))
    print("\n".join(report(times)))
    return 0
