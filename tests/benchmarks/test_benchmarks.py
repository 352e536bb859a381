"""Did a change make anything slower?    pytest tests/benchmarks --benchmark-autosave, later --benchmark-compare

The steps that the questions time, by pytest-benchmark, with a clock that waits for the GPU; caches stay warm and the
host counts, so its numbers are for comparing with themselves. On a CPU the cases are tiny. With --benchmark-disable
each step runs once, and either way ours must be right.
"""

import functools
import time

import pytest
import torch
from fusedattn.bench import cases, engine, timing
from fusedattn.bench.dev.questions import QUESTIONS

import fusedattn as fa

pytest.importorskip("pytest_benchmark")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TINY = "" if DEVICE == "cuda" else "tiny-"
# {question: its cases on a GPU, where they are not all: those that a change of a kernel shows in}
SIZES = {(4096, dim, causal) for dim in (128, 64) for causal in (True, False)} | {(16384, 128, True), (512, 128, True)}
FEW = [case for case in cases.LONG if case.dtype == "bfloat16" and (case.Sq, case.D, case.causal) in SIZES]
CACHES = [case for case in cases.DECODE if case.Hq == 4 * case.Hkv]
CACHES = [case for case in CACHES if (case.B, case.Sk) in ((1, 1024), (16, 8192), (1, 131072))]
ASKED = dict.fromkeys(("forward", "backward", "training"), FEW) | {"decode": CACHES}
ASKED |= dict.fromkeys(("options", "varlen", "small", "module", "minilm"))


def synchronised():
    """Seconds, when all launches are done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


pytestmark = pytest.mark.benchmark(timer=synchronised, max_time=0.2, min_rounds=5)


def _chosen():
    """(question, case, provider, mode) of each; the modes with a clock of their own are other modes' steps."""
    for name, on_gpu in ASKED.items():
        question = QUESTIONS[name]
        chosen = cases.TABLES[question.cases(DEVICE)] if TINY or on_gpu is None else on_gpu
        modes = [mode for mode in question.modes if mode != "graph"]
        for case, provider, mode in engine.units(chosen, question.providers(DEVICE), modes):
            yield pytest.param(name, case, provider, mode, id=f"{name}-{case.name}-{mode}-{provider}")


@functools.lru_cache(maxsize=1)  # the next test has the same case
def _prepared(name, case):
    return QUESTIONS[name].prepare(case, DEVICE)


@pytest.mark.parametrize("name, case, provider, mode", [*_chosen()])
def test_step(benchmark, name, case, provider, mode):
    workload, (mode, _) = _prepared(name, case), engine.CLOCKS.get(mode, (mode, None))
    benchmark.group = f"{case.name} {mode}"
    benchmark.extra_info |= dict(provider=provider, **case._asdict())
    wrong = ""
    try:
        subject = workload.setup(provider)
        with workload.step(mode, subject) as step:
            result = step()
            if not workload.unchecked(provider):
                *_, wrong = workload.judge(mode, subject, result)
    except Exception as error:
        if provider.startswith("fusedattn"):
            raise
        pytest.skip(engine.status(error))
    benchmark.extra_info["wrong"] = wrong
    assert not (wrong and provider.startswith("fusedattn")), wrong
    with workload.step(mode, subject) as step:
        benchmark(step)


@pytest.mark.parametrize("case", [c for c in cases.TABLES[f"{TINY}skipping"] if c.masks("cpu")], ids=lambda c: c.name)
def test_plan(benchmark, case):
    masks = case.masks(DEVICE)
    assert benchmark(lambda: fa.plan(**masks)) is not None


def test_host(benchmark):
    query, key, value = cases.CPU_CALL[0].draw("cpu")[:3]
    assert benchmark(fa.attention, query, key, value).shape == query.shape


def test_ceilings(benchmark):
    assert min(benchmark.pedantic(timing.ceilings, ("float32", DEVICE), rounds=1).values()) > 0
