"""fusedattn warmup: compiles the kernels of given shapes in parallel, into Triton's cache on disk."""

import itertools
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool

import torch

from ..bench.cases import Case
from ..call.options import Arguments, inputs
from ..call.rules import checked
from . import machine
from .output import Output, Problem

PASSES = ("backward", "training", "inference")  # the slowest first; training is a forward that saves for a backward


def compile_pass(case: Case, what: str, device: torch.device) -> dict:
    """Compile the kernels of a case for the pass `what`, without a launch, and return the entry for --json."""
    from ..launch import forward, hopper, recording, run, tile_table, tuned
    from ..launch.backward import launch_backward
    from ..operators import attention, backward

    class Counter(recording.Recorder):
        replayed = False

        def add(self, kernel, compiled, *launch) -> None:
            self.steps += [] if compiled in self.steps else [compiled]

    began, why, recorder = time.monotonic(), "", Counter(device, ())
    try:
        if max(case.D, case.Dv) > (most := tile_table.WIDTHS[-1]):
            raise NotImplementedError(f"expected D of at most {most}, got {max(case.D, case.Dv)}")
        keys = case.B, case.Hkv, case.Sk
        sizes = (case.B, case.Hq, case.Sq, case.D), (*keys, case.D), (*keys, case.Dv)
        query, key, value = (torch.empty(size, dtype=getattr(torch, case.dtype), device="meta") for size in sizes)
        call = checked(Arguments(query, key, value, causal=case.causal))
        with recorder:
            out, _, weights, stats = attention.new_forward(*call, False, False, what != "inference", "triton")
            if what == "backward":
                saved, need = (out, weights, stats), [x is not None for x in inputs(call)]
                grads = backward.new_backward(out, None, None, *saved, *call, "triton", need)
                grads = [x if x.numel() else None for x in grads]
                launch_backward(grads, out, None, None, *saved, call, "triton")
            else:
                on_hopper = run.has_hopper(query) and not hopper.reasons(call)
                on_hopper &= tuned.prefers_hopper("hopper", call, device)
                forward.launch_forward(out, None, None, stats if stats.numel() else None, call, on_hopper)
    except Exception as error:  # a compiler may raise anything; the command reports it
        why = f"{type(error).__name__}: {error}".partition("\n")[0][:300]
    return dict(case=case.name, what=what, kernels=len(recorder.steps), seconds=time.monotonic() - began, why=why)


def run(arguments, output: Output) -> int:
    machine.need_gpu("compiles kernels for")
    device = torch.device("cuda", torch.cuda.current_device())
    bands = (False, True) if arguments.causal is None else (arguments.causal,)
    every = itertools.product(arguments.shape, arguments.dtype or ["bfloat16"], bands)
    cases = [Case(*sizes, sizes[-1], band, dtype) for sizes, dtype, band in every]
    passes = PASSES[-1:] if arguments.inference else PASSES
    work = [(case, what) for what in passes for case in dict.fromkeys(cases)]
    jobs = min(arguments.jobs or machine.cores(), len(work))
    began, done = time.monotonic(), []
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    with ProcessPoolExecutor(jobs, mp_context=context) as pool, output.progress("passes", len(work)) as advance:
        try:
            for one in as_completed([pool.submit(compile_pass, *each, device) for each in work]):
                done.append(one.result())
                advance(f"{done[-1]['case']}, {done[-1]['what']}")
        except BrokenProcessPool:
            raise Problem("a compiling process was killed, perhaps for its memory; try fewer --jobs") from None
    names = [case.name for case in cases]
    done.sort(key=lambda one: (names.index(one["case"]), passes.index(one["what"])))
    rows = [[one["case"], one["what"], one["kernels"], f"{one['seconds']:.1f}", one["why"] or "ok"] for one in done]
    seconds = time.monotonic() - began
    output.table("Compiled kernels", ["shape", "pass", "kernels", "seconds", ""], rows)
    output.say(f"{sum(one['kernels'] for one in done)} kernels in {seconds:.1f} s with {jobs} processes.")
    failed = sum(one["why"] != "" for one in done)
    output.finish(dict(seconds=seconds, jobs=jobs, failed=failed, passes=done))
    return 1 if failed else 0
