"""How long a step takes, and how much memory: the one timer of every benchmark; and the machine's ceilings by it."""

import functools
import operator
import statistics
import time
from typing import NamedTuple

import torch

from .cases import SEED

FEWEST, MOST = 20, 200  # repeats whose quantiles are taken
SLOW_MS = 40.0  # five repeats are enough for a step this slow
FLUSH_BYTES = 2**30
TURN_MS = 5.0  # a turn of a quick step is as many calls as fit
FEWEST_TURNS, MOST_TURNS = 3, 40


class Times(NamedTuple):
    """Milliseconds of one step: the 20%, 50% and 80% quantiles, and the least, "" where it is not known."""

    p20: float
    p50: float
    p80: float
    least: float | str = ""

    def columns(self):
        """The columns of a row."""
        return dict(ms_p20=self.p20, ms_p50=self.p50, ms_p80=self.p80, ms_min=self.least)


def quantiles(milliseconds):
    """Times of a list of milliseconds."""
    shares = torch.tensor([0.2, 0.5, 0.8, 0.0], dtype=torch.float64)
    return Times(*torch.tensor(milliseconds, dtype=torch.float64).quantile(shares).tolist())


def measure(step, device, budget_ms=100.0):
    """Times of step() on a device, after a warm-up; on a GPU each repeat starts with cold caches.

    On a GPU it is the device's time: before each repeat it overwrites a buffer far larger than its cache, long enough
    for the host to launch the whole step meanwhile. `wall` times the host as well.
    """
    return (_on_gpu if torch.device(device).type == "cuda" else _on_cpu)(step, budget_ms)


def _on_gpu(step, budget_ms):
    room = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    flush = torch.empty(min(FLUSH_BYTES, room // 16), dtype=torch.int8, device="cuda")

    def repeat(count):
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
        for start, end in events:
            flush.zero_()
            start.record()
            step()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in events]

    repeat(1)
    (estimate,) = repeat(1)
    if estimate > SLOW_MS:
        return quantiles(repeat(5))
    repeat(5)
    return quantiles(repeat(max(FEWEST, min(MOST, int(budget_ms / max(estimate, 1e-3))))))


def _on_cpu(step, budget_ms):
    from torch.utils.benchmark import Timer

    timer = Timer("step()", globals={"step": step}, num_threads=torch.get_num_threads())
    step()
    return quantiles([1e3 * seconds for seconds in timer.blocked_autorange(min_run_time=budget_ms / 1e3).times])


def wall(step, device, budget_ms=100.0):
    """Times of step() for its caller: the host's with warm caches, many calls in a row, then one wait."""
    wait = torch.cuda.synchronize if torch.device(device).type == "cuda" else lambda: None

    def mean_of(calls):
        wait()
        start = time.perf_counter_ns()
        for _ in range(calls):
            step()
        wait()
        return (time.perf_counter_ns() - start) / 1e6 / calls

    mean_of(3)
    calls = int(budget_ms / FEWEST / max(mean_of(3), 1e-3))
    return quantiles([mean_of(max(1, min(calls, 100))) for _ in range(FEWEST)])


def graph(step, device, budget_ms=100.0):
    """Times of step() in a CUDA graph of many, with warm caches: the device's, without the host."""
    from triton.testing import do_bench_cudagraph

    return Times(*do_bench_cudagraph(step, rep=max(1, int(budget_ms) // 10), quantiles=[0.2, 0.5, 0.8]))


def peak(step, device):
    """(the result of step(), the MiB that it adds to memory at its peak); "" for the MiB without a GPU."""
    if torch.device(device).type != "cuda":
        return step(), ""
    step()  # whatever it allocates or compiles once is no part of the peak
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = step()
    torch.cuda.synchronize()
    return result, (torch.cuda.max_memory_allocated() - before) / 2**20


def interleaved(steps, repeats=2000, calls=1):
    """Times of {name: step} on one thread of the host, many calls of each in turn, so that other work slows all."""
    samples = {name: [] for name in steps}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for number in range(-(repeats // 10), repeats):
            for name, step in steps.items():
                for _ in range(calls // 4):  # the steps before it have displaced it from the caches
                    step()
                start = time.perf_counter_ns()
                for _ in range(calls):
                    step()
                samples[name] += [(time.perf_counter_ns() - start) / 1e6 / calls] * (number >= 0)
    finally:
        torch.set_num_threads(threads)
    return {name: quantiles(each) for name, each in samples.items()}


def in_turns(steps, budget_ms=100.0):
    """{name: (Times of CPU time, milliseconds of wall time)} of {name: step}, warm, a turn of each, again and again.

    CPU time is the process's, of all its threads: what other work takes of the machine is not in it. The wall time is
    the median, which other work is in.
    """

    def turn(step, calls):
        if calls > 1:
            step()  # what another provider left in caches and of the heap is not its own
        wall, cpu = time.perf_counter_ns(), time.process_time_ns()
        for _ in range(calls):
            step()
        cpu, wall = time.process_time_ns() - cpu, time.perf_counter_ns() - wall
        return cpu / 1e6 / calls, wall / 1e6 / calls

    once = {name: turn(step, 1) for name, step in steps.items()}
    for name, step in steps.items():
        if once[name][1] < TURN_MS:  # a first call may take long
            once[name] = min(once[name], turn(step, 3), key=operator.itemgetter(1))
    calls = {name: max(1, int(TURN_MS / wall)) for name, (_, wall) in once.items()}
    longest = max((once[name][1] * calls[name] for name in steps), default=1.0)
    samples = {name: [once[name]] * (calls[name] == 1) for name in steps}  # it was a whole turn of a slow step
    for _ in range(max(FEWEST_TURNS, min(MOST_TURNS, int(budget_ms / longest))) - 1):
        for name, step in steps.items():
            samples[name].append(turn(step, calls[name]))
    columns = {name: list(zip(*each, strict=True)) for name, each in samples.items()}
    return {name: (quantiles(cpu), statistics.median(wall)) for name, (cpu, wall) in columns.items()}


@functools.cache
def ceilings(dtype, device, budget_ms=60.0):
    """What a device reaches in a dtype, as columns of a row, once in a process: a data sheet knows no power limit.

    A product of two large square matrices, and a copy of more bytes than a cache holds, read once and written once.
    """
    on_gpu = torch.device(device).type == "cuda"
    side, size = (8192, 2**30) if on_gpu else (256, 2**25)
    generator = torch.Generator(device).manual_seed(SEED)
    left, right = torch.randn(2, side, side, device=device, generator=generator).to(getattr(torch, dtype))
    product = torch.empty_like(left)
    multiply = measure(lambda: torch.mm(left, right, out=product), device, budget_ms)
    source = torch.randint(2**31, (size // 4,), device=device, generator=generator, dtype=torch.int32)
    target = torch.empty_like(source)
    copy = measure(lambda: target.copy_(source), device, budget_ms)
    return dict(matmul_tflops=2 * side**3 / multiply.p50 / 1e9, copy_gbps=2 * size / copy.p50 / 1e6)
