"""Tests the command line: info, check, and errors for mistakes, a full disk, a closed pipe and Ctrl-C."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from fusedattn import cli
from fusedattn.cli import machine
from fusedattn.dispatch import backends
from fusedattn.naive import formula
from fusedattn.testing import cases as grid

from ..conftest import run_python

QUICK = ["check", "--device", "cpu", "--backend", "naive", "--dtype", "float32", "--case", "causal"]
ONE = ["bench", "--shape", "1,1,1,8,8,8", "--providers", "fusedattn", "--mode", "forward"]


@pytest.fixture(autouse=True)
def _environment(tmp_path, monkeypatch):
    """Restore the environment after each test, and run it in a folder of unrelated files."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRITON_INTERPRET", os.environ.get("TRITON_INTERPRET", "0"))
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("no table\n")


def answer(capsys, *arguments):
    status = cli.main([*arguments, "--json"])
    return status, json.loads(capsys.readouterr().out)


def slightly_wrong(*call):
    out, *rest = formula.run_naive(*call[:3])
    return out if out.dtype == torch.float64 else out * 1.001, *rest  # the float64 oracle stays right


def raising(*call):
    raise RuntimeError("out of registers")


def test_info_says_what_takes_a_call_and_why_no_other_does(capsys):
    assert machine.explained("cuda:7", "float64").backend == "naive", "no memory of that GPU is needed"
    status, found = answer(capsys, "info")
    assert status == 0 and found["versions"]["torch"] == torch.__version__
    assert len(found["gpus"]) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)
    on_cpu = [one for one in found["backends"] if one["device"] == "cpu"]
    assert [one["dtype"] for one in on_cpu] == list(cli.DTYPES)
    assert all(one["takes"] == "cpu" and one["reasons"]["triton"] for one in on_cpu)
    assert cli.main(["info"]) == 0
    shown = capsys.readouterr().out
    assert torch.__version__ in shown and "bfloat16" in shown and on_cpu[0]["reasons"]["triton"][0] in shown


def test_check_compares_each_result_with_eager(capsys):
    status, found = answer(capsys, *QUICK, "--case", "padding")
    assert status == 0 and found["ok"]
    results = ["out", "lse", "d query", "d key", "d value"]
    assert [(one["case"], one["result"]) for one in found["results"]] == [
        (case, result) for case in ("causal", "padding") for result in results
    ]
    assert all(0 < one["max_error"] <= one["max_allowed"] and one["max_eager"] > 0 for one in found["results"])
    assert cli.main(QUICK) == 0
    shown = capsys.readouterr().out
    assert "naive on cpu, float32" in shown and "5 of 5 results" in shown


def test_check_runs_the_kernels(device, capsys):
    status, found = answer(capsys, *QUICK[:1], "--device", device, "--backend", "triton", *QUICK[5:])
    assert status == 0 and found["results"] and all(one["backend"] == "triton" for one in found["results"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU, kernels are not interpreted")
def test_check_interprets_kernels_without_being_told():
    pytest.importorskip("triton")
    command = "-m fusedattn check --json --backend triton --dtype float32 --case causal".split()
    assert len(json.loads(run_python(*command, TRITON_INTERPRET=None))["results"]) == 5


@pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU, kernels are not interpreted")
def test_check_says_why_a_backend_leaves_a_case_out(capsys):
    arguments = ["check", "--device", "cpu", "--backend", "cpu", "--dtype", "float32", "--case", "softcap"]
    status, found = answer(capsys, *arguments)
    (left,) = found["left_out"]
    assert status == 1 and found["results"] == [] and left["case"] == "softcap" and "softcap" in left["reasons"][0]
    assert cli.main(arguments) == 1
    assert f"left out: cpu on cpu, softcap, float32: {left['reasons'][0]}\n" in capsys.readouterr().out


@pytest.mark.parametrize("run, why", [(slightly_wrong, "its largest "), (raising, "RuntimeError: out of registers")])
def test_check_fails_if_a_backend_is_wrong_or_raises(run, why, monkeypatch, capsys):
    monkeypatch.setitem(backends.BACKENDS, "naive", backends.BACKENDS["naive"]._replace(run=run))
    status, found = answer(capsys, *QUICK)
    assert status == 1 and not found["ok"]
    assert any(one["result"] == "out" and why in one["why"] for one in found["results"] if not one["ok"])
    assert cli.main(QUICK) == 1
    shown = capsys.readouterr().out
    assert "FAIL naive on cpu in float32, causal, out: " in shown and why in shown


def test_info_check_and_bench_need_neither_triton_nor_rich_nor_matplotlib():
    gone = "import sys; sys.modules |= dict.fromkeys(('triton', 'rich', 'matplotlib'))"
    absent = "assert not {'triton', 'rich', 'matplotlib'} & {*sys.modules}"
    run = f"sys.exit(any([main(each) for each in {(['info'], QUICK, ONE)}]))"
    printed = run_python("-c", f"import sys; from fusedattn.cli import main; {absent}; {gone}; {run}")
    assert "5 of 5 results" in printed and "1 of 1 results right" in printed


CASES = ", ".join(case.name for case in grid.CASES)
MISTAKES = [  # (command, part of the one line that it prints)
    ([], "COMMAND"),
    (["nope"], "invalid choice: 'nope'"),
    (["info", "extra"], "fusedattn info: it does not take extra (see fusedattn info --help)"),
    (["bench", "--shpe", "1"], "bench: it does not take --shpe (see fusedattn bench --help)"),
    (["check", "--backend"], "--backend: expected one argument, got none"),
    (["check", "--case", "zzz"], f"case: expected one of {CASES}, got zzz\n"),
    (["check", "--case", "casual"], "did you mean causal?"),
    (["check", "--backend", "tritn"], "did you mean triton?"),
    (["check", "--dtype", "int8"], "--dtype"),
    (["bench", "--preset", "slow"], "--preset"),
    (["bench", "--preset", "quick", "--shape", "1,1,1,8,8,8"], "got preset quick and shape [(1, 1, 1, 8, 8, 8)]\n"),
    *((["bench", "--shape", x], "expected six integers B,Hq,") for x in ("", "1,2", "1,1,1,8,8,x", "0,1,1,8,8,8")),
    *((["bench", "--shape", x], "--shape: expected") for x in ("1,3,2,8,8,8", f"1,1,1,8,8,{10**20}")),
    (["bench", "nope"], "question: expected one of"),
    (["bench", "forward", "--preset", "full"], "got questions ['forward'] and preset full"),
    (["bench", "--providers", "fusedattn,nope"], "providers: expected one of"),
    (["bench", "--mode", ""], "graph, got nothing\n"),
    (["bench", "--mode", "graph", "--device", "cpu"], "got graph: a CUDA graph needs a GPU"),
    (["bench", "--providers", "torch.nn", "--shape", "1,2,1,8,8,8"], "no case fits"),
    ([*ONE, "--csv", "folder"], "csv: expected the name of a file, got the folder 'folder'"),
    ([*ONE, "--csv", "file"], "csv: cannot append to file: file: expected the columns"),
    ([*ONE, "--csv", ""], "csv: expected the name of a file, got ''"),
    ([*ONE, "--csv", "nowhere/a.csv"], "csv: expected a file in a folder that exists, got nowhere/a.csv"),
    ([*ONE, "--csv", "/dev/full"], "csv: cannot append to /dev/full"),
    ([*ONE, "--plot", "a.csv"], "plot: expected a name that ends in .png, got a.csv"),
    ([*ONE, "--plot", "nowhere/a.png"], "got nowhere/a.png"),
    (["bench", "--device", "cuda"], "GPU"),
    (["tune", "--shape", "1,1,1,8,8,8"], "GPU"),
    (["warmup"], "--shape"),
    (["warmup", "--shape", "1,1,1,8,8,8", "--jobs", "0"], "--jobs: expected 1 or more, got 0"),
    (["warmup", "--shape", "1,1,1,8,8,8"], "GPU"),
]


@pytest.mark.parametrize("command, said", MISTAKES, ids=lambda x: " ".join(x) if isinstance(x, list) else "")
@pytest.mark.usefixtures("at_once", "one_thread")
def test_a_mistake_is_one_line(command, said, capsys):
    if "--plot" in command:
        pytest.importorskip("matplotlib")
    if said == "GPU" and torch.cuda.is_available():
        pytest.skip("there is one")
    try:
        status = cli.main(command)
    except SystemExit as exited:  # raised by argparse
        status = exited.code
    shown = capsys.readouterr()
    assert status == 2 and shown.err.count("\n") == 1 and shown.err.startswith("fusedattn") and said in shown.err
    assert sorted(os.listdir()) == ["file", "folder"] and not os.listdir("folder")


def start(*arguments, **options):
    command = [sys.executable, "-m", "fusedattn", *arguments]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, **options)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_disk_that_is_full():
    with open("/dev/full", "w") as full:
        command = start("info", stdout=full)
        said = command.communicate(timeout=120)[1]
    assert command.returncode == 2 and said.count("\n") == 1
    assert said.startswith("fusedattn") and "No space left on device" in said


def test_an_error_of_another_file_keeps_what_was_printed():
    code = "import sys; from fusedattn import cli; from fusedattn.cli import info\n"
    code += "info.run = lambda *_: print('printed') or open('nowhere')\nsys.exit(cli.main(['info']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "printed\n") and "nowhere" in done.stderr


def test_a_reader_that_has_gone():
    read, write = os.pipe()
    os.close(read)
    command = start("info", stdout=write)
    os.close(write)
    assert command.communicate(timeout=120)[1] == "" and command.returncode == 141


def test_an_interrupt():
    heard = dict(preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))  # after `&` shells ignore Ctrl-C
    command = start("bench", "--csv", "rows.csv", stdout=subprocess.PIPE, **heard)
    until = time.monotonic() + 120
    while not (os.path.exists("rows.csv") and len(Path("rows.csv").read_text().splitlines()) > 2):
        assert time.monotonic() < until
        time.sleep(0.1)
    command.send_signal(signal.SIGINT)
    out, said = command.communicate(timeout=120)
    assert command.returncode == 130 and said == "", said
    assert "rows (" in out
