"""The command line: what each command answers, and its exit status."""

import io
import json
import os
import subprocess
import sys

import pytest
import torch

from fusedattn import backends, cli
from fusedattn.cli import screen
from fusedattn.naive import formula
from fusedattn.testing import cases as grid

QUICK = ["--json", "--device", "cpu", "--backend", "naive", "--dtype", "float32", "--case", "causal"]


@pytest.fixture(autouse=True)
def _threads_and_environment(monkeypatch):
    """What a command changes of the process, it changes for one test."""
    monkeypatch.setenv("TRITON_INTERPRET", os.environ.get("TRITON_INTERPRET", "0"))
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def answer(capsys, *arguments):
    """(exit status, the JSON a command printed)."""
    status = cli.main(arguments)
    return status, json.loads(capsys.readouterr().out)


def plant(monkeypatch, name, run):
    """Let a backend take every call, Triton or not, and compute it by another function."""
    monkeypatch.setattr(backends.attention, "tiles", lambda *_: {})
    planted = backends.BACKENDS[name]._replace(reasons=lambda *_: [], run=run)
    monkeypatch.setitem(backends.BACKENDS, name, planted)


def slightly_wrong(call, need_lse, need_weights):
    out, *rest = formula.run(call, need_lse, need_weights)
    return out if out.dtype == torch.float64 else out * 1.001, *rest  # what it is held to is right


def raising(call, need_lse, need_weights):
    raise RuntimeError("out of registers")


@pytest.mark.parametrize("command", [[], ["info"], ["check"]], ids=lambda command: " ".join(command) or "none")
def test_help(command, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([*command, "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert "usage: fusedattn" in shown and ("--json" in shown or not command)


def test_version(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out.startswith("fusedattn ")


def test_info_says_what_takes_a_call_and_why_no_other_does(capsys):
    status, found = answer(capsys, "info", "--json")
    assert status == 0 and found["versions"]["torch"] == torch.__version__
    assert len(found["gpus"]) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)
    on_cpu = [one for one in found["backends"] if one["device"] == "cpu"]
    assert [one["dtype"] for one in on_cpu] == list(cli.DTYPES)
    assert all(one["takes"] == "cpu" and one["reasons"]["triton"] for one in on_cpu)


def test_info_in_words(capsys):
    assert cli.main(["info"]) == 0
    shown = capsys.readouterr().out
    assert "CPU cores" in shown and "bfloat16" in shown and torch.__version__ in shown


def test_check_compares_each_result_with_eager(capsys):
    status, found = answer(capsys, "check", *QUICK)
    assert status == 0 and found["ok"]
    assert [one["result"] for one in found["results"]] == ["out", "lse", "d query", "d key", "d value"]
    assert all(0 < one["max_error"] <= one["max_allowed"] and one["max_eager"] > 0 for one in found["results"])


def test_check_runs_the_kernels(device, capsys):
    cases = ["--case", "causal", "--case", "padding"]  # bench/gpu.sh runs all of them
    status, found = answer(capsys, "check", "--json", "--backend", "triton", "--device", device, *cases)
    assert status == 0 and {one["backend"] for one in found["results"]} == {"triton"}
    assert {one["dtype"] for one in found["results"]} >= {"float16", "bfloat16", "float32"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU, kernels are not interpreted")
def test_check_says_why_a_backend_leaves_a_case_out(capsys):
    arguments = ["check", "--device", "cpu", "--backend", "cpu", "--dtype", "float32", "--case", "softcap"]
    status, found = answer(capsys, *arguments, "--json")
    part = dict(backend="cpu", device="cpu", dtype="float32", case="softcap", reasons=["it knows no softcap"])
    assert status == 1 and found["results"] == [] and found["left_out"] == [part]
    assert cli.main(arguments) == 1
    assert "left out: cpu on cpu, softcap, float32: it knows no softcap\n" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU, kernels are not interpreted")
@pytest.mark.parametrize("on", [[], ["--device", "cpu"]], ids=["no device", "cpu"])
def test_check_interprets_kernels_without_being_told(on):
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "fusedattn", "check", "--json", "--backend", "triton"]
    shown = subprocess.run(
        [*command, *on, "--dtype", "float32", "--case", "causal"],
        capture_output=True,
        text=True,
        env=environment,
        check=True,
    )
    assert len(json.loads(shown.stdout)["results"]) == 5


def test_check_fails_if_a_backend_is_wrong(monkeypatch, capsys):
    plant(monkeypatch, "naive", slightly_wrong)
    status, found = answer(capsys, "check", *QUICK)
    assert status == 1 and not found["ok"]
    assert {one["result"] for one in found["results"] if not one["ok"]} >= {"out", "d value"}


def test_check_in_words_says_what_is_wrong(monkeypatch, capsys):
    plant(monkeypatch, "naive", slightly_wrong)
    assert cli.main(["check", *QUICK[1:]]) == 1
    shown = capsys.readouterr().out
    assert "FAIL" in shown and "its largest error is" in shown


def test_check_says_that_kernels_alone_are_interpreted(capsys):
    assert cli.main(["check", *QUICK[1:], "--backend", "cpu"]) == 0  # and naive
    shown = capsys.readouterr().out
    assert all(f"{backend} on cpu, float32: " in shown for backend in ("cpu", "naive"))


def test_check_fails_if_a_backend_raises(monkeypatch, capsys):
    plant(monkeypatch, "naive", raising)
    status, found = answer(capsys, "check", *QUICK)
    assert status == 1 and found["results"][0]["why"] == "RuntimeError: out of registers"


@pytest.mark.parametrize(
    "option, given, meant",
    [("case", "casual", "causal"), ("case", "causal, more keys", "causal more keys"), ("backend", "tritn", "triton")],
)
def test_check_says_which_name_may_be_meant(option, given, meant, capsys):
    assert cli.main(["check", f"--{option}", given]) == 2
    shown = capsys.readouterr().err
    assert shown.endswith(f"got {given}: did you mean {meant}?\n") and shown.count("\n") == 1


def test_check_names_what_there_is(capsys):
    assert cli.main(["check", "--case", "zzz"]) == 2
    shown = capsys.readouterr().err
    assert f"expected one of {', '.join(case.name for case in grid.CASES)}, got zzz\n" in shown


def test_names_of_cases_are_in_that_list_as_they_are_typed(capsys):
    assert not any("," in case.name for case in grid.CASES)
    status, found = answer(capsys, "check", *QUICK[:-1], "causal more keys", "--case", "causal top left")
    assert status == 0 and {one["case"] for one in found["results"]} == {"causal more keys", "causal top left"}


def test_info_check_and_bench_need_neither_triton_nor_rich_nor_matplotlib():
    bench = ["bench", "--shape", "1,1,1,8,8,8", "--mode", "forward", "--providers", "fusedattn"]
    gone = "import sys; sys.modules |= dict.fromkeys(('triton', 'rich', 'matplotlib'))"
    commands = ["info"], ["check", *QUICK[1:]], bench
    absent = "assert not {'triton', 'rich', 'matplotlib'} & {*sys.modules}"
    run = f"sys.exit(any([main(each) for each in {commands}]))"
    program = f"import sys; from fusedattn.cli import main; {absent}; {gone}; {run}"
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "Traceback" not in shown.stderr and shown.returncode == 0, shown.stderr
    assert "triton: Triton is not installed" in shown.stdout
    assert "5 of 5 results are as good as eager PyTorch's" in shown.stdout and "1 of 1 result right" in shown.stdout


def test_without_rich_a_table_is_aligned(monkeypatch, capsys):
    find = screen.importlib.util.find_spec
    monkeypatch.setattr(screen.importlib.util, "find_spec", lambda name: None if name == "rich" else find(name))
    screen.Screen(only_json=False).table("Title", ["one", "other"], [["a\nlonger", "b"], ["c", "d\ne"]])
    lines = ["Title", "one     other", "------  -----", "a       b", "longer", "c       d", "        e", "", ""]
    assert capsys.readouterr().out == "\n".join(lines)


def test_without_matplotlib_one_line_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(screen.importlib.util, "find_spec", lambda name: None)
    assert cli.main(["bench", "--plot"]) == 2
    shown = capsys.readouterr().err
    assert shown.endswith("matplotlib not installed: pip install 'fusedattn[bench]'\n") and shown.count("\n") == 1


@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-"])
def test_a_caller_may_have_closed_the_output(closed):
    command = f"{sys.executable} -m fusedattn info --json {closed}"
    assert subprocess.run(command, shell=True, stderr=subprocess.PIPE).returncode == 0


def test_a_text_is_shown_as_it_is(capsys):
    """Also what rich would take for a colour or a picture."""
    pytest.importorskip("rich")
    text, shown = "a [bold]word[/b] of [/docs] :smile:", screen.Screen(only_json=False)
    shown.say(text)
    shown.table(f"what follows {text!r}", ["", text], [[text, 1]])
    assert capsys.readouterr().out.count(text) == 4


def test_a_text_that_a_terminal_cannot_write(monkeypatch):
    ascii_alone = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", ascii_alone)
    screen.Screen(only_json=False).say("\u00dcber: one\ntwo")
    ascii_alone.flush()
    assert ascii_alone.buffer.getvalue() == b"?ber: one\ntwo\n"
