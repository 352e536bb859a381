"""Sanitizers and repeats for a GPU: how they are called, and that a result with other bits is seen."""

import pytest
import torch
from fusedattn.bench.dev import questions, sanitize

from ..inside import compiled, only_interpreted, passes_compiled

pytestmark = pytest.mark.filterwarnings("ignore")


def test_each_tool_is_a_command_that_this_program_takes(capsys):
    assert questions.main(["sanitize", "--list", "--calls", "cache", "one pass"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in said] == [
        *("memcheck", "racecheck", "initcheck", "synccheck", "consan", "repeats")
    ]
    for tool, (command, environment) in sanitize.commands(["cache", "one pass"], "python").items():
        assert (command[:3] == ["compute-sanitizer", "--tool", tool]) == (tool != "consan")
        assert ("TRITON_INSTRUMENTATION_MODE" in environment) == (tool == "consan")
        own = command[command.index("sanitize") + 1 :]
        assert own == ["repeats", "--times", "2", "--calls", "cache", "one pass"]
    assert "PYTORCH_NO_CUDA_MEMORY_CACHING=1 'compute-sanitizer' '--tool' 'memcheck'" in said[0]


def test_without_a_gpu_tools_say_so(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert questions.main(["sanitize", "memcheck", "consan"]) == 0
    assert capsys.readouterr().out.count("not run: it needs a GPU") == 2
    with pytest.raises(SystemExit):
        questions.main(["sanitize", "helgrind"])


def test_a_tool_that_finds_something_is_a_failure(capsys, monkeypatch):
    ends = {"memcheck": 0, "racecheck": sanitize.FOUND}
    monkeypatch.setattr(sanitize, "_without", lambda tool: "")

    def run(command, env, timeout):
        return type("Done", (), dict(returncode=ends[command[2]]))

    monkeypatch.setattr(sanitize.subprocess, "run", run)
    assert questions.main(["sanitize", "memcheck"]) == 0
    assert questions.main(["sanitize", "memcheck", "racecheck"]) == 1
    assert "racecheck: exit status 9" in capsys.readouterr().out


@pytest.mark.parametrize("name", sanitize.CALLS)
def test_every_call_runs(name, capsys):
    """By what a CPU has, twice."""
    assert questions.main(["sanitize", "repeats", "--times", "2", "--calls", name, "--backend", "naive"]) == 0
    assert f"{name}: 2 times the same bits" in capsys.readouterr().out


def test_other_bits_are_seen():
    count = []

    def changes(call, device, backend):
        count.append(1)
        found = sanitize.results(call, device, backend)
        if len(count) == 5:
            found[1].view(-1)[3] += 1e-6
        return found

    call = sanitize.CALLS["forward, dq and dkdv"]
    assert sanitize.repeat(call, 4, "cpu", "naive", changes) == ""
    count.clear()
    assert sanitize.repeat(call, 9, "cpu", "naive", changes) == "result 1 of call 5 differs from the first in 1 of 1200"


@only_interpreted
def test_calls_launch_every_kernel_where_kernels_are_compiled():
    passes_compiled(f"{__file__}::test_calls_launch_every_kernel")


@compiled
def test_calls_launch_every_kernel(monkeypatch):
    """On a GPU that is not there, of a kind that has all of them."""
    absent = pytest.importorskip("tests.offline.absent")
    from fusedattn.launch import run

    launched = set()

    def load(kernel):
        kernel.function = 0
        kernel._run = absent.Run(lambda *given: launched.add((kernel.name, kernel.src.fn.__module__)))

    monkeypatch.setattr(run, "multiprocessors", lambda device: 132)
    with absent.gpu(90, load=load):
        for call in sanitize.CALLS.values():
            sanitize.results(call, "cpu", call.backend)
    kernels = {(kernel.__name__, kernel.fn.__module__) for kernel in run.KERNELS.values()}
    assert not {name for name, module in kernels} - {name for name, module in launched}
    assert not {module for name, module in kernels} - {module for name, module in launched}
