"""Did a change make anything slower?    pytest tests/benchmarks --benchmark-autosave, later --benchmark-compare

The steps that the questions time, by pytest-benchmark, with a clock that waits for the GPU; caches stay warm and the
host counts, so its numbers are for comparing with themselves. On a CPU the cases are tiny. With --benchmark-disable
each step runs once, and either way ours must be right.
"""

import functools
import time

import pytest
import torch
from fusedattn.bench import accuracy, attention, calls, cases, module, providers, timing
from fusedattn.bench.dev import host, models
from fusedattn.bench.dev.questions import QUESTIONS

import fusedattn as fa

pytest.importorskip("pytest_benchmark")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TINY = "" if DEVICE == "cuda" else "tiny-"
# {question: its cases on a GPU}
ASKED = {"forward": "few", "backward": "few", "training": "few", "options": "options", "varlen": "varlen"}
ASKED |= {"small": "small", "decode": "few-decode"}


def synchronised():
    """Seconds, when all launches are done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


pytestmark = pytest.mark.benchmark(timer=synchronised, max_time=0.2, min_rounds=5)


def _chosen():
    """(mode, case, provider) of every question; the modes with a clock of their own are other modes' steps."""
    for name, on_gpu in ASKED.items():
        question = QUESTIONS[name]
        for case in cases.TABLES[question.cases("cpu") if TINY else on_gpu]:
            for mode in [mode for mode in question.modes if mode != "graph"]:
                for provider in question.providers(DEVICE):
                    yield pytest.param(mode, case, provider, id=f"{name}-{case.name}-{mode}-{provider}")


@functools.lru_cache(maxsize=1)  # the next test has the same case
def _drawn(case):
    tensors = case.draw(DEVICE)
    return tensors, accuracy.truth(case, tensors)


def _describe(benchmark, mode, name, case):
    benchmark.group = f"{case.name} {mode}"
    benchmark.extra_info |= dict(provider=name, **case._asdict())


@pytest.mark.parametrize("mode, case, name", _chosen())
def test_attention(benchmark, mode, case, name):
    tensors, truth = _drawn(case)
    mode, _ = attention.CLOCKS.get(mode, (mode, None))
    _describe(benchmark, mode, name, case)
    try:
        call = providers.find(name)(case, tensors)
        with calls.around(mode, call):
            step = calls.step(mode, call, tensors)
            step()
    except Exception as error:
        if name.startswith("fusedattn"):
            raise
        pytest.skip(attention.status(error))
    with calls.around(mode, call):
        result = benchmark(step)
    if not providers.unchecked(case, name):
        *_, wrong = accuracy.judge(case, mode, calls.unpacked(call, result), truth)
        benchmark.extra_info["wrong"] = wrong
        assert not (wrong and name.startswith("fusedattn")), wrong


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("mode", module.MODES)
@pytest.mark.parametrize("case", cases.TABLES[f"{TINY}module"], ids=lambda case: case.name)
def test_module(benchmark, case, mode, number):
    drawn = module.draw(case, DEVICE)
    provider, setup = list(module.layers(case, drawn).items())[number]
    layer = setup()
    _describe(benchmark, mode, provider, case)
    result = benchmark(module.step(mode, layer, drawn))
    *_, wrong = module.judge(mode, layer, result, module.truth(case, drawn))
    assert not (wrong and provider.startswith("fusedattn")), wrong


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("mode", models.MODES)
@pytest.mark.parametrize("case", models.DEMO[DEVICE], ids=lambda case: case.name)
def test_end_to_end(benchmark, case, mode, number):
    model, windows = models.draw(case, DEVICE)
    provider, model = list(models.models(case, model).items())[number]
    _describe(benchmark, mode, provider, case)
    benchmark(models.step(mode, model, windows))
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("provider, implementation", models.IMPLEMENTATIONS.items())
def test_minilm(benchmark, provider, implementation):
    if not models.has_transformers():
        pytest.skip("transformers 5 is not installed")
    case = models.BERT[DEVICE][0]
    case = case._replace(B=2, Sq=16, Sk=16) if TINY else case
    model = models.load("float32", DEVICE)
    model.set_attn_implementation(implementation)
    _describe(benchmark, "forward", provider, case)
    assert benchmark(models.embeddings, model, models.batch(case, DEVICE)).isfinite().all()


@pytest.mark.parametrize("case", [c for c in cases.TABLES[f"{TINY}skipping"] if c.masks("cpu")], ids=lambda c: c.name)
def test_plan(benchmark, case):
    masks = case.masks(DEVICE)
    assert benchmark(lambda: fa.plan(**masks)) is not None


def test_host(benchmark):
    query, key, value = host.CASES[0].draw("cpu")[:3]
    assert benchmark(fa.attention, query, key, value).shape == query.shape


def test_ceilings(benchmark):
    assert min(benchmark.pedantic(timing.ceilings, ("float32", DEVICE), rounds=1)) > 0
