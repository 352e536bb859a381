"""fusedattn tune: checks each kernel configuration on this GPU against float64, times it, and writes a tuning file."""

import contextlib
import functools
import itertools
import json
import tempfile
from pathlib import Path

import torch

from .. import attention, explain
from ..bench import measure as timer
from ..bench.cases import TOKENS, WIDTH, Case
from ..call.options import override
from ..dispatch import replay
from ..launch import failures, tile_table, tuned
from ..launch.tuned import Row
from . import machine
from .output import Output, Problem

OPTIONS = {"plain": "", "masked": "documents=8", "rich": "dropout=0.1"}  # {register pressure: options of its cases}
# Results that a kernel computes, to check and time it. All other kernels compute all three gradients.
RESULTS = {"forward": ("out", "lse"), "hopper": ("out", "lse"), "dq": ("query",), "dkdv": ("key", "value")}
GRADIENTS = "query", "key", "value"
REPEATABLE = ("dq", "dkdv", "two_passes", *tile_table.REPEATABLE)  # deterministic kernels
LENGTH, CHECKED = 4096, 611  # tokens of timed and of checked calls; 611 is no multiple of a tile
BUDGET_MS, REPEATS = 60.0, 5
truth = functools.lru_cache(maxsize=2)(lambda case, device: timer.truth(case, case.draw(device)))


def run(arguments, output: Output) -> int:
    machine.need_gpu("checks and times kernels on")
    device = torch.device("cuda", torch.cuda.current_device())
    about, rows = tuned.about(device), dict[tuple, Row]()
    usual = [(TOKENS // LENGTH, WIDTH // d, WIDTH // d, LENGTH, LENGTH, d) for d in (128, 64, 256, 512)]
    every = itertools.product(arguments.dtype or ["bfloat16"], arguments.shape or usual)
    cases = [Case(*shape, shape[-1], False, dtype) for dtype, shape in every]
    sizes = [(case, load) for load in OPTIONS for case in cases if case.Sq == case.Sk or load != "masked"]
    file: Path = tuned.path(about["gpu"])
    problem: Exception | None = None
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:  # raises now if files cannot be written there
        try:
            with output.progress("sizes", len(sizes)) as advance:
                for case, load in sizes:
                    measure(rows, case._replace(options=OPTIONS[load]), load, device, int(about["capability"]))
                    advance(case.name)
        except KeyboardInterrupt:
            output.say("Stopped. Rows so far:")
        except Problem as error:
            problem = error
        order = tuned.MEASURED.index
        found = sorted(rows.values(), key=lambda row: (row[1:4], order(row.kernel), sum(row.ms.values())))
        content = dict(about=about, forms=[row._asdict() | dict(form=row.form and row.form._asdict()) for row in found])
        try:
            if found:
                part = Path(folder, file.name)  # readers never see half a file
                part.write_text(json.dumps(content, indent=1), encoding="utf-8")
                part.replace(file)
            output.say(f"{file}: calls on this GPU use the fastest that passed." if found else "Nothing was measured.")
        except OSError as error:
            problem = error
        cells = [[*row[:4], named(row.form), " ".join(f"{x:.3f}" for x in row.ms.values()), row.why] for row in found]
        output.table("Each form", ["kernel", "dtype", "width", "calls", "form", "full, causal: ms", "wrong"], cells)
        output.finish(dict(file=str(file)) | content)
    if problem is not None:
        raise problem
    return 0 if found else 1


def named(form) -> str:
    return "dq and dkdv" if form is None else " ".join(f"{k}={v:d}" for k, v in form._asdict().items() if v)


def measure(rows: dict, case: Case, load: str, device, capability: int | None) -> None:
    """Check and time each kernel configuration on a case, and add its Row to rows. load: the register pressure."""
    width = tile_table.row_width(max(case.D, case.Dv))
    for kernel in tuned.MEASURED:
        for form in tuned.candidates(kernel, capability, getattr(torch, case.dtype).itemsize, width, load):
            key = kernel, case.dtype, width, load, form
            row = rows.get(key, Row(*key))
            try:
                with taking(row, rows.values(), capability):
                    for causal in (False, True):
                        row = row if row.why else measured(row, case._replace(causal=causal), device)
            except Exception as error:  # a kernel may raise anything; the row reports it
                why = timer.status(error)
                if timer.broke(why):
                    raise Problem(f"{kernel} {named(form)} broke the GPU: {why}") from error
                if why != "oom" and "OutOfResources" not in why:
                    row = row._replace(why=why)
            if row.ms or row.why:
                rows[key] = row


@contextlib.contextmanager
def taking(row: Row, rows, capability: int | None):
    """Make calls in this context use the row's tile for its kernel, and the best tiles so far for other kernels."""
    forms = tuned.candidates(row.kernel, capability, getattr(torch, row.dtype).itemsize, row.width, row.pressure)
    others = [row._replace(form=x, ms={}, why="another is measured") for x in forms if x != row.form]
    failures.forget()  # failures of the previous tile
    tuned.use(tuned.choose([row, *others, *(x for x in rows if x.kernel != row.kernel)]))
    replay.forget()
    try:
        with override(deterministic=row.kernel in REPEATABLE):
            yield
    finally:
        tuned.forget()
        replay.forget()


def measured(row: Row, case: Case, device) -> Row:
    """Return the row with the time of a case, or an error, added; unchanged if the call does not use the row's tile."""
    small = case._replace(Sq=min(case.Sq, CHECKED), Sk=min(case.Sk, CHECKED))
    check, step = step_of(row, small, device), step_of(row, case, device)
    if check is None or step is None:
        return row
    first, *others = (check() for _ in range(REPEATS if row.kernel in REPEATABLE else 1))
    got = zip(RESULTS.get(row.kernel, GRADIENTS), first, strict=True)
    *_, why = timer.compare({name: timer.of_head(small, x) for name, x in got}, *truth(small, device))
    if not all(torch.equal(*pair) for other in others for pair in zip(first, other, strict=True)):
        why = "results differ from run to run"
    if why:
        return row._replace(why=f"{small.name}, {why}")
    return row._replace(ms={**row.ms, case.name: timer.times({"": step}, "", device, BUDGET_MS)[""][1]})


def step_of(row: Row, case: Case, device):
    """Return a function that computes the RESULTS of a case, or None if the call would not use the row's tile."""
    names, tensors = RESULTS.get(row.kernel, GRADIENTS), case.draw(device)
    inputs = {x: getattr(tensors, x).requires_grad_(x in names or names[0] == "out") for x in GRADIENTS}
    call = case.arguments(tensors.masks) | inputs
    call["backend"] = "hopper" if row.kernel in tile_table.ON_HOPPER else "triton"
    if tile_table.same(explain(**call).tiles.get(row.kernel)) != row.form:
        return None
    if names[0] == "out":
        return lambda: attention(**call, return_lse=True)
    out, wanted = attention(**call), [inputs[name] for name in names]
    return lambda: torch.autograd.grad(out, wanted, tensors.grad_out, retain_graph=True)
