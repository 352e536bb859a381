"""The benchmarks: their CSV, what is in its rows, and that everything a GPU machine runs can start."""

import csv
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fusedattn.bench import accuracy, cases, cost, engine, module, peers, providers, rows, timing
from fusedattn.bench.dev import questions, warm
from torch.utils._python_dispatch import TorchDispatchMode

import fusedattn as fa
from fusedattn.naive import dropout, formula

pytestmark = pytest.mark.usefixtures("one_thread")
ROOT = Path(__file__).parents[2]

COLUMNS = (
    "commit date gpu driver cuda torch triton python mode provider dtype B Hq Hkv Sq Sk D Dv causal options "
    "ms_p20 ms_p50 ms_p80 tflops gbps peak_mib err_max err_eager matmul_tflops copy_gbps "
    "status ms_min ms_wall"
).split()


def run(path, *arguments):
    """The rows that a run on the CPU leaves in a CSV file, as the csv module of Python reads them."""
    assert questions.main(["--device", "cpu", "--csv", str(path), "--repeat-ms", "1", *arguments]) == 0
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_the_columns_are_kept_for_good():
    assert list(rows.COLUMNS) == COLUMNS


def test_a_run_on_the_cpu_measures_every_case(tmp_path, capsys):
    found = run(tmp_path / "a.csv", "--providers", "fusedattn,naive,sdpa:math")
    assert (tmp_path / "a.csv").read_text().splitlines()[0] == ",".join(COLUMNS)
    assert len(found) == len(cases.TINY) * 3 * 3
    assert {row["provider"] for row in found} == {"fusedattn:cpu", "naive", "sdpa:math"}
    assert {row["status"] for row in found} == {"ok"}
    for row in found:
        assert 0 < float(row["ms_min"]) <= float(row["ms_p20"]) <= float(row["ms_p50"]) <= float(row["ms_p80"])
        assert float(row["tflops"]) > 0 and float(row["gbps"]) > 0
        assert float(row["err_max"]) >= 0 and float(row["err_eager"]) >= 0
        assert row["gpu"] == "cpu" and row["torch"] == torch.__version__ and row["peak_mib"] == ""
        assert float(row["matmul_tflops"]) > 0 and float(row["copy_gbps"]) > 0
    assert "S >= 2048, >= 0.75: not measured" in capsys.readouterr().out


def test_what_cannot_run_is_a_row_that_says_why(at_once, tmp_path, monkeypatch):
    def broken(case, tensors):
        raise torch.OutOfMemoryError("too much")

    monkeypatch.setitem(providers.PROVIDERS, "broken", broken)
    named = "flex,fusedattn:triton,fusedattn:hopper,sdpa:flash,broken"
    monkeypatch.setattr(fa.backends, "BACKENDS", fa.backends.BACKENDS | {"triton": _never})
    found = run(tmp_path / "a.csv", "--modes", "forward", "--providers", named)
    statuses = {(row["provider"], row["Dv"]): row["status"] for row in found}
    assert statuses["flex", "16"] == "unsupported: there is no C++ compiler here to compile it with: no such compiler"
    assert statuses["fusedattn:triton", "16"] == "unsupported: it is a test"
    reasons = "unsupported: the tensors are on the CPU", "unsupported: Gluon, the language of its kernel, has no"
    assert statuses["fusedattn:hopper", "16"].startswith(reasons)
    assert "same last dimension" in statuses["sdpa:flash", "8"]  # what torch said, not only that no kernel is there
    assert statuses["broken", "16"] == "oom"
    assert statuses["sdpa:flash", "16"] == "ok"


_never = fa.backends.Backend("triton", lambda *_: ["it is a test"], None)


def test_a_wrong_answer_is_found(at_once, tmp_path, monkeypatch):
    """Also one that is wrong in its last head alone, or in a gradient alone."""

    def of_wrong_head(case, tensors):
        def call(query, key, value):
            out = fa.attention(query, key, value, causal=case.causal)
            return torch.cat([out[:, :-1], out[:, -1:] * 1.01], 1)

        return call

    def of_wrong_gradient(case, tensors):
        return lambda query, key, value: fa.attention(query, key.detach() + 0 * key, value, causal=case.causal)

    monkeypatch.setitem(providers.PROVIDERS, "head", of_wrong_head)
    monkeypatch.setitem(providers.PROVIDERS, "gradient", of_wrong_gradient)
    found = run(tmp_path / "a.csv", "--providers", "head,gradient")
    assert {row["status"] for row in found if row["provider"] == "head"} == {"wrong"}
    assert {(row["mode"], row["status"]) for row in found if row["provider"] == "gradient"} == {
        ("forward", "ok"),
        ("backward", "wrong"),
        ("forward_backward", "wrong"),
    }


def test_a_budget_cuts_off_the_least_important(tmp_path):
    assert run(tmp_path / "a.csv", "--budget", "1e-9") == []
    every = questions.units(cases.LONG + cases.MORE, list(providers.PROVIDERS), ["forward"])
    work = [unit[:2] for unit in every]
    assert len(work) == len(set(work)) == len(cases.LONG + cases.MORE) * len(providers.PROVIDERS)
    first = work[: 3 * len(cases.LONG)]
    assert {name for _, name in first} == {"fusedattn", "sdpa:cudnn", "sdpa:flash"}
    assert [case for case, _ in first[::3]] == cases.LONG and cases.LONG[0].Sq >= 2048


def test_a_gpu_without_a_driver_did_not_break_down():
    """A torch that was built for CUDA says so of nested tensors on a machine that has no GPU."""
    refused = "unsupported: CUDA error: CUDA driver version is insufficient for CUDA runtime version"
    assert not engine.broke(refused) and engine.broke("unsupported: CUDA error: an illegal memory access")


def test_a_run_that_was_broken_off_goes_on(at_once, tmp_path, monkeypatch):
    """As gpu.sh has it: a row, then a crash of the GPU, then a new process with --resume."""

    def crashes(case, tensors):
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nFor debugging consider ...")

    path = tmp_path / "a.csv"
    arguments = ["--device", "cpu", "--csv", str(path), "--repeat-ms", "1", "--modes", "forward"]
    arguments += ["--providers", "naive,crashes"]
    monkeypatch.setitem(providers.PROVIDERS, "crashes", crashes)
    assert questions.main(arguments) == questions.BROKEN
    assert questions.main([*arguments, "--resume"]) == questions.BROKEN
    assert questions.main([*arguments, "--resume"]) == 0
    written = rows.read(path)
    assert [row.provider for row in written].count("crashes") == questions.BREAKS
    assert [row.provider for row in written].count("naive") == len(cases.TINY)
    assert len({row.date for row in written}) == 1


def test_the_cases_are_those_of_the_goals():
    assert {(c.D, c.causal, c.Sq, c.dtype) for c in cases.LONG} == {
        (dim, causal, length, dtype)
        for dim in (64, 128)
        for causal in (False, True)
        for length in (512, 1024, 2048, 4096, 8192, 16384)
        for dtype in ("bfloat16", "float16")
    }
    assert all(c.B * c.Sq == 16384 and c.Hq * c.D == 2048 for c in cases.LONG)
    every = [case for some in cases.TABLES.values() for case in set(some)]
    assert len({case.name for case in every}) == len(set(every))


def test_what_a_case_costs():
    case = cases.Case(2, 8, 2, 100, 300, 64, 32, False, "float16")
    assert cost.flops(case, "forward") == 2 * 2 * 8 * 100 * 300 * (64 + 32)
    same = case._replace(Dv=64)
    assert cost.flops(same, "forward") == 4 * 2 * 8 * 100 * 300 * 64
    assert cost.flops(same, "backward") == 2.5 * cost.flops(same, "forward")
    assert cost.flops(same, "forward_backward") == 3.5 * cost.flops(same, "forward")
    causal = same._replace(causal=True)
    assert cost.flops(causal, "backward") == cost.flops(same, "backward") / 2
    query, key, value, grad_out = (x.nbytes for x in case.draw("cpu")[:4])
    lse = 4 * 2 * 8 * 100
    assert cost.held(case) == query + key + value
    assert cost.ideal(case) == 2 * (query + key + value) + grad_out + lse
    assert cost.moved(case, "forward") == query + key + value + grad_out + lse
    assert cost.moved(case, "backward") == 2 * (query + key + value) + 2 * grad_out + lse
    biased = case._replace(options="bias")
    bias = biased.draw("cpu").bias.nbytes
    assert cost.moved(biased, "forward") == cost.moved(case, "forward") + bias
    assert cost.moved(biased, "backward") == cost.moved(case, "backward") + 2 * bias
    shown = case._replace(options="weights")
    assert cost.moved(shown, "forward") == cost.moved(case, "forward") + 2 * 2 * 8 * 100 * 300
    assert cost.moved(shown, "backward") == cost.moved(case, "backward")
    assert cost.ideal(case, "forward") == query + key + value + grad_out + lse
    square, weights = cases.TINY[0], 4 * 32 * 32  # of four square projections of a width of 2 heads of 16
    for mode, products in (("forward", 1), ("forward_backward", 3)):
        flops, _ = module.Module(square, "cpu").work(mode)
        assert flops - cost.flops(square, mode) == products * 2 * 64 * weights


def made(case, provider, mode="forward", ms=1.0, **columns):
    machine = dict.fromkeys(COLUMNS[:8], "x")
    return rows.row(machine, mode, provider, case, **dict(ms_p20=ms, ms_p50=ms, ms_p80=ms, tflops=1.0) | columns)


def test_rows_survive_the_file(tmp_path):
    path = tmp_path / "a.csv"
    writer = rows.Writer(path)
    writer.write(made(cases.TINY[0], "naive", ms=0.125, status="unsupported: it said:\n  no, never"))
    rows.Writer(path).write(made(cases.TINY[1], "naive", options="window=3,0"))
    with open(path, "a") as file:
        file.write("abc,def")  # killed while it wrote
    first, second = rows.read(path)
    assert first == writer.rows[0] and first.ms_p50 == 0.125 and first.status == "unsupported: it said: no, never"
    assert second.case == cases.TINY[1]._replace(options="window=3,0")
    path.write_text("commit,date\n")
    with pytest.raises(ValueError, match="expected the columns"):
        rows.read(path)


@pytest.mark.parametrize("last", ["status", "ms_min"])
def test_a_file_from_before_the_last_columns_is_read_and_appended_to(last, tmp_path):
    path, before = tmp_path / "a.csv", COLUMNS[: COLUMNS.index(last) + 1]
    path.write_text(",".join(before) + "\n")
    for ms in (0.5, 0.25):
        rows.Writer(path).write(made(cases.TINY[0], "naive", ms=ms, ms_min=0.125, ms_wall=3.0))
    assert path.read_text().splitlines()[0] == ",".join(before)
    least = 0.125 if last == "ms_min" else ""
    found = [(row.ms_p50, row.status, row.ms_min, row.ms_wall) for row in rows.read(path)]
    assert found == [(0.5, "ok", least, ""), (0.25, "ok", least, "")]


def test_every_option_is_measured_and_right(at_once, tmp_path, capsys):
    """Ours and the formula on all of them, the SDPA that can; a gradient of the bias that is wrong is found."""
    named = "fusedattn,fusedattn+plan,naive,sdpa:math"
    assert questions.main(["options", "--device", "cpu", "--csv", str(tmp_path / "a.csv"), "--providers", named]) == 0
    with open(tmp_path / "a.csv", newline="") as file:
        found = list(csv.DictReader(file))
    assert len(found) == len(cases.TINY_OPTIONS) * 4 * 3
    statuses = {(row["options"], row["provider"]): row["status"] for row in found}
    for case in cases.TINY_OPTIONS:
        # Gradients of a bias, dropout and softcap are what "cpu" leaves to the naive path.
        ours = next(name for name in ("fusedattn:cpu", "fusedattn:naive") if (case.options, name) in statuses)
        assert (ours == "fusedattn:naive") == any(word in case.options for word in ("dropout", "softcap"))
        assert statuses[case.options, ours] == statuses[case.options, "naive"] == "ok"
        planned = "ok" if case.masks("cpu") else "unsupported: there is no mask to plan"
        assert statuses[case.options, ours.replace("fusedattn", "fusedattn+plan")] == planned
    assert {statuses[case.options, "sdpa:math"] for case in cases.TINY_OPTIONS} == {
        "ok",
        "unsupported: it has no softcap",
        "unsupported: it returns no weights",
        "unsupported: its causal mask is aligned to the top left, ours to the bottom right",
    }
    shown = capsys.readouterr().out
    assert all(f"{case.Sk},16" in shown and case.options in shown for case in cases.TINY_OPTIONS)
    assert "goal" not in shown


def test_the_gradient_of_a_bias_is_checked_and_the_dropout_of_others_is_not(at_once, tmp_path, monkeypatch):
    def forgets_the_bias(case, tensors):
        return lambda query, key, value, bias: fa.attention(query, key, value, bias=bias.detach() + 0 * bias)

    biased = cases.TINY_OPTIONS[0]
    dropped = biased._replace(options="dropout=0.1")
    monkeypatch.setitem(providers.PROVIDERS, "forgetful", forgets_the_bias)
    monkeypatch.setitem(cases.TABLES, "some", [biased])
    found = run(tmp_path / "a.csv", "--cases", "some", "--providers", "forgetful")
    assert [row["status"] for row in found] == ["ok", "wrong", "wrong"]
    monkeypatch.setitem(cases.TABLES, "some", [dropped])
    found = run(tmp_path / "b.csv", "--cases", "some", "--providers", "fusedattn,sdpa:math")
    assert {(row["provider"], row["status"], row["err_max"] == "") for row in found} == {
        ("fusedattn:naive", "ok", False),
        ("sdpa:math", "unchecked: its dropout has bits of its own", True),
    }


@pytest.mark.parametrize(
    "case", [c for c in cases.TINY_OPTIONS if not {"dropout", "weights"} & set(c.words)], ids=lambda c: c.options
)
def test_flex_attention_gets_the_same_options(case):
    """What is compiled on a GPU, as plain PyTorch, which has no backward on a CPU."""
    tensors = case.draw("cpu")
    attend = peers.flex_function(case, tensors)
    try:
        out = attend(*tensors.inputs, block_mask=peers.block_mask(case, tensors))
    except torch._dynamo.exc.UserError as error:  # of torch 2.10
        pytest.skip(f"this torch does not trace a bias that flex_attention reads on a CPU: {str(error)[:80]}")
    assert accuracy.judge(case, "forward", out, accuracy.truth(case, tensors))[2] == ""


def test_compiling_ahead_covers_what_is_measured():
    found = warm.tasks(cases.LONG)
    assert len([name for _, name in found if name == "fusedattn"]) == 8  # D, causal, dtype
    assert len([name for _, name in found if name == "flex"]) == len(cases.LONG)
    assert warm.compile_one(cases.TINY[0], "fusedattn", "cpu") == ""
    assert warm.compile_one(cases.TINY[0], "flex", "cpu").startswith("Unsupported: there is no C++ compiler")


def test_the_naive_path_adds_little_host_time():
    """The goal is 25 us, on a machine that needs 10 for the formula: one that is slower is slower at both.

    Noise only adds, so the best of several medians is held to it.
    """
    query, key, value = cases.CPU_CALL[0].draw("cpu")[:3]
    steps = {
        "ours": lambda: fa.attention(query, key, value, backend="naive"),
        "formula": lambda: formula.formula(query, key, value, scale=8**-0.5, need_lse=False),
    }
    with torch.no_grad():
        rounds = [timing.interleaved(steps, 400) for _ in range(9)]
    added, least = min((1e3 * (one["ours"].p50 - one["formula"].p50), 1e3 * one["formula"].p50) for one in rounds)
    assert added < 25 * max(1.0, least / 10), (added, least)


def test_the_naive_path_keeps_to_its_memory():
    """Forward and backward of scores of 576 MiB, of which eager PyTorch holds three at a time."""
    code = """
import re, torch, fusedattn
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read()).group(1)) / 2**10
leaves = [torch.randn(1, 1, 12288, 8, requires_grad=True) for _ in range(3)]
before = peak()
fusedattn.attention(*leaves, backend="naive").sum().backward()
assert all(leaf.grad.isfinite().all() for leaf in leaves)
print(peak() - before)
"""
    if not Path("/proc/self/status").exists():
        pytest.skip("the peak of a process is read from /proc")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1280


def test_dropouts_bits_cost_the_naive_path_little():
    """Counted: what machines take for it beside torch's own dropout differs, 1.7 to 3.6 times by one thread."""
    seed, planes, written = torch.tensor([7]), torch.zeros(1, dtype=torch.int64), []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **kwargs or {})
            if isinstance(result, torch.Tensor) and not func.is_view:
                written.append(result.numel())
            return result

    with Count():
        kept = dropout.keep(seed, planes, 0, 1024, 1024, 0.1)
    assert sum(written) < 30 * kept.numel()  # 100 operations for four pairs, and what puts these in their places
    # One is of all pairs, eight bools a number; the others are of slabs, which fit a cache.
    assert sum(8 * size >= kept.numel() for size in written) == 1
    assert abs(kept.float().mean() - 0.9) < 0.02


needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


@needs_bash
@pytest.mark.parametrize("name", ["gpu.sh", "tree.sh"])
def test_scripts_parse(name):
    subprocess.run(["bash", "-n", str(ROOT / "bench" / name)], check=True)


@needs_bash
def test_a_gpu_machine_can_import_the_tree(tmp_path):
    """What gpu.sh runs in: the package, its tests and nothing installed; PYTHONPATH comes before an installed copy.

    What it runs needs neither rich nor pictures.
    """
    tree = tmp_path / "tree"
    subprocess.run(["bash", str(ROOT / "bench" / "tree.sh"), str(tree)], check=True, cwd=tmp_path)
    code = """
import sys
sys.modules.update(dict.fromkeys(["rich", "matplotlib", "hypothesis"]))
import fusedattn.bench.dev.questions as a, fusedattn.kernels as k
from fusedattn.bench.dev import models, skipping, warm
print(a.__file__, k.__file__)
"""
    environment = dict(os.environ, PYTHONPATH=str(tree))
    done = subprocess.run([sys.executable, "-c", code], cwd=tree, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    inner = tree / "fusedattn"
    assert done.stdout.split() == [
        str(inner / "bench" / "dev" / "questions.py"),
        str(inner / "kernels" / "__init__.py"),
    ]
    assert (tree / "tests" / "bench" / Path(__file__).name).exists() and (tree / "pyproject.toml").exists()


@pytest.mark.parametrize("case", cases.MODULE[:1] + cases.CPU_LLAMA)
def test_a_row_of_a_module_names_the_backend_of_the_layout_that_projections_give(case):
    case = case._replace(dtype="bfloat16")
    explanation = fa.explain(*module.heads(case, "cpu"), causal=case.causal, capability=(9, 0))
    assert explanation.backend == "hopper"
    assert module.heads(case, "cpu")[1].shape == (case.B, case.Hkv, case.Sq, case.D)
