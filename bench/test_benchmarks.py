"""Did a change make anything slower?    pytest bench --benchmark-autosave, and later pytest bench --benchmark-compare

The steps that the other files time, by pytest-benchmark, with a clock that waits for the GPU; caches stay warm and the
host counts, so its numbers are for comparing with themselves. On a CPU the cases are tiny. With --benchmark-disable
each step runs once, and either way ours must be right.
"""

import functools

import pytest
import torch
from fusedattn.bench import (
    accuracy,
    attention,
    backward,
    calls,
    cases,
    ceilings,
    decode,
    dropout,
    end_to_end,
    forward,
    host,
    minilm,
    module,
    options,
    providers,
    small,
    timing,
    training,
    varlen,
)

import fusedattn as fa

pytest.importorskip("pytest_benchmark")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TINY = "" if DEVICE == "cuda" else "tiny-"
pytestmark = pytest.mark.benchmark(timer=timing.synchronised, max_time=0.2, min_rounds=5)
# And their cases on a GPU.
QUESTIONS = {forward: "few", backward: "few", training: "few", options: "options", varlen: "varlen", small: "small"}
QUESTIONS |= {decode: "few-decode"}


def _chosen():
    """(mode, case, provider) of every question."""
    found = []
    for asked, on_gpu in QUESTIONS.items():
        question = asked.QUESTION
        for case in cases.TABLES[question.on_cpu if TINY else on_gpu]:
            for mode in question.modes:
                if attention.CLOCKS.get(mode, ("", None))[1] is timing.graph:
                    continue  # it has a clock of its own
                for name in question.providers(DEVICE):
                    label = f"{asked.__name__.rpartition('.')[2]}-{case.name}-{mode}-{name}"
                    found.append(pytest.param(mode, case, name, id=label))
    return found


@functools.lru_cache(maxsize=1)  # the next test has the same case
def _drawn(case):
    tensors = case.draw(DEVICE)
    return tensors, accuracy.truth(case, tensors)


@functools.lru_cache(maxsize=1)
def _drawn_for_modules(case):
    drawn = module.draw(case, DEVICE)
    return drawn, module.truth(case, drawn)


def _describe(benchmark, mode, name, case):
    benchmark.group = f"{case.name} {mode}"
    benchmark.extra_info |= dict(provider=name, **case._asdict())


@pytest.mark.parametrize("mode, case, name", _chosen())
def test_attention(benchmark, mode, case, name):
    tensors, truth = _drawn(case)
    kind = attention.CLOCKS.get(mode, (mode,))[0]
    _describe(benchmark, mode, name, case)
    try:
        call = providers.find(name)(case, tensors)
        with calls.around(kind, call):
            step = calls.step(kind, call, tensors, bare=True)
            step()
    except Exception as error:
        if name.startswith("fusedattn"):
            raise
        pytest.skip(attention.status(error))
    with calls.around(kind, call):
        result = benchmark(step)
    if not providers.unchecked(case, name):
        *_, wrong = accuracy.judge(case, kind, calls.given_back(call, result), truth)
        benchmark.extra_info["wrong"] = wrong
        assert not (wrong and name.startswith("fusedattn")), wrong


@pytest.mark.parametrize("provider", ["fusedattn", "fusedattn.compat", "torch.nn", "torch.nn:sdpa"])
@pytest.mark.parametrize("mode", module.MODES)
@pytest.mark.parametrize("case", cases.TABLES[f"{TINY}module"], ids=lambda case: case.name)
def test_module(benchmark, case, mode, provider):
    drawn, truth = _drawn_for_modules(case)
    (setup,) = (make for name, make in module.layers(case, drawn).items() if _without_backend(name) == provider)
    layer = setup()
    _describe(benchmark, mode, provider, case)
    result = benchmark(module.step(mode, layer, drawn))
    *_, wrong = module.judge(mode, layer, result, truth)
    assert not (wrong and provider.startswith("fusedattn")), wrong


def _without_backend(name):
    return name.partition(":")[0] if name.startswith("fusedattn") else name


@pytest.mark.parametrize("provider", ["fusedattn", "sdpa", "naive"])
@pytest.mark.parametrize("mode", end_to_end.MODES)
@pytest.mark.parametrize("case", end_to_end.CASES[DEVICE], ids=lambda case: case.name)
def test_end_to_end(benchmark, case, mode, provider):
    drawn, windows = end_to_end.draw(case, DEVICE)
    made = end_to_end.models(case, drawn).items()
    (model,) = (each for name, each in made if _without_backend(name) == provider)
    _describe(benchmark, mode, provider, case)
    benchmark(end_to_end.step(mode, model, windows))
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("implementation", minilm.IMPLEMENTATIONS)
def test_minilm(benchmark, implementation):
    model = minilm.load("float32", DEVICE)
    if model is None:
        pytest.skip("transformers 5 is not installed")
    fa.compat.transformers.register()
    model.set_attn_implementation(implementation)
    size, length = (2, 16) if TINY else (256, 128)
    benchmark.group = f"minilm {size} x {length}"
    assert benchmark(minilm.embeddings, model, minilm.batch(size, length, DEVICE)).isfinite().all()


@pytest.mark.parametrize("case", cases.TABLES[f"{TINY}skipping"], ids=lambda case: case.name)
def test_plan(benchmark, case):
    masks = case.masks(DEVICE)
    if not masks:
        pytest.skip("there is no mask to plan")
    benchmark.group = "plan"
    assert benchmark(lambda: fa.plan(**masks)) is not None


@pytest.mark.parametrize("provider", ["fusedattn:naive", "naive"])
def test_dropout(benchmark, provider):
    benchmark.group = "dropout"
    assert (benchmark(dropout.steps(64)[provider]) >= 0).all()


def test_host(benchmark):
    query, key, value = host.CASES[0].draw("cpu")[:3]
    assert benchmark(fa.attention, query, key, value).shape == query.shape


def test_ceilings(benchmark):
    assert min(benchmark.pedantic(ceilings.measure, ("float32", DEVICE), rounds=1)) > 0
