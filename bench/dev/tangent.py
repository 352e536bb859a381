"""What does a tangent cost beside the output?    python -m fusedattn.bench tangent

Forward mode with tangents of query, key and value. The mode `tangent` is output and tangent together, by
`torch.func.jvp`, as in each step of a mean flow or a consistency model; what has no forward mode (the fused kernels of
SDPA, FlexAttention) is a row that says so. The mode `alone` takes ours apart into its two passes: `fusedattn+forward`,
which keeps what `fusedattn+tangent` takes. The goal is their ratio; by products it is 5 to 2. On a CPU the providers of
a mode take turns, by CPU time, by one thread and by two, as in the question `cpu`.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from fusedattn.bench import accuracy, attention, calls, cases, cpu, engine, report, rows
from fusedattn.bench.calls import Unsupported

import fusedattn as fa
from fusedattn.call.form import DIFFERENTIABLE, Arguments
from fusedattn.call.rules import checked
from fusedattn.cli.machine import cores
from fusedattn.operators.namespace import OPERATORS
from fusedattn.operators.tangent import Tangent as Operator
from fusedattn.testing.compare import in_float64

from . import questions

BOTH, APART, MOST = "tangent", "alone", 2.5
FORWARD, ALONE = "fusedattn+forward", "fusedattn+tangent"
PROVIDERS = ("fusedattn", "naive", "sdpa:math", "sdpa", "flex")
ON_GPU = (*PROVIDERS, "sdpa:cudnn", "sdpa:flash", "sdpa:efficient")
HOLD_ALL = ("naive", "sdpa:math")  # all weights, and several times


class Step(NamedTuple):
    """What is timed of a provider, the names of what it returns, and the layout of that."""

    run: Callable
    names: Sequence[str]
    call: calls.Call | None = None


class Tangents(attention.Attention):
    """A case with a direction for query, key and value."""

    def __init__(self, case, device):
        super().__init__(case, device)
        if set(case.words) - {"threads"}:
            raise Unsupported("forward mode is timed without options")
        generator = torch.Generator(device).manual_seed(cases.SEED + 1)
        draw = functools.partial(torch.randn, device=device, generator=generator)
        self.directions = [draw(x.shape).to(x.dtype) for x in self.tensors[:3]]

    @functools.cached_property
    def truth(self):
        options = self.case.arguments({})

        def compute(function, inputs, directions):
            inputs, directions = ([accuracy.of_head(self.case, x) for x in some] for some in (inputs, directions))
            results = torch.func.jvp(functools.partial(function, **options), (*inputs,), (*directions,))
            return dict(zip(("out", "tangent"), results, strict=True))

        wide = ([*in_float64(dict(enumerate(x))).values()] for x in (self.tensors[:3], self.directions))
        return accuracy.Truth(
            oracle=compute(fa.reference.attention, *wide),
            eager=compute(fa.reference.eager, self.tensors[:3], self.directions),
        )

    def label(self, name):
        base, _, what = name.partition("+")
        label = super().label(base)
        return label.replace(base, name, 1) if what else label

    def setup(self, name):
        if name in (FORWARD, ALONE):
            forward, tangent = self._passes()
            return Step(forward, ("out",)) if name == FORWARD else Step(tangent, ("tangent",))
        call = super().setup(name)
        inputs, directions = (calls.packed(call, x) for x in (self.tensors[:3], self.directions))

        def run():  # inside its context each time, for that of another may be around it
            with call.inside():
                return torch.func.jvp(call.attend, inputs, directions)

        return Step(run, ("out", "tangent"), call)

    def _passes(self):
        """The passes of the forward and of the tangent, as `torch.func.jvp` runs them."""
        backend = fa.explain(*self.tensors[:3], **self.case.arguments({})).backend
        call = checked(Arguments(*self.tensors[:3], **self.case.arguments({})))
        given = *self.directions, *[None] * (DIFFERENTIABLE - len(self.directions))

        def forward():
            return OPERATORS.forward(*call, False, False, True, backend)

        with torch.no_grad():
            out, _, _, stats = forward()
        return lambda: forward()[:1], lambda: Operator.apply(*given, out, stats, *call, False, backend)[:1]

    def work(self, mode):
        return None  # one rate would not fit them all

    @contextlib.contextmanager
    def step(self, mode, provider):
        with torch.no_grad():
            yield provider.run

    def judge(self, mode, provider, result):
        if provider.call is not None:
            result = [calls.unpacked(provider.call, x) for x in result]
        results = dict(zip(provider.names, result, strict=False))
        return accuracy.compare({name: accuracy.of_head(self.case, x) for name, x in results.items()}, self.truth)


def over_forward(case, some):
    """The value of a Goal: the time of the tangent's pass over that of the output."""
    forward, alone = (report.fastest(some, f"{name}:*") for name in (FORWARD, ALONE))
    return None if forward is None or alone is None else alone.ms_p50 / forward.ms_p50


over_formula = report.over("fusedattn:*", mine="naive")


def _of(dtype):
    return lambda case: case.dtype == dtype


GOALS = [
    *(
        report.Goal(f"{dtype}, tangent over forward,", MOST, over_forward, APART, _of(dtype), at_most=True)
        for dtype in ("float32", "bfloat16")
    ),
    report.Goal("output and tangent, time over the formula's,", 1.0, over_formula, BOTH, at_most=True),
]


def lines(written):
    """A line for each case that is timed: both ratios."""
    for (_, case), some in report.groups(rows.last_run(written)).items():
        for said, value in (("tangent over forward", over_forward), ("both over the formula's", over_formula)):
            if (ratio := value(case, some)) is not None:
                yield f"{case.name}: {said} {ratio:.2f}"


def units(chosen, device):
    """(case, provider, mode) of each row."""
    on_gpu, apart = torch.device(device).type == "cuda", ((APART, (FORWARD, ALONE)),)
    if on_gpu:
        return [(case, name, mode) for case in chosen for mode, names in (*apart, (BOTH, ON_GPU)) for name in names]
    counts = (1, 2) if cores() > 1 else (1,)
    return [
        (case._replace(options=f"threads={count}"), name, mode)
        for case in sorted(chosen, key=lambda case: case.Sq)
        for count in counts
        for mode, names in (*apart, (BOTH, PROVIDERS if count == 1 else PROVIDERS[:3]))
        for name in names
        if case.Sq <= cpu.LONGEST or name not in HOLD_ALL
    ]


def main(arguments):
    options = questions.parser("tangent", "cases", "resume", "budget").parse_args(arguments)
    on_gpu = torch.device(options.device).type == "cuda"
    chosen = cases.TABLES[options.cases or ("tangent" if on_gpu else "cpu-lengths")]
    writer, machine = questions.opened(options)
    measure = engine.measure if on_gpu else cpu.measure
    work = units(chosen, options.device)
    well = questions.run(work, writer, machine, options, Tangents, measure)
    print(report.text(writer.rows, GOALS, list(lines(writer.rows))))
    return 0 if well else questions.BROKEN
