"""fusedattn check: holds every backend of this machine to float64, beside eager PyTorch."""

import difflib
import itertools
import time

import torch

from ..backends import BACKENDS
from ..testing.cases import CASES, RESULTS, Case, compare
from ..testing.tolerance import Verdict
from . import DTYPES, machine
from .screen import Problem, Screen, listed


def run(arguments) -> int:
    screen, began = Screen(arguments.json), time.monotonic()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise Problem("device: torch finds no GPU")
    here = machine.device()  # has Triton interpret kernels where there is no GPU, whatever device is named
    devices = [arguments.device] if arguments.device else list(dict.fromkeys((here, "cpu")))
    cases = _named(arguments.case, {case.name: case for case in CASES}, "case")
    backends = _named(arguments.backend, {name: name for name in BACKENDS}, "backend")
    parts: list[tuple[str, str, str]] = []
    left_out: list[dict] = []
    for device, backend, dtype in itertools.product(devices, backends, arguments.dtype or DTYPES):
        if reasons := machine.explained(device, dtype, backend).reasons.get(backend, []):
            left_out.append(dict(backend=backend, device=device, dtype=dtype, reasons=reasons))
        else:
            parts.append((backend, device, dtype))

    verdicts: dict[tuple, dict[str, dict[str, Verdict]]] = {part: {} for part in parts}
    with screen.progress("cases", len(parts) * len(cases)) as advance:
        for backend, device, dtype in parts:
            for case in cases:
                advance(f"{backend} {dtype}: {case.name}")
                found, reason = _check(case, backend, device, dtype)
                verdicts[backend, device, dtype][case.name] = found
                if reason:
                    about = dict(backend=backend, device=device, dtype=dtype)
                    left_out.append(about | dict(case=case.name, reasons=[reason]))

    for (backend, device, dtype), of_cases in verdicts.items():
        fused = torch.cuda.get_device_name() if device == "cuda" else "cpu (interpreted)"
        where = device if backend in ("cpu", "naive") else fused
        title = f"{backend} on {where}, {dtype}: largest error / that of eager PyTorch, against float64"
        screen.verdicts(title, of_cases, [*RESULTS.values()])
    for line in _left_out(left_out):
        screen.say(line)
    wrong, results = 0, []
    for (backend, device, dtype), of_cases in verdicts.items():
        wrong += screen.failures(of_cases, f"{backend} on {device} in {dtype}, ")
        about = dict(backend=backend, device=device, dtype=dtype)
        results += [about | row for row in listed(of_cases, "case")]
    seconds, total = round(time.monotonic() - began, 1), len(results)
    summary = f"{total - wrong} of {total} results are as good as eager PyTorch's" if results else "nothing ran"
    screen.say(f"{summary} ({seconds} s).", style="bold")
    ok = bool(results) and not wrong
    screen.finish(dict(ok=ok, seconds=seconds, versions=machine.versions(), results=results, left_out=left_out))
    return 0 if ok else 1


def _named(names, known, what):
    """What is known by these names, everything if there are none; a Problem for an unknown name."""
    for name in names or ():
        if name not in known:
            near = difflib.get_close_matches(name, known, 1, 0.7)
            hint = f": did you mean {near[0]}?" if near else ""
            raise Problem(f"{what}: expected one of {', '.join(known)}, got {name}{hint}")
    return [known[name] for name in names or known]


def _check(case: Case, backend: str, device: str, dtype: str) -> tuple[dict[str, Verdict], str]:
    """({result: verdict}, ""), or ({}, why) where the backend refuses the case."""
    try:
        verdicts = compare(case.grown() if device == "cuda" else case, backend, device, getattr(torch, dtype))
    except NotImplementedError as refused:
        return {}, str(refused).partition("this call: ")[2] or str(refused)
    except Exception as raised:  # whatever a kernel raises on somebody's machine is what is wrong with it
        nan, why = float("nan"), f"{type(raised).__name__}: {raised}"
        verdicts = {"out": Verdict(False, nan, nan, nan, nan, nan, why)}
    return {RESULTS[name]: verdict for name, verdict in verdicts.items()}, ""


def _left_out(parts):
    """One line for the dtypes, and the cases, that a backend leaves out for the same reasons."""
    alike: dict[tuple, dict[str, None]] = {}
    for part in parts:
        cases = f", {part['case']}" if "case" in part else ""
        alike.setdefault((part["backend"], part["device"], cases, "; ".join(part["reasons"])), {})[part["dtype"]] = None
    return [
        f"left out: {backend} on {device}{cases}, {', '.join(of)}: {why}"
        for (backend, device, cases, why), of in alike.items()
    ]
