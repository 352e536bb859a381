"""Tests `fusedattn tune`: wrong candidates are never used, the fastest comes first, and launches read the file."""

import itertools
import json

import pytest
import torch

pytest.importorskip("triton", reason="kernels need Triton")

from fusedattn.bench.cases import Case
from triton.runtime.errors import OutOfResources

import fusedattn as fa
from fusedattn import cli
from fusedattn.cli import machine, tune
from fusedattn.launch import run, tile_table as table, tuned

from ..inside import interpreted
from ..launch.test_tuned import ABOUT, GPU, file  # noqa: F401

SMALL = Case(1, 1, 1, 40, 40, 16, 16, False, "float32")


@interpreted
def test_a_mistake_costs_its_form_and_nothing_else(monkeypatch, record_after):
    run_kernel, sizes = run.run_kernel, [table.Tile(rows, 16, 4, 1) for rows in (64, 32, 16)]
    raising = {("dq", 64): ValueError("an operand too many"), ("dkdv", 64): OutOfResources(300_000, 232_448, "memory")}

    def planted(name, programs, arguments, *rest, **options):
        size = name, arguments.get("BLOCK_M")
        if size in raising:
            raise raising[size]
        run_kernel(name, programs, arguments, *rest, **options)
        if size == ("forward", 32):
            arguments["Out"][0].mul_(1.1)

    record_after(None)  # `planted` does not see the launches of replays
    monkeypatch.setattr(tune.timer, "times", lambda *_: {"": (1.0, 1.0, 1.0)})
    monkeypatch.setattr(tune, "REPEATS", 2)
    monkeypatch.setattr(run, "run_kernel", planted)
    for kernel in ("forward", "dq", "dkdv", "one_pass"):
        monkeypatch.setitem(table.INTERPRETED, kernel, tuple(sizes))
    tune.measure(rows := {}, SMALL, "plain", "cpu", None)
    found = [(row.kernel, row.form and row.form.rows, row.why) for row in rows.values()]
    assert [one[:2] for one in found if not one[2]] == [
        *itertools.product(("forward",), (64, 16)),
        *itertools.product(("dq", "dkdv"), (32, 16)),  # a candidate that does not fit is left out
        *itertools.product(("one_pass",), (64, 32, 16)),
        ("two_passes", None),
    ]
    (_, _, inexact), (*broken, why) = (one for one in found if one[2])
    assert "1,1,1,40,40,16 fp32, out: its largest error" in inexact
    assert broken == ["dq", 64] and "an operand too many" in why
    raising["forward", 64] = RuntimeError("CUDA error: an illegal memory access")
    with pytest.raises(tune.Problem, match="forward rows=64 .* broke the GPU"):
        tune.measure({}, SMALL, "plain", "cpu", None)
    assert tuned.of(torch.device("cpu")) == {}, "calls take what they took before"


@pytest.mark.parametrize("options, dtype, widths, loads", [
    ([], "bfloat16", {*table.WIDTHS}, {"plain", "masked", "rich"}),
    (["--shape", "1,8,8,512,256,64", "--dtype", "float16"], "float16", {64}, {"plain", "rich"}),
])  # fmt: skip
def test_the_command_writes_a_file_that_launches_read(options, dtype, widths, loads, file, monkeypatch, capsys):  # noqa: F811
    """The command writes a file, here for a simulated GPU on which a candidate with n rows takes n milliseconds."""
    monkeypatch.setattr(machine, "need_gpu", lambda why: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    timed = lambda row, case, device: row._replace(ms={**row.ms, case.name: (row.form or (1.0,))[0]})  # noqa: E731
    monkeypatch.setattr(tune, "measured", timed)
    measure = tune.measure

    def stopped(rows, case, load, *rest):
        measure(rows, case, load, *rest)
        if options and load == "rich":
            raise tune.Problem("broke the GPU")  # what was measured before is kept

    monkeypatch.setattr(tune, "measure", stopped)
    assert cli.main(["tune", "--json", *options]) == 2 * bool(options)
    fa.tuning.forget()
    said, found = json.loads(capsys.readouterr().out), tuned.of(GPU)
    assert said == dict(file=str(file)) | json.loads(file.read_text()) and said["about"] == ABOUT
    assert {place[1:] for place in found} == {*itertools.product([dtype], widths, loads)}
    assert all(each.right and not each.wrong for each in found.values())
    forms = found["forward", dtype, 64, "plain"].right
    assert [form.rows for form in forms] == sorted(form.rows for form in tuned.candidates("forward", 90, 2, 64))
    assert [*file.parent.iterdir()] == [file], "no part of a file is left"
