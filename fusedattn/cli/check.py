"""fusedattn check: the correctness grid of this machine's backends, against float64 and beside eager PyTorch."""

import difflib
import time

import torch

from ..backends import BACKENDS, explain
from ..testing.cases import CASES, RESULTS, Case, compare
from ..testing.tolerance import Verdict
from . import DTYPES, machine
from .screen import Problem, Screen, error


def run(given) -> int:
    screen, began = Screen(given.json), time.monotonic()
    devices = _devices(given.device, machine.device())
    cases = _named(given.case, {case.name: case for case in CASES}, "case")
    backends = _named(given.backend, {name: name for name in BACKENDS}, "backend")
    dtypes = given.dtype or DTYPES
    parts: list[tuple] = []
    left_out: list[tuple] = []
    for device in devices:
        for backend in backends:
            for dtype in dtypes:
                reasons = _reasons(backend, device, dtype, named=bool(given.backend))
                (left_out if reasons else parts).append((backend, device, dtype, reasons))

    found: list[dict] = []
    with screen.progress("cases", len(parts) * len(cases)) as advance:
        for backend, device, dtype, _ in parts:
            for case in cases:
                advance(f"{backend} {dtype}: {case.name}")
                found += _check(case, backend, device, dtype)

    for backend, device, dtype, _ in parts:
        of = [one for one in found if (one["backend"], one["device"], one["dtype"]) == (backend, device, dtype)]
        title = f"{_where(backend, device)}, {dtype}: largest error / that of eager PyTorch, against float64"
        shown = [name for name in RESULTS.values() if any(one["result"] == name for one in of)]
        screen.table(title, ["case", *shown, ""], [_row(case, of, shown) for case in cases], marks=True)
    for line in _left_out(left_out):
        screen.say(line)
    wrong = [one for one in found if not one["ok"]]
    for one in wrong:
        where = f"{one['backend']} on {one['device']} in {one['dtype']}, {one['case']}, {one['result']}"
        screen.say(f"FAIL {where}: {one['why']}", style="red")
    seconds = round(time.monotonic() - began, 1)
    summary = (
        f"{len(found) - len(wrong)} of {len(found)} results are as good as eager PyTorch's" if found else "nothing ran"
    )
    screen.say(f"{summary} ({seconds} s).", style="bold")
    skipped = [dict(zip(("backend", "device", "dtype", "reasons"), one, strict=True)) for one in left_out]
    ok = bool(found) and not wrong
    screen.finish(dict(ok=ok, seconds=seconds, versions=machine.versions(), results=found, left_out=skipped))
    return 0 if ok else 1


def _devices(named, fastest):
    """The one named; or else the GPU, and the CPU for what runs there."""
    if named == "cuda" and not torch.cuda.is_available():
        raise Problem("device: torch finds no GPU")
    return [named] if named else list(dict.fromkeys((fastest, "cpu")))


def _named(names, known, what):
    for name in names or ():
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f": did you mean {near[0]}?" if near else ""
            raise Problem(f"{what}: expected one of {', '.join(known)}, got {name}{hint}")
    return [known[name] for name in names or known]


def _reasons(backend, device, dtype, named):
    small = torch.zeros(1, 1, 16, 16, device=device, dtype=getattr(torch, dtype))
    waits = BACKENDS[backend].waits
    reasons = explain(small, small, small, backend=backend).reasons.get(backend, [])
    return reasons or ([] if named or waits is None else [waits])


def _check(case: Case, backend: str, device: str, dtype: str) -> list[dict]:
    """One entry a result, all a table or a program may want to know of it; none where the backend refuses the case."""
    nan = float("nan")
    try:
        verdicts = compare(case.grown() if device == "cuda" else case, backend, device, getattr(torch, dtype))
    except NotImplementedError:
        return []
    except Exception as raised:  # whatever a kernel raises on somebody's machine is what is wrong with it
        why = f"{type(raised).__name__}: {raised}"
        verdicts = {"out": Verdict(False, nan, nan, nan, nan, nan, why)}
    about = dict(backend=backend, device=device, dtype=dtype, case=case.name)
    return [about | dict(result=RESULTS[name]) | verdict._asdict() for name, verdict in verdicts.items()]


def _row(case, found, shown):
    """The row of a case in the table of one backend and dtype."""
    results = {one["result"]: one for one in found if one["case"] == case.name}
    cells = []
    for name in shown:
        one = results.get(name)
        cell = f"{error(one['max_error'])} / {error(one['max_eager'])}" if one else ""
        cells.append(cell if one is None or one["ok"] else f"{cell} FAIL")
    verdict = "ok" if all(one["ok"] for one in results.values()) else "FAIL"
    return [case.name, *cells, verdict if results else "left out"]


def _left_out(parts):
    """One line for the dtypes that a backend leaves out for the same reasons."""
    dtypes: dict[tuple, list[str]] = {}
    for backend, device, dtype, reasons in parts:
        dtypes.setdefault((backend, device, "; ".join(reasons)), []).append(dtype)
    return [f"left out: {backend} on {device}, {', '.join(of)}: {why}" for (backend, device, why), of in dtypes.items()]


def _where(backend, device):
    if backend == "naive":
        return f"naive on {device}"
    return f"{backend} on {torch.cuda.get_device_name() if device == 'cuda' else 'cpu (interpreted)'}"
