"""Tests tuning files: valid files change calls, others are ignored with a warning."""

import json
import types
import warnings

import pytest
import torch

pytest.importorskip("triton", reason="kernels need Triton")

import fusedattn as fa
from fusedattn.dispatch import replay
from fusedattn.launch import backward, run, tile_table as table, tuned
from fusedattn.launch.tuned import Row, choose

from ..inside import fields

GPU, PLACE = torch.device("cuda", 0), ("bfloat16", 128, "plain")
ABOUT = dict(gpu="NVIDIA H200", capability="90", driver="580.1", torch="2.13.0", triton="3.7.1", fusedattn="1")
FORWARD, ONE_PASS = (tuned.candidates(kernel, 90, 2, 128) for kernel in ("forward", "one_pass"))
SLIM, WAY_BACK = table.HOPPER[128][1], table.BACKWARDS["hopper_bwd"][128][0]
ROWS = [
    Row("forward", *PLACE, FORWARD[0], why="out: NaN"),
    Row("forward", *PLACE, FORWARD[1], dict(full=1.5, causal=1.1)),
    Row("forward", *PLACE, FORWARD[2]),
    Row("hopper", *PLACE, SLIM, dict(full=1.6, causal=1.0)),
    Row("two_passes", *PLACE, None, dict(full=3.0, causal=3.0)),
    Row("one_pass", *PLACE, ONE_PASS[0], dict(full=4.0, causal=2.0)),
    Row("hopper_bwd_deterministic", *PLACE, WAY_BACK, dict(causal=4.0)),
    Row("hopper_bwd", *PLACE, WAY_BACK, dict(causal=4.0)),
]


@pytest.fixture
def file(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tuned, "about", lambda device: dict(ABOUT))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: ABOUT["gpu"])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    path = tmp_path / "fusedattn" / "tuning" / "nvidia-h200.json"
    path.parent.mkdir(parents=True)
    fa.tuning.forget()
    yield path
    fa.tuning.forget()


def content(**changes):
    forms = [row._asdict() | dict(form=row.form and row.form._asdict()) for row in ROWS]
    return dict(about=ABOUT | changes, forms=forms)


def said(device=GPU):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found, _ = tuned.of(device), tuned.of(device)
    return found, [str(warning.message) for warning in caught]


def test_a_file_is_about_the_gpu_and_all_versions(monkeypatch):
    gpu = types.SimpleNamespace(name="NVIDIA H200", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    versions = dict(torch=torch.__version__, fusedattn=fa.__version__, gpu="NVIDIA H200", capability="90")
    assert tuned.about(GPU).keys() == ABOUT.keys() and versions.items() <= tuned.about(GPU).items()


def test_a_file_counts_until_it_is_forgotten_and_reaches_calls_made_before(file, monkeypatch):
    mine, forgotten, forget = file.parent / "mine.json", [], replay.forget
    mine.write_text(json.dumps(content()))
    assert said() == ({}, []), "it is of no GPU by its name"
    monkeypatch.setattr(replay, "forget", lambda: forgotten.append(forget() is None))
    for step, found in ((lambda: fa.tuning.load(mine), choose(ROWS)), (fa.tuning.forget, {})):
        table.fitting["a kind of call"] = ()
        step()
        assert not table.fitting and forgotten.pop() and said() == (found, [])
    mine.rename(file)
    fa.tuning.forget()
    assert said() == (choose(ROWS), []) and said(torch.device("cpu")) == ({}, [])
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert str(tuned.path("NVIDIA A100")).endswith("/.cache/fusedattn/tuning/nvidia-a100.json")


IGNORED = {f"another {what}": (content(**{what: "80"}), f"'{what}': '80'") for what in ABOUT}
FORMS = content()["forms"]
IGNORED |= {
    "a list": ([], "list indices"),
    "no forms": (dict(about=ABOUT), "KeyError('forms')"),
    "a tile of none": (content() | dict(forms=[FORMS[0] | dict(form=dict(rows=64, warps=3))]), "there is no"),
    "a load of none": (content() | dict(forms=[FORMS[0] | dict(pressure="heavy")]), "heavy"),
    "a time of none": (content() | dict(forms=[FORMS[0] | dict(ms=dict(full="long"))]), "could not convert"),
}


@pytest.mark.parametrize("wrong, why", IGNORED.values(), ids=IGNORED)
def test_a_file_of_another_machine_or_a_damaged_one_is_ignored_with_one_warning(wrong, why, file):
    for text, part in ((json.dumps(wrong), why), (json.dumps(wrong)[:-1], ""), ("[" * 100_000, "")):
        file.write_text(text)
        fa.tuning.forget()
        found, (warning,) = said()
        assert found == {} and f"ignores a tuning file: {file}" in warning and part in warning
        with pytest.raises(ValueError, match="of another machine or version, or damaged"):
            fa.tuning.load(file)


@pytest.fixture
def chosen(monkeypatch):
    def of(rows):
        found = choose(rows)
        monkeypatch.setattr(tuned, "of", lambda device: found)
        monkeypatch.setattr(table, "fitting", {})

    monkeypatch.setattr(run, "capability", lambda device: 90)
    return of


def call(dtype, rows=100, **options):
    query, key = torch.empty(1, 2, rows, 128, dtype=dtype), torch.empty(1, 1, 200, 128, dtype=dtype)
    return fields(query, key, key, **options)


def test_calls_take_the_tiles_and_the_passes_that_were_chosen(chosen):
    def bf16(**options):
        return call(torch.bfloat16, **options)._replace(named=True)

    every, plain = [True, True, True, False, False, False], table.tiles_for("forward", 90, 2, 128)
    assert run.candidates("forward", bf16()) == plain and "one_pass" in backward.passes(bf16(), every)
    chosen(ROWS)
    tiles = run.candidates("forward", bf16())
    assert tiles == (FORWARD[1], FORWARD[2]), "the fastest first, without a time the last, none wrong"
    assert run.candidates("forward", bf16(rows=8)) == (FORWARD[2],), "no larger tile for few rows"
    assert run.candidates("forward", call(torch.float16)) == plain
    assert backward.passes(bf16(), every) == ("preprocess", "dq", "dkdv")
    assert "one_pass" in backward.passes(bf16()._replace(right=0), every), "it is faster there"
    chosen([Row("one_pass", *PLACE, form, why="NaN") for form in ONE_PASS])
    assert "dq" in backward.passes(bf16(), every)
