"""Measures cases, providers and modes: compares each result with float64 by the tests' tolerance, then times it."""

import contextlib
import copy
import functools
import gc
import itertools
import time

import torch

import fusedattn as fa
from fusedattn.testing.compare import in_float64, with_gradients
from fusedattn.testing.tolerance import verdicts

from . import providers, rows
from .cases import SEED
from .providers import PROVIDERS, Call, Unsupported

MODES = ("forward", "backward", "forward_backward")
REPEATED = 3  # calls before a backward is timed alone: from then on calls are replayed, as in training
NAMES = ("query", "key", "value", "bias")
TURN_MS = 5.0  # on a CPU a turn of a quick step is as many calls as fit


class Attention:
    """Attention of a case. One head is compared with float64: the last, where a wrong stride shows most."""

    def __init__(self, case, device):
        self.case, self.tensors = case, case.draw(device)
        self.inputs, self.grad_out = self.tensors.inputs, self.tensors.grad_out

    def label(self, name):
        """Return the provider of a row; ours names the backend that takes the case."""
        return f"{name}:{providers.explain(self.case, self.tensors).backend}" if name == "fusedattn" else name

    def setup(self, name):
        call = PROVIDERS[name](self.case, self.tensors)
        return call if isinstance(call, Call) else Call(call)

    @contextlib.contextmanager
    def step(self, mode, call):
        """Yield the function that is timed. It returns the output, or the gradients of all inputs and parameters."""
        with call.inside(), torch.set_grad_enabled(mode in MODES[1:]):
            inputs = call.pack(self.inputs)
            if not torch.is_grad_enabled():
                yield lambda: call.attend(*inputs)
                return
            inputs = [x.detach().requires_grad_() for x in inputs]
            leaves = [*inputs, *call.parameters]

            def output():
                out = call.attend(*inputs)
                return out[0] if isinstance(out, tuple) else out  # the loss depends on the output alone

            out = None
            for _ in range(REPEATED if mode == "backward" else 1):
                out = None  # one graph at a time
                out = output()
            # With the strides of the output, so that no provider has to copy it.
            grad_out = torch.empty_like(out).copy_(call.pack([self.grad_out])[0])
            if mode == "backward":
                yield lambda: torch.autograd.grad(out, leaves, grad_out, retain_graph=True)
            else:
                del out
                yield lambda: torch.autograd.grad(output(), leaves, grad_out)

    def results(self, mode, call, result):
        """Return {name: tensor} of a step's result, for the one head that is compared with float64."""
        names = NAMES if mode in MODES[1:] else ("out", "weights")
        result = dict(zip(names, result if isinstance(result, tuple) else (result,), strict=False))
        unpacked = {name: x if name in ("weights", "bias") else call.unpack(x) for name, x in result.items()}
        return {name: of_head(self.case, x) for name, x in unpacked.items()}

    @functools.cached_property
    def truth(self):
        return truth(self.case, self.tensors)

    def judge(self, name, mode, call, result):
        """Return (error, eager PyTorch's error, what is wrong or "")."""
        if "dropout" in self.case.options and not name.startswith(("fusedattn", "naive")):
            raise Unchecked("its dropout has bits of its own")
        return compare(self.results(mode, call, result), *self.truth)


class Module(Attention):
    """Self-attention with projections: torch's module, our replacement, and our own module, with the same weights."""

    def __init__(self, case, device):
        self.case, width, dtype = case, case.Hq * case.D, getattr(torch, case.dtype)
        torch.manual_seed(SEED)
        self.torch_nn = torch.nn.MultiheadAttention(width, case.Hq, batch_first=True, device=device, dtype=dtype)
        x, self.grad_out = torch.randn(2, case.B, case.Sq, width, device=device).to(dtype)
        self.inputs = (x,)

    def label(self, name):
        return name

    def setup(self, name):
        if name == "fusedattn":
            return self.call(self.ours())
        if name == "fusedattn.compat":
            return self.call(fa.compat.torch.convert(copy.deepcopy(self.torch_nn)))
        if name == "torch.nn":
            return self.call(self.torch_nn)
        raise Unsupported("it is no module")

    def ours(self):
        """Return our module with the weights of torch's."""
        (x,), theirs = self.inputs, self.torch_nn
        like = dict(causal=self.case.causal, device=x.device, dtype=x.dtype)
        layer = fa.MultiHeadAttention(x.shape[2], self.case.Hq, **like)
        projections = layer.q_proj, layer.k_proj, layer.v_proj
        weights, biases = theirs.in_proj_weight.chunk(3), theirs.in_proj_bias.chunk(3)
        for projection, weight, bias in zip(projections, weights, biases, strict=True):
            projection.load_state_dict(dict(weight=weight, bias=bias))
        layer.out_proj.load_state_dict(theirs.out_proj.state_dict())
        return layer

    def call(self, layer):
        options = dict(need_weights=False)
        if self.case.causal and not isinstance(layer, fa.MultiHeadAttention):
            hidden = torch.ones(self.case.Sq, self.case.Sq, dtype=torch.bool, device=self.grad_out.device).triu(1)
            options |= dict(attn_mask=hidden, is_causal=True)
        layer.eval()  # torch's module takes its fast path only here, and without gradients
        return Call(lambda x: layer(x, x, x, **options)[0], parameters=tuple(layer.parameters()))

    def results(self, mode, call, result):
        return {"x": result[0]} if isinstance(result, tuple) else {"out": result}

    @functools.cached_property
    @torch.enable_grad()
    def truth(self):
        def compute(layer, x, grad_out):
            x = x.detach().requires_grad_()
            out = self.call(layer).attend(x)
            return dict(out=out.detach(), x=torch.autograd.grad(out, x, grad_out)[0])

        tensors, exact = (*self.inputs, self.grad_out), copy.deepcopy(self.torch_nn).double()
        return compute(exact, *(x.double() for x in tensors)), compute(self.torch_nn, *tensors)


class Unchecked(Exception):
    """The tolerance does not apply to a result; the text says why."""


def of_head(case, x):
    """Return the compared head of a tensor (B or 1, heads, ...) or of its gradient."""
    count = case.Hq // case.Hkv if x.shape[1] == case.Hq else 1
    if "dropout" in case.options:  # its bits depend on the index of the head, and a slice begins at 0
        return x[:1, :count]
    return x[:, -count:] if "bias" in case.words else x[-1:, -count:]  # the bias's gradient sums over the batch


@torch.enable_grad()
def truth(case, tensors):
    """Return {name: result or gradient} of the compared head by float64, and by eager PyTorch."""
    sliced = {name: of_head(case, x) for name, x in zip(NAMES, tensors.inputs, strict=False)}
    sliced["out"] = of_head(case, tensors.grad_out)
    masks = {name: of_head(case, x[:, None])[:, 0] if x.dim() == 2 else x for name, x in tensors.masks.items()}
    options = case.arguments(masks)

    def compute(function, tensors):
        bias = {"bias": tensors["bias"]} if "bias" in tensors else {}
        results = with_gradients(function, tensors, options | bias, grads="out")
        if "weights" in case.words:
            with torch.no_grad():
                query, key, value = (tensors[name] for name in NAMES[:3])
                results["weights"] = function(query, key, value, **options, **bias, return_weights=True)[1]
        return results

    return compute(fa.reference.attention, in_float64(sliced)), compute(fa.reference.eager, sliced)


def compare(results, oracle, eager):
    """Return (error, eager PyTorch's error, what is wrong or "") of the worst of {name: tensor}."""
    judged = verdicts(results, eager, {name: oracle[name] for name in results})
    worst = max(judged.values(), key=lambda one: (not one.ok, one.max_error / one.max_allowed))
    why = "; ".join(f"{name}: {one.why}" for name, one in judged.items() if not one.ok)
    return worst.max_error, worst.max_eager, why


def measure(machine, cases, names, modes, device, budget_ms=100.0):
    """Yield (row, what is wrong or "") of each case, mode and provider. A row says why it could not be measured.

    On a CPU one thread computes and the providers take turns, so that ratios are steady while other programs run.
    """
    on_gpu, threads = torch.device(device).type == "cuda", torch.get_num_threads()
    torch.set_num_threads(threads if on_gpu else 1)
    try:
        for case in cases:
            workload, refused, setups = None, "", {}
            try:
                workload = (Module if "module" in case.words else Attention)(case, device)
            except Exception as error:
                refused = status(error)
            for mode, some in itertools.product(modes, [[name] for name in names] if on_gpu else [names]):
                if refused:
                    found = [(name, dict(status=refused), "") for name in some]
                else:
                    found = _measure(workload, mode, some, setups, device, budget_ms)
                for label, measured, why in found:
                    yield rows.row(machine, mode, label, case, **measured), why
                gc.collect()
                if on_gpu:
                    torch.cuda.empty_cache()
    finally:
        torch.set_num_threads(threads)


def _measure(workload, mode, names, setups, device, budget_ms):
    """Return [(label, columns, what is wrong or "")] of providers; setups: {name: Call} so far."""
    found, steps = {}, {}
    with contextlib.ExitStack() as inside:
        for name in names:
            label = name
            try:
                label = workload.label(name)
                setups[name] = setups.get(name) or workload.setup(name)
                if mode == "graph" and torch.device(device).type != "cuda":
                    raise Unsupported("a CUDA graph needs a GPU")
                step = inside.enter_context(workload.step(mode, setups[name]))
                result, mib = _peak(step, device)
                columns, why = dict(peak_mib=mib), ""
                try:
                    error, eager, why = workload.judge(name, mode, setups[name], result)
                    columns |= dict(err_max=error, err_eager=eager, status="wrong" if why else "ok")
                except Unchecked as unchecked:
                    columns["status"] = f"unchecked: {unchecked}"
                del result
                found[name], steps[name] = (label, columns, why), step
            except Exception as error:  # a provider that cannot run is a row
                found[name] = label, dict(status=status(error)), ""
        try:
            timed = times(steps, mode, device, budget_ms)
        except Exception as error:
            timed, found = {}, found | {name: (found[name][0], dict(status=status(error)), "") for name in steps}
    for name, (p20, p50, p80) in timed.items():
        tflops = workload.case.flops(mode) / p50 / 1e9
        gbps = workload.case.moved() / p50 / 1e6 if mode in ("forward", "graph") else ""
        found[name][1].update(ms_p20=p20, ms_p50=p50, ms_p80=p80, tflops=tflops, gbps=gbps)
    return list(found.values())


def _peak(step, device):
    """Return (result of a step, its peak of additional GPU memory in MiB, or "" on a CPU)."""
    if torch.device(device).type != "cuda":
        return step(), ""
    step()  # compiles first
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = step()
    torch.cuda.synchronize()
    return result, (torch.cuda.max_memory_allocated() - before) / 2**20


def times(steps, mode, device, budget_ms):
    """Return {name: (20%, 50% and 80% quantiles)} of milliseconds.

    On a GPU it is Triton's timer: the device's time with cold caches, or a call's share of a CUDA graph. The timer
    overwrites 256 MB between calls, some 60 us on an H200: a step whose launch takes longer includes host time.
    """
    quantiles = (0.2, 0.5, 0.8)
    if torch.device(device).type != "cuda":
        return in_turns(steps, budget_ms)
    from triton.testing import do_bench, do_bench_cudagraph

    if mode == "graph":
        return {name: do_bench_cudagraph(step, rep=20, quantiles=quantiles) for name, step in steps.items()}
    return {name: do_bench(step, warmup=25, rep=budget_ms, quantiles=quantiles) for name, step in steps.items()}


def in_turns(steps, budget_ms, fewest=5):
    """Return the quantiles of the CPU time of {name: step}; the steps take turns."""

    def turn(step, calls):
        began = time.process_time()
        for _ in range(calls):
            step()
        return 1e3 * (time.process_time() - began) / calls

    calls = {name: max(1, int(TURN_MS / max(min(turn(step, 1), turn(step, 1)), 1e-3))) for name, step in steps.items()}
    samples = {name: [] for name in steps}
    ends = time.perf_counter() + budget_ms * len(steps) / 1e3
    while steps and (len(samples[next(iter(steps))]) < fewest or time.perf_counter() < ends):
        for name, step in steps.items():
            step()  # brings its data back into the caches
            samples[name].append(turn(step, calls[name]))
    shares = torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)
    return {x: tuple(torch.tensor(each, dtype=torch.float64).quantile(shares).tolist()) for x, each in samples.items()}


def status(error):
    """Return the status of a row that failed with an error."""
    if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):  # the latter on a CPU
        return "oom"
    text = str(error) if isinstance(error, Unsupported) else f"{type(error).__name__}: {error}"
    return "unsupported: " + text.strip().partition("\n")[0][:300]


def broke(status):
    """Return whether the GPU can no longer be used; a missing driver does not count."""
    return ("CUDA error" in status and "driver version" not in status) or "Triton Error [CUDA]" in status
