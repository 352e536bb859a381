"""The engine: rows of a case, provider and mode, whatever happens to one of them."""

import torch

from . import accuracy, calls, cost, providers, rows, timing

MODES = ("forward", "backward", "forward_backward")
# {mode: (the mode whose step it times, the clock)}
CLOCKS = {
    "wall": ("forward", timing.wall),
    "wall_forward_backward": ("forward_backward", timing.wall),
    "graph": ("forward", timing.graph),
}


def columns(step, judge, dtype, device, budget_ms, clock, work=None):
    """(the measured columns of any step with a status, what is wrong or "").

    judge: function of the step's result, as `accuracy.judge`. work: (operations, bytes) of the step, for its rates.
    """
    result, peak = timing.peak(step, device)
    error, eager, why = judge(result)
    del result
    times = clock(step, device, budget_ms)
    measured = times.columns() | dict(peak_mib=peak, err_max=error, err_eager=eager, status="wrong" if why else "ok")
    if work is not None:
        operations, moved = work
        measured |= dict(tflops=operations / times.p50 / 1e9, gbps=moved / times.p50 / 1e6)
    return measured | timing.ceilings(dtype, device)._asdict(), why


def row_of(machine, case, mode, provider, measure, options=None):
    """(row, what is wrong or "") of measure(), which returns `columns`; what it raises is a row as well."""
    try:
        measured, why = measure()
    except Exception as error:  # what a provider cannot do is a result
        measured, why = dict(status=status(error)), ""
    return rows.row(machine, mode, provider, case, options=options, **measured), why


def measure(case, mode, call, tensors, truth, device, budget_ms):
    """`columns` of a provider's call of a case; without a Truth nothing is judged."""
    kind, clock = CLOCKS.get(mode, (mode, timing.measure))
    if clock is timing.graph and torch.device(device).type != "cuda":
        raise calls.Unsupported("a CUDA graph needs a GPU")

    def judge(result):
        if truth is None:
            return "", "", ""
        return accuracy.judge(case, kind, calls.unpacked(call, result), truth)

    with calls.around(kind, call):
        step = calls.step(kind, call, tensors)
        work = cost.flops(case, kind), cost.moved(case, kind)
        return columns(step, judge, case.dtype, device, budget_ms, clock, work)


def measure_all(machine, case, name, tensors, truth, modes, device, budget_ms):
    """Yield (row, what is wrong or "") of each mode of one provider on one case."""
    label, refusal, call = name, None, None
    blind = providers.unchecked(case, name)
    try:
        label = providers.label(name, case, tensors)
        call = providers.find(name)(case, tensors)
    except Exception as error:  # a row says it
        refusal = error

    def measured(mode):
        if refusal is not None:
            raise refusal
        found, why = measure(case, mode, call, tensors, None if blind else truth, device, budget_ms)
        return found | (dict(status=f"unchecked: {blind}") if blind else {}), why

    for mode in modes:
        yield row_of(machine, case, mode, label, lambda mode=mode: measured(mode))


def out_of_memory(error):
    """Whether an error says that memory is out: on a CPU that error has no type of its own."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def status(error):
    """The status of a row that an error kept from being measured."""
    if out_of_memory(error):
        return "oom"
    text = str(error) if isinstance(error, calls.Unsupported) else f"{type(error).__name__}: {error}"
    # Of a crash of the GPU the first line says all, the rest (advice on environment variables) nothing.
    return "unsupported: " + text.strip().partition("\n")[0][:300]
