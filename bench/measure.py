"""Measurement of attention calls: results are checked against float64 by the tests' tolerance, then calls are timed."""

import contextlib
import functools
import gc
import itertools
import statistics
import time

import torch

import fusedattn as fa
from fusedattn.testing.tolerance import verdicts

from . import providers, rows
from .cases import Tensors
from .providers import Unsupported

MODES = ("forward", "backward", "forward_backward")
REPEATED = 3  # forwards before a backward is timed alone: fusedattn then replays them, as in training
NAMES = ("query", "key", "value", "bias")
TURN_MS = 5.0  # on a CPU steps take turns of about this time, in which a quick step is called several times
FEWEST = 5  # minimum number of turns of each step


class Workload:
    """Tensors of a case, its float64 and eager results, and the Call of each provider; each is computed once."""

    def __init__(self, case, device):
        self.case, self.tensors = case, (tensors := case.draw(device))
        self.call = functools.cache(lambda name: providers.setup(name, case, tensors))  # does not refer to self

    @functools.cached_property
    def truth(self):
        return truth(self.case, self.tensors)

    def label(self, name):
        """Return a provider's name for the CSV; for fusedattn with its backend, unless the case is of a module."""
        if name != "fusedattn" or "module" in self.case.words:
            return name
        return f"{name}:{providers.explain(self.case, self.tensors).backend}"

    def step(self, mode, call):
        """Return the function to time; it returns the output, or in a backward mode all gradients."""
        inputs = call.pack(self.tensors.inputs)
        if mode not in MODES[1:]:
            return lambda: call.attend(*inputs)
        inputs = [x.detach().requires_grad_() for x in inputs]
        leaves = [*inputs, *call.parameters]

        def output():
            out = call.attend(*inputs)
            return out[0] if isinstance(out, tuple) else out  # the loss depends on the output alone

        out = None
        for _ in range(REPEATED if mode == "backward" else 1):
            out = None  # free the previous graph before building the next
            out = output()
        # The gradient has the strides of the output, so that no provider has to copy it.
        grad_out = torch.empty_like(out).copy_(call.pack([self.tensors.grad_out])[0])
        if mode == "backward":
            return lambda: torch.autograd.grad(out, leaves, grad_out, retain_graph=True)
        return lambda: torch.autograd.grad(output(), leaves, grad_out)

    def judge(self, mode, call, result):
        """Return (error of a step's result, eager PyTorch's error, reason why the result is wrong or "")."""
        names = NAMES[: len(self.tensors.inputs)] if mode in MODES[1:] else ("out", "weights")
        result = dict(zip(names, result if isinstance(result, tuple) else (result,), strict=False))
        unpacked = {name: x if name in ("weights", "bias") else call.unpack(x) for name, x in result.items()}
        return compare({name: of_head(self.case, x) for name, x in unpacked.items()}, *self.truth)


def of_head(case, x):
    """Return one kv head of x or its query heads: if possible the last of the last batch, to detect wrong strides."""
    if "module" in case.words:
        return x  # a module's output mixes all heads
    if x.dim() < 3:  # numbers of heads (H,), or tokens (B, S)
        return of_head(case, x[None, :, None])[0, :, 0] if x.dim() == 1 else of_head(case, x[:, None])[:, 0]
    count = case.Hq // case.Hkv if x.shape[1] == case.Hq else 1
    if "dropout" in case.options:  # the first head: dropout bits depend on its index, which is 0 in a slice
        return x[:1, :count]
    return x[:, -count:] if "bias" in case.words else x[-1:, -count:]  # all batches: the bias's gradient is their sum


@torch.enable_grad()
def truth(case, tensors):
    """Return {name: result or gradient} of the head that `of_head` selects: in float64, and by eager PyTorch."""
    *inputs, bias = (x if x is None else of_head(case, x) for x in tensors[:5])
    head = Tensors(*inputs, bias, {name: of_head(case, x) for name, x in tensors.masks.items()})
    if "module" in case.words:
        exact = providers.module(lambda theirs, causal: theirs.double(), case, head).attend
        eager = providers.setup("torch.nn", case, head).attend
    else:
        formulas = fa.reference.attention, fa.reference.eager
        exact, eager = (providers.formula(function, case, head, return_lse=True) for function in formulas)

    def compute(function, inputs, grad_out):
        inputs = [x.detach().requires_grad_() for x in inputs]
        results = function(*inputs)
        out, *others = results if isinstance(results, tuple) else (results,)
        gradients = torch.autograd.grad(out, inputs, grad_out)
        outputs = dict(zip(("out", "lse", "weights"), (x.detach() for x in (out, *others)), strict=False))
        return outputs | dict(zip(NAMES, gradients, strict=False))

    in_float64 = compute(exact, [x.double() for x in head.inputs], head.grad_out.double())
    return in_float64, compute(eager, head.inputs, head.grad_out)


def compare(results, oracle, eager):
    """Return (error, eager PyTorch's error) of the worst tensor, and the reasons why tensors are wrong, or ""."""
    judged = verdicts(results, eager, {name: oracle[name] for name in results})
    worst = max(judged.values(), key=lambda one: (not one.ok, one.max_error / one.max_allowed))
    why = "; ".join(f"{name}: {one.why}" for name, one in judged.items() if not one.ok)
    return worst.max_error, worst.max_eager, why


def measure(machine, cases, names, modes, device, budget_ms=100.0):
    """Yield a row for each case, mode and provider. Its status reports a failure."""
    # On a CPU one thread computes and the providers take turns, so that ratios are steady while other programs run.
    on_gpu, threads = torch.device(device).type == "cuda", torch.get_num_threads()
    torch.set_num_threads(threads if on_gpu else 1)
    try:
        for case in cases:
            workload = functools.cache(functools.partial(Workload, case, device))
            for mode, some in itertools.product(modes, [[name] for name in names] if on_gpu else [names]):
                for label, columns in _measure(workload, case, mode, some, device, budget_ms):
                    yield rows.row(machine, mode, label, case, **columns)
                gc.collect()
                if on_gpu:
                    torch.cuda.empty_cache()
    finally:
        torch.set_num_threads(threads)


def _measure(workload, case, mode, names, device, budget_ms):
    """Return [(label, columns of the row)], one for each provider."""
    # workload() returns the Workload of the case, or raises if its tensors cannot be drawn.
    found, steps = {}, {}
    with torch.set_grad_enabled(mode in MODES[1:]):
        for name in names:
            label, columns = name, {}
            try:
                label, call = workload().label(name), workload().call(name)
                if mode == "graph" and torch.device(device).type != "cuda":
                    raise Unsupported("a CUDA graph needs a GPU")
                with call.inside():
                    step = workload().step(mode, call)
                    result, columns["peak_mib"] = _peak(step, device)
                if "dropout" in case.options and not name.startswith(("fusedattn", "naive")):
                    columns["status"] = "unchecked: its dropout has bits of its own"
                else:
                    columns["err_max"], columns["err_eager"], why = workload().judge(mode, call, result)
                    columns["status"] = f"wrong: {why}" if why else "ok"
                del result
                steps[name] = step
            except Exception as error:  # a provider that cannot run still gets a row, with the error as its status
                columns = dict(status=status(error))
            found[name] = label, columns
        try:
            timed = times(steps, mode, device, budget_ms, lambda name: workload().call(name).inside())
        except Exception as error:
            timed, found = {}, found | {name: (found[name][0], dict(status=status(error))) for name in steps}
    for name, (p20, p50, p80) in timed.items():
        tflops = case.flops(mode) / p50 / 1e9
        gbps = case.moved() / p50 / 1e6 if mode in ("forward", "graph") else ""
        found[name][1].update(ms_p20=p20, ms_p50=p50, ms_p80=p80, tflops=tflops, gbps=gbps)
    return list(found.values())


def _peak(step, device):
    """Return (result of a step, peak of additional GPU memory in MiB; "" on a CPU)."""
    if torch.device(device).type != "cuda":
        return step(), ""
    step()  # the first call may compile
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = step()
    torch.cuda.synchronize()
    return result, (torch.cuda.max_memory_allocated() - before) / 2**20


def times(steps, mode, device, budget_ms, inside=contextlib.nullcontext):
    """Return {name: 20%, 50% and 80% quantiles of milliseconds}; inside(name) is the context to call a step in."""
    # On a GPU Triton's timer measures the device's time with cold caches, or a call's share of a CUDA graph. The timer
    # overwrites 256 MB between calls, in some 60 us on an H200. If a launch takes longer, the time includes the host's.
    if torch.device(device).type != "cuda":
        return in_turns(steps, budget_ms, inside)
    from triton.testing import do_bench, do_bench_cudagraph

    timed, quantiles = {}, (0.2, 0.5, 0.8)
    for name, step in steps.items():
        with inside(name):
            if mode == "graph":
                timed[name] = do_bench_cudagraph(step, rep=20, quantiles=quantiles)
            else:
                timed[name] = do_bench(step, warmup=25, rep=budget_ms, quantiles=quantiles)
    return timed


def in_turns(steps, budget_ms, inside=contextlib.nullcontext):
    """Return {name: quantiles of CPU time in milliseconds} of {name: step}, calling the steps alternately."""

    def turn(name, calls):
        step = steps[name]
        with inside(name):
            step()  # brings the step's data back into the CPU's caches
            began = time.process_time()
            for _ in range(calls):
                step()
            return 1e3 * (time.process_time() - began) / calls

    calls = {name: max(1, int(TURN_MS / max(turn(name, 1), 1e-3))) for name in steps}
    samples = {name: [] for name in steps}
    ends, turns = time.perf_counter() + budget_ms * len(steps) / 1e3, 0
    while steps and (turns < FEWEST or time.perf_counter() < ends):
        turns += 1
        for name in steps:
            samples[name].append(turn(name, calls[name]))
    deciles = {name: statistics.quantiles(each, n=10, method="inclusive") for name, each in samples.items()}
    return {name: (each[1], each[4], each[7]) for name, each in deciles.items()}


def status(error):
    if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):  # a CPU's error
        return "oom"
    text = str(error) if isinstance(error, Unsupported) else f"{type(error).__name__}: {error}"
    return "unsupported: " + text.strip().partition("\n")[0][:300]


def broke(status):
    """Return True if a status says that the GPU can no longer be used; a missing driver does not count."""
    return ("CUDA error" in status and "driver version" not in status) or "Triton Error [CUDA]" in status
