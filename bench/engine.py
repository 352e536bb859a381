"""The engine: rows of a case, provider and mode, whatever happens to one of them."""

import gc
import itertools
import operator

import torch

from . import attention, calls, module, rows, timing

MODES = ("forward", "backward", "forward_backward")
# {mode: (the mode whose step it times, the clock)}
CLOCKS = {
    "wall": ("forward", timing.wall),
    "wall_forward_backward": ("forward_backward", timing.wall),
    "graph": ("forward", timing.graph),
}


def prepare(case, device):
    """The Workload of a case: a module or a model, where its options say so, or attention."""
    if "module" in case.words:
        return module.Module(case, device)
    return module.MODELS.get(case.words.get("model"), attention.Attention)(case, device)


def units(chosen, names, modes):
    """(case, provider, mode) of each of these that concern each other."""
    return [
        (case, name, mode)
        for case in chosen
        for name in names
        for mode in modes
        if "module" not in case.words or module.concerns(name, mode)
    ]


def measure(machine, units, device, budget_ms, prepare=prepare):
    """Yield (row, what is wrong or "") of each unit: (case, name of a provider, mode), those of a case in a row.

    machine: the first columns. prepare: function of a case and a device, which returns its Workload.
    """
    for case, of_case in itertools.groupby(units, key=operator.itemgetter(0)):
        workload, too_large = None, ""  # free the last one first
        try:
            workload = prepare(case, device)
        except Exception as error:
            if not (out_of_memory(error) or isinstance(error, calls.Unsupported)):
                raise
            too_large = status(error)
        for name, of_provider in itertools.groupby(of_case, key=operator.itemgetter(1)):
            label, provider, refused = name, None, too_large
            if workload is not None:
                try:
                    label = workload.label(name)
                    provider = workload.setup(name)
                except Exception as error:  # what a provider cannot do is a row
                    refused = status(error)
            for *_, mode in of_provider:
                measured, why = dict(status=refused), ""
                if not refused:
                    try:
                        measured, why = _timed(workload, name, provider, mode, budget_ms)
                    except Exception as error:
                        measured = dict(status=status(error))
                yield rows.row(machine, mode, label, case, **measured), why
            provider = None
            gc.collect()
            if torch.device(device).type == "cuda":
                torch.cuda.empty_cache()


def _timed(workload, name, provider, mode, budget_ms):
    """(the measured columns, what is wrong or "")"""
    kind, clock = CLOCKS.get(mode, (mode, timing.measure))
    device = workload.device
    if clock is timing.graph and torch.device(device).type != "cuda":
        raise calls.Unsupported("a CUDA graph needs a GPU")
    with workload.step(kind, provider) as step:
        result, peak = timing.peak(step, device)
        measured, why = judged(workload, name, provider, kind, result)
        del result
        times = clock(step, device, budget_ms)
    measured |= timed(workload, kind, times) | dict(peak_mib=peak)
    return measured | timing.ceilings(workload.case.dtype, device), why


def judged(workload, name, provider, kind, result):
    """(the columns of errors and the status, what is wrong or "") of the result of a step."""
    blind = workload.unchecked(name)
    error, eager, why = ("", "", "") if blind else workload.judge(kind, provider, result)
    status = "wrong" if why else f"unchecked: {blind}" if blind else "ok"
    return dict(err_max=error, err_eager=eager, status=status), why


def timed(workload, kind, times):
    """The columns of times, and of rates where these say something."""
    measured = times.columns()
    if (work := workload.work(kind)) is not None:
        operations, moved = work
        measured["tflops"] = operations / times.p50 / 1e9
        measured["gbps"] = "" if moved is None else moved / times.p50 / 1e6
    return measured


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


def broke(status):
    """Whether a GPU broke down. One without a driver did not: torch's nested tensors ask for one even on a CPU."""
    return ("CUDA error" in status and "driver version" not in status) or "Triton Error [CUDA]" in status
