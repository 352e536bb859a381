"""Tests `fusedattn bench`: its rows, its verdict and its exit status."""

import json
import os

import pytest
import torch
from fusedattn.bench import providers, rows
from fusedattn.bench.cases import QUESTIONS, Case

import fusedattn as fa
from fusedattn import cli
from fusedattn.cli import bench

from .test_cli import answer

pytestmark = pytest.mark.usefixtures("at_once", "one_thread")
TINY = ["bench", "--device", "cpu", "--shape", "1,2,1,24,40,16", "--providers", "fusedattn,naive,sdpa:math"]
SQUARE = ["bench", "--device", "cpu", "--shape", "1,2,2,32,32,16", "--providers", "fusedattn,naive"]


def test_json_has_every_row_and_the_verdict(capsys):
    status, found = answer(capsys, *TINY, "--dtype", "float32", "--dtype", "bfloat16")
    assert status == 0 and found["ok"] and found["complete"] and found["device"] == "cpu" and found["preset"] is None
    assert found["versions"]["torch"] == torch.__version__
    assert [(row["dtype"], row["mode"], row["provider"]) for row in found["rows"]] == [
        (dtype, mode, provider)
        for dtype in ("float32", "bfloat16")
        for mode in ("forward", "backward")
        for provider in ("fusedattn:cpu", "naive", "sdpa:math")
    ]
    for row in found["rows"]:
        assert set(row) == {*rows.COLUMNS} and row["status"] == "ok"
        assert [row[name] for name in "B Hq Hkv Sq Sk D causal".split()] == [1, 2, 1, 24, 40, 16, 0]
        assert row["ms_p50"] == 2.0 and row["tflops"] > 0 and row["peak_mib"] is None and row["err_max"] >= 0
    for one in found["verdict"]["each"]:
        assert (one["cases"], one["median"]) == (2, 1.0)
    assert [(one["mode"], one["other"]) for one in found["verdict"]["each"]] == [
        (mode, other) for mode in ("forward", "backward") for other in ("naive", "sdpa:math")
    ]


def test_a_result_of_ours_that_is_wrong_fails(capsys, monkeypatch):
    def too_large(case, tensors):
        return lambda query, key, value: fa.attention(query, key, value) * 1.01

    monkeypatch.setitem(providers.PROVIDERS, "fusedattn", too_large)
    status, found = answer(capsys, *SQUARE)
    assert status == 1 and not found["ok"] and found["verdict"]["each"] == []  # a wrong result has no ratio
    assert [row["status"].partition(": out: ")[0] for row in found["rows"][:2]] == ["wrong", "ok"]
    assert cli.main([*SQUARE, "--mode", "forward"]) == 1
    assert " wrong: out: its " in capsys.readouterr().out


@pytest.mark.parametrize("error, status", [(KeyboardInterrupt(), 130), (RuntimeError("CUDA error: illegal access"), 2)])
def test_rows_before_the_end_of_a_run_are_shown(error, status, capsys, monkeypatch):
    def ends(case, tensors):
        raise error

    monkeypatch.setitem(providers.PROVIDERS, "naive", ends)
    found, shown = cli.main([*SQUARE, "--shape", "1,2,2,16,16,8", "--json"]), capsys.readouterr()
    assert found == status and not json.loads(shown.out)["complete"] and len(json.loads(shown.out)["rows"]) < 8
    assert ("the GPU stopped working" in shown.err) == (status == 2)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
@pytest.mark.parametrize("json_only", [True, False], ids=["json", "text"])
def test_a_picture_that_cannot_be_written_loses_no_rows(json_only, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    (tmp_path / "a.png").symlink_to("/dev/full")
    picture = str(tmp_path / "a.png")
    assert cli.main([*SQUARE, "--plot", picture, *["--json"] * json_only]) == 2
    shown = capsys.readouterr()
    assert shown.err.count("\n") == 1 and f"plot: cannot write {picture}: No space left" in shown.err
    if json_only:
        found = json.loads(shown.out)
        assert found["ok"] and found["complete"] and found["picture"] is None and len(found["rows"]) == 4
    else:
        assert "4 of 4 rows" in shown.out and "Plot:" not in shown.out


@pytest.mark.parametrize("of_csv", [True, False], ids=["csv", "another file"])
def test_an_error_of_a_file_loses_no_rows(of_csv, tmp_path, capsys, monkeypatch):
    append, measure, appended = rows.append, bench.measure.measure, []

    def full(path, row):
        if appended:
            raise OSError(28, "No space left")
        appended.append(append(path, row))  # the first row is the header

    def ends(*arguments):
        yield next(measure(*arguments))
        raise OSError(5, "Input/output error", "other")

    monkeypatch.setattr(*(rows, "append", full) if of_csv else (bench.measure, "measure", ends))
    assert cli.main([*SQUARE, "--csv", str(tmp_path / "a.csv"), "--json"]) == 2
    shown = capsys.readouterr()
    found = json.loads(shown.out)
    assert not found["complete"] and len(found["rows"]) == 1
    assert ("csv: cannot write" in shown.err) == of_csv and ("No space left" if of_csv else "other") in shown.err


def test_rows_are_appended_and_drawn(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path, picture = tmp_path / "a.csv", tmp_path / "a.png"
    for count in (4, 8):
        status, found = answer(capsys, *SQUARE, "--csv", str(path), "--plot", str(picture))
        assert status == 0 and found["csv"] == str(path) and found["picture"] == str(picture)
        assert len(rows.read(path)) == count and len(found["rows"]) == 4  # the output has only the rows of this run
    assert picture.read_bytes().startswith(b"\x89PNG")
    picture.unlink()
    none_runs = [*SQUARE[:-1], "fusedattn:hopper", "--plot", str(picture)]
    assert answer(capsys, *none_runs)[1]["picture"] is None and not picture.exists()


def chosen(*arguments, device="cpu"):
    return bench.choose(cli._parser().parse_args(["bench", *arguments]), device)


@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_presets_are_questions(where):
    for preset, names in bench.PRESETS.items():
        work = chosen("--preset", preset, device=where)
        assert len(work) == len(names)
        for name, (some, providers_, modes) in zip(names, work, strict=True):
            every, usual, asked = QUESTIONS[where][name]
            assert some and {*some} <= {*every} and (providers_, modes) == ([*usual], [*asked])
            assert len(some) == len(every) or preset == "quick"
    assert chosen() == chosen("--preset", "quick")
    assert chosen("forward", "module") == chosen("--preset", "full")[:1] + chosen("--preset", "full")[-1:]
    assert len(chosen()) == 3 and len(chosen("--providers", "naive")) == 2, "modules have a provider of their own"
    ((some, _, modes),) = chosen("--providers", "torch.nn,fusedattn", "--shape", "1,2,2,8,8,4")
    assert [case.options for case in some] == ["module"] and modes == ["forward", "forward_backward"]


def test_options_narrow_a_preset():
    assert all(case.causal for some, *_ in chosen("--causal") for case in some)
    narrowed = "--preset paper --dtype float16 --mode forward --providers sdpa".split()
    ((some, names, modes), _) = chosen(*narrowed)
    assert {case.dtype for case in some} == {"float16"} and names == ["sdpa"] and modes == ["forward"]
    assert len(some) == len({*some})
    ((some, names, modes),) = chosen("--shape", "1,4,2,8,16,32", "--causal", "--dtype", "float32", "--dtype", "float16")
    expected = Case(1, 4, 2, 8, 16, 32, 32, True, "float32")
    assert some == [expected, expected._replace(dtype="float16")] and modes == ["forward", "backward"]
    assert chosen("--shape", "1,4,2,8,16,32", device="cuda")[0][0][0].dtype == "bfloat16"
