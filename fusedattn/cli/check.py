"""fusedattn check: compares the errors of every backend of this machine with those of eager PyTorch."""

import itertools
import time

import torch

from ..bench import rows
from ..dispatch.backends import ADVICE, BACKENDS
from ..testing.cases import CASES, RESULTS, Case, compare
from ..testing.tolerance import Verdict
from . import DTYPES, machine
from .output import Output, check_names


def run(arguments, output: Output) -> int:
    began = time.monotonic()
    machine.check_device(arguments.device)
    here = machine.device()  # makes Triton interpret kernels if there is no GPU
    devices = [arguments.device] if arguments.device else dict.fromkeys((here, "cpu"))
    check_names("case", arguments.case or [], [case.name for case in CASES])
    check_names("backend", arguments.backend or [], BACKENDS)
    cases = [case for case in CASES if not arguments.case or case.name in arguments.case]
    backends = arguments.backend or BACKENDS
    parts: list[dict[str, str]] = []
    left_out: list[dict] = []
    for device, backend, dtype in itertools.product(devices, backends, arguments.dtype or DTYPES):
        part = dict(backend=backend, device=device, dtype=dtype)
        if reasons := machine.explained(device, dtype, backend).reasons.get(backend, []):
            left_out.append(part | dict(reasons=reasons))
        else:
            parts.append(part)

    results: list[dict] = []
    with output.progress("cases", len(parts) * len(cases)) as advance:
        for part in parts:
            table = []
            for case in cases:
                advance(f"{part['backend']} {part['dtype']}: {case.name}")
                found, reason = _check(case, **part)
                results += [part | {"case": case.name, "result": x} | one._asdict() for x, one in found.items()]
                if reason:
                    left_out.append(part | dict(case=case.name, reasons=[reason]))
                cells = (f"{x} {one.max_error:.1e} / {one.max_eager:.1e}" for x, one in found.items())
                right = "ok" if all(one.ok for one in found.values()) else "FAIL"
                table.append([case.name, right if found else "left out", "  ".join(cells)])
            name = torch.cuda.get_device_name() if part["device"] == "cuda" else "cpu (interpreted)"
            where = part["device"] if part["backend"] in ("cpu", "naive") else name
            title = f"{part['backend']} on {where}, {part['dtype']}"
            output.table(title, ["", "", "largest error / largest error of eager PyTorch, against float64"], table)

    alike: dict[tuple, list[str]] = {}  # {(backend and device, reasons to leave it out): dtypes}
    for one in left_out:
        where = f"{one['backend']} on {one['device']}" + (f", {one['case']}" if "case" in one else "")
        alike.setdefault((where, "; ".join(one["reasons"])), []).append(one["dtype"])
    for (where, why), dtypes in alike.items():
        output.say(f"left out: {where}, {', '.join(dtypes)}: {why}")
    wrong = [one for one in results if not one["ok"]]
    for one in wrong:
        where = f"{one['backend']} on {one['device']} in {one['dtype']}, {one['case']}, {one['result']}"
        output.say(f"FAIL {where}: {one['why']}")
    seconds, total, ok = round(time.monotonic() - began, 1), len(results), bool(results) and not wrong
    nothing = "nothing ran: the lines above say why; change or leave out --backend, --dtype, --case and --device"
    summary = f"{total - len(wrong)} of {total} results are as good as eager PyTorch's" if results else nothing
    output.say(f"{summary} ({seconds} s).")
    output.finish(dict(ok=ok, seconds=seconds, versions=rows.versions(), results=results, left_out=left_out))
    return 0 if ok else 1


def _check(case: Case, backend: str, device: str, dtype: str) -> tuple[dict[str, Verdict], str]:
    """Compare a case: return ({result: Verdict}, ""), or ({}, reason) if the backend does not take the case."""
    try:
        verdicts = compare(case.grown() if device == "cuda" else case, backend, device, getattr(torch, dtype))
    except NotImplementedError as refused:
        return {}, str(refused).partition("this call: ")[2].partition(ADVICE)[0] or str(refused)
    except Exception as raised:  # a kernel may raise anything; the result is reported as wrong
        nan, why = float("nan"), f"{type(raised).__name__}: {raised}"
        verdicts = {"out": Verdict(False, nan, nan, nan, nan, nan, why)}
    return {RESULTS[name]: verdict for name, verdict in verdicts.items()}, ""
