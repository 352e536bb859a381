"""Each command starts, answers, and exits as it should; tests/cli and tests/bench have the rest."""

import json
import os

import pytest
import torch

from fusedattn import cli
from fusedattn.dispatch import backends, replay
from fusedattn.naive import formula


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    """What a command changes of the process, it changes for one test."""
    monkeypatch.setenv("TRITON_INTERPRET", os.environ.get("TRITON_INTERPRET", "0"))
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


CHECK = ["check", "--device", "cpu", "--backend", "naive", "--dtype", "float32", "--case", "causal"]


@pytest.mark.parametrize("command", ["info", "check", "bench"])
def test_it_says_how_it_is_used(command, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help"])
    assert ended.value.code == 0 and f"usage: fusedattn {command}" in capsys.readouterr().out


def test_info(capsys):
    assert cli.main(["info", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["versions"]["torch"] == torch.__version__


def test_check_passes_and_fails(monkeypatch, capsys):
    assert cli.main([*CHECK, "--json"]) == 0 and json.loads(capsys.readouterr().out)["ok"]
    assert cli.main(["check", "--case", "no such case"]) == 2
    assert "no such case" in capsys.readouterr().err

    def slightly_wrong(*call):
        out, *rest = formula.run_naive(*call)
        return out if out.dtype == torch.float64 else out * 1.001, *rest  # what it is held to is right

    planted = backends.BACKENDS["naive"]._replace(run=slightly_wrong)
    monkeypatch.setitem(backends.BACKENDS, "naive", planted)
    replay.forget()
    assert cli.main(CHECK) == 1 and "FAIL" in capsys.readouterr().out


def test_check_runs_the_kernels(device, capsys):
    kernels = ["check", "--json", "--device", device, "--backend", "triton", "--dtype", "float32", "--case", "causal"]
    assert cli.main(kernels) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert results and all(one["ok"] and one["backend"] == "triton" for one in results)


def test_bench(capsys):
    shape = ["--shape", "1,1,1,8,8,8", "--mode", "forward", "--providers", "fusedattn"]
    assert cli.main(["bench", *shape]) == 0
    assert "right" in capsys.readouterr().out
    assert cli.main(["bench", "--providers", "nope"]) == 2
    assert "nope" in capsys.readouterr().err
