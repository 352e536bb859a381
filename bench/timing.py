"""How long a step takes, and how much memory: the one timer of every benchmark."""

import time
from typing import NamedTuple

import torch

FEWEST, MOST = 20, 200  # repeats whose quantiles are taken
SLOW_MS = 40.0  # a step this slow is nobody's peer: five repeats will do
FLUSH_BYTES = 2**30


class Times(NamedTuple):
    """Milliseconds of one step: median, the quantiles around it, and the least, "" where it is not known."""

    p20: float
    p50: float
    p80: float
    least: float | str = ""

    def columns(self):
        """As a row of a CSV has them."""
        return dict(ms_p20=self.p20, ms_p50=self.p50, ms_p80=self.p80, ms_min=self.least)


def _quantiles(milliseconds):
    quantiles = torch.tensor([0.2, 0.5, 0.8, 0.0], dtype=torch.float64)
    return Times(*torch.tensor(milliseconds, dtype=torch.float64).quantile(quantiles).tolist())


def measure(step, device, budget_ms=100.0):
    """Times of step() on a device, each repeat with cold caches on a GPU; warm-up is not counted.

    On a GPU it is the device's time: before each repeat it overwrites a buffer far larger than its cache, long enough
    for the host to launch the whole step meanwhile. The host's own time has a benchmark of its own (host.py).
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
        return _quantiles(repeat(5))
    repeat(5)
    return _quantiles(repeat(max(FEWEST, min(MOST, int(budget_ms / max(estimate, 1e-3))))))


def _on_cpu(step, budget_ms):
    from torch.utils.benchmark import Timer

    timer = Timer("step()", globals={"step": step}, num_threads=torch.get_num_threads())
    step()
    return _quantiles([1e3 * seconds for seconds in timer.blocked_autorange(min_run_time=budget_ms / 1e3).times])


def wall(step, device, budget_ms=100.0):
    """Times of step() as its caller sees them: the host's with warm caches, many calls in a row, then one wait."""
    wait = torch.cuda.synchronize if torch.device(device).type == "cuda" else lambda: None

    def row(calls):
        wait()
        start = time.perf_counter_ns()
        for _ in range(calls):
            step()
        wait()
        return (time.perf_counter_ns() - start) / 1e6 / calls

    row(3)
    calls = int(budget_ms / FEWEST / max(row(3), 1e-3))
    return _quantiles([row(max(1, min(calls, 100))) for _ in range(FEWEST)])


def graph(step, device, budget_ms=100.0):
    """Times of step() in a CUDA graph that holds it many times over, caches warm: the device's, without the host."""
    from triton.testing import do_bench_cudagraph

    return Times(*do_bench_cudagraph(step, rep=max(1, int(budget_ms) // 10), quantiles=[0.2, 0.5, 0.8]))


def peak(step, device):
    """(what step() returns, the MiB it holds at its peak above what was held before); "" without a GPU."""
    if torch.device(device).type != "cuda":
        return step(), ""
    step()  # whatever it allocates or compiles once is no part of the peak
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = step()
    torch.cuda.synchronize()
    return result, (torch.cuda.max_memory_allocated() - before) / 2**20


def synchronised():
    """Seconds, when all that was launched is done: the clock of pytest-benchmark."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def interleaved(steps, repeats=2000):
    """Times of each of {name: step} on the host, in turns, so that what else the machine does hits all alike."""
    taken = {name: [] for name in steps}
    for turn in range(repeats + repeats // 10):
        for name, step in steps.items():
            start = time.perf_counter_ns()
            step()
            end = time.perf_counter_ns()
            if turn >= repeats // 10:
                taken[name].append((end - start) / 1e6)
    return {name: _quantiles(each) for name, each in taken.items()}
