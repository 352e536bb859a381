"""The questions beside attention's own: what each measures, whether it finds what is wrong, and what it says."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from fusedattn.bench import cases, engine, module, providers, rows, timing
from fusedattn.bench.dev import models, questions
from fusedattn.bench.dev.questions import QUESTIONS

import fusedattn as fa

pytestmark = pytest.mark.usefixtures("one_thread")
ROOT = Path(__file__).parents[2]
ENGINE = ["forward", "backward", "training", "peak", "varlen", "small"]


def ask(name, path, *more):
    """The rows that a question leaves on a CPU."""
    command = [name, "--device", "cpu", "--csv", str(path), "--repeat-ms", "1", "--commit", "abc", *more]
    assert questions.main(command) == 0
    return rows.read(path)


def test_every_question_is_listed_and_on_the_page(capsys):
    readme = (ROOT / "bench" / "README.md").read_text()
    assert questions.main(["--help"]) == 0
    listed = capsys.readouterr().out
    for name, asks in questions.ASKS.items():
        assert f"  {name} " in listed and asks in listed
        assert name == "attention" or f"fusedattn.bench {name}" in readme, name
    assert questions.main(["nothing"]) == 2 and "there is no question 'nothing'" in capsys.readouterr().err


@pytest.mark.parametrize("name", ENGINE)
def test_a_question_is_modes_and_cases_of_the_one_engine(name, at_once, tmp_path, monkeypatch, capsys):
    clocks = {m: (kind, clock if m == "graph" else timing.measure) for m, (kind, clock) in engine.CLOCKS.items()}
    monkeypatch.setattr(engine, "CLOCKS", clocks)
    question = QUESTIONS[name]
    few = cases.TABLES[question.cases("cpu")][:2]
    monkeypatch.setitem(cases.TABLES, question.cases("cpu"), few)
    found = ask(name, tmp_path / "a.csv")
    assert {row.mode for row in found} == set(question.modes)
    names = {f"{name}:cpu" if name in providers.OURS else name for name in question.providers("cpu")}
    assert {row.provider for row in found} == names
    assert len(found) == len(few) * len(question.modes) * len(names)
    mine = {(row.mode, row.status) for row in found if row.provider == "fusedattn:cpu"}
    assert mine == {(m, "ok" if m != "graph" else "unsupported: a CUDA graph needs a GPU") for m in question.modes}
    assert capsys.readouterr().out.strip() == question.text(found).strip()
    with pytest.raises(SystemExit):
        questions.main([name, "--help"])
    assert f"python -m fusedattn.bench {name}" in capsys.readouterr().out.partition("\n")[0]


def test_the_wall_clock_counts_calls_and_waits_for_the_last(monkeypatch):
    monkeypatch.setattr(timing, "FEWEST", 4)
    found = timing.wall(lambda: time.sleep(1e-3), "cpu", budget_ms=40.0)
    assert 1.0 <= found.p20 <= found.p50 <= found.p80 and found.p20 < 3.0
    events = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: events.append("wait"))
    timing.wall(lambda: events.append("call"), "cuda", budget_ms=0.0)
    assert "".join(event[0] for event in events).endswith("wcw" * 4)  # nothing is in flight when the clock starts


def test_a_graph_holds_many_calls(monkeypatch):
    testing = pytest.importorskip("triton.testing")
    seen = []

    def do_bench_cudagraph(step, rep, quantiles):
        seen.append((rep, quantiles))
        return [1.0, 2.0, 3.0]

    monkeypatch.setattr(testing, "do_bench_cudagraph", do_bench_cudagraph)
    assert timing.graph(None, "cuda", 60.0) == timing.Times(1.0, 2.0, 3.0)
    assert seen == [(6, [0.2, 0.5, 0.8])]


def test_ceilings_are_products_and_copies(monkeypatch):
    timed = []

    def measure(step, device, budget_ms):
        timed.append(step())
        return timing.Times(0.5, 1.0, 2.0)

    monkeypatch.setattr(timing, "measure", measure)
    found = timing.ceilings.__wrapped__("bfloat16", "cpu")
    assert found == dict(matmul_tflops=2 * 256**3 / 1e9, copy_gbps=2 * 2**25 / 1e6)  # in a millisecond
    product, copy = timed
    assert product.dtype == torch.bfloat16 and product.shape == (256, 256) and 8 < product.float().std() < 32
    assert copy.nbytes == 2**25 and copy.float().std() > 0


def test_modules_are_timed_with_their_projections(tmp_path, at_once, capsys):
    rows_of = ask("module", tmp_path / "a.csv")
    statuses = {(row.provider, row.mode, row.options): row.status for row in rows_of}
    assert set(statuses.values()) == {"ok"}
    assert {(provider, mode) for provider, mode, _ in statuses} == {
        *((name, mode) for name in ("fusedattn:cpu", "fusedattn.compat:cpu", "torch.nn") for mode in module.MODES),
        ("torch.nn:sdpa", "forward"),
    }
    assert {row.options for row in rows_of} == {"module", "module weights"}
    first, case = rows_of[0], cases.TINY_MODULE[0]
    width = case.Hq * case.D
    assert first.ms_p50 == 2.0
    operations = 2 * case.B * case.Hq * case.Sq**2 * case.D + 8 * case.B * case.Sq * width**2
    assert first.tflops == pytest.approx(operations / 2 / 1e9, rel=1e-4)
    moved = sum(x.nbytes for x in module.Module(case, "cpu").drawn.values())  # the output's gradient is as large as it
    assert first.gbps == pytest.approx(moved / 2 / 1e6, rel=1e-4)
    assert "torch.nn:sdpa" in capsys.readouterr().out
    assert len(ask("module", tmp_path / "a.csv", "--resume")) == len(rows_of)
    (refused,) = ask(
        "module", tmp_path / "b.csv", "--cases", "tiny-module", "--providers", "naive", "--modes", "forward"
    )[:1]
    assert refused.status.startswith("unsupported: it is no module")


@pytest.mark.parametrize("what, wrong", [("output", set(module.MODES)), ("gradient", {"forward_backward"})])
def test_a_wrong_module_is_found(what, wrong, tmp_path, at_once, monkeypatch):
    class Broken(fa.MultiHeadAttention):
        def forward(self, *inputs, **options):
            out, weights = super().forward(*inputs, **options)
            return (1.02 * out if what == "output" else 2 * out - out.detach()), weights

    monkeypatch.setattr(fa, "MultiHeadAttention", Broken)
    monkeypatch.setitem(cases.TABLES, "tiny-module", [cases.TINY_MODULE[0]])
    rows_of = ask("module", tmp_path / "a.csv", "--providers", "fusedattn")
    assert {row.mode for row in rows_of if row.status == "wrong"} == wrong


def test_a_module_without_weights_returned_is_no_answer_to_a_case_that_wants_them():
    workload = module.Module(cases.TINY_MODULE[-1], "cpu")
    layer = workload.setup("fusedattn")
    with workload.step("forward", layer) as step:
        out, weights = step()
    assert workload.judge("forward", layer, (out, weights))[2] == ""
    assert "weights" in workload.judge("forward", layer, (out, weights.flip(-1)))[2]


def test_a_real_model_is_timed_with_each_attention_and_a_wrong_one_is_found(tmp_path, at_once, monkeypatch, capsys):
    pytest.importorskip("transformers", minversion="5.0")
    monkeypatch.setitem(cases.TABLES, "tiny-minilm", [cases.TINY_MINILM[0]._replace(B=2, Sq=16, Sk=16)])
    rows_of = ask("minilm", tmp_path / "a.csv")
    assert [(row.provider, row.status) for row in rows_of] == [("naive", "ok"), ("sdpa", "ok"), ("fusedattn", "ok")]
    assert "2 x 16 tokens" in capsys.readouterr().out
    attend = models.fa.compat.transformers.attention
    wrong = lambda *args, **options: attend(*args, **options) * 1.01  # noqa: E731
    monkeypatch.setattr(models.fa.compat.transformers, "attention", wrong)
    assert [row.status for row in ask("minilm", tmp_path / "b.csv")] == ["ok", "ok", "wrong"]
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None)
    statuses = {row.status for row in ask("minilm", tmp_path / "c.csv")}
    assert statuses == {"unsupported: transformers 5 is not installed: pip install 'fusedattn[hf]'"}


def test_pytest_benchmark_times_them_with_our_clock(tmp_path):
    pytest.importorskip("pytest_benchmark")
    path = tmp_path / "a.json"
    test = f"tests/benchmarks/test_benchmarks.py::test_step[forward-{cases.TINY[0].name}-forward-fusedattn]"
    command = [sys.executable, "-m", "pytest", test, "-q", "-p", "no:cacheprovider", f"--benchmark-json={path}"]
    command += [f"--benchmark-storage=file://{tmp_path}"]
    # It does not time where pytest-xdist works, as may be around this one.
    alone = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    done = subprocess.run(command, cwd=ROOT, env=alone, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads(path.read_text())
    (one,) = written["benchmarks"]
    assert one["options"]["timer"] == "synchronised" and one["stats"]["median"] > 0
    assert one["extra_info"]["provider"] == "fusedattn" and one["extra_info"]["wrong"] == ""
    assert written["machine_info"]["torch"] == torch.__version__


def test_pytest_bench_fails_where_ours_is_wrong(monkeypatch):
    pytest.importorskip("pytest_benchmark")
    from ..benchmarks import test_benchmarks

    class Benchmark:
        group, extra_info = None, {}

        def __call__(self, step):
            return step()

    def doubled(case, tensors):
        return lambda *inputs: 1.02 * fa.attention(*inputs, causal=case.causal)

    test_benchmarks.test_step(Benchmark(), "forward", cases.TINY[0], "fusedattn", "forward")
    monkeypatch.setitem(providers.PROVIDERS, "fusedattn", doubled)
    with pytest.raises(AssertionError, match="error"):
        test_benchmarks.test_step(Benchmark(), "forward", cases.TINY[0], "fusedattn", "forward")
