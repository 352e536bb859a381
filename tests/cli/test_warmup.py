"""Tests `fusedattn warmup`: later calls find their kernels compiled."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

pytest.importorskip("triton", reason="kernels need Triton")

from fusedattn.bench.cases import Case

import fusedattn as fa
from fusedattn import cli
from fusedattn.cli import machine, warmup

from ..inside import compiled

CASE = Case(4, 8, 2, 512, 512, 64, 64, True, "bfloat16")


def kernels(folder):
    return sorted(path.name for path in folder.rglob("*.json") if not path.name.startswith("__grp__"))


@compiled
@pytest.mark.parametrize("what", warmup.PASSES)
@pytest.mark.one_in(3)
def test_calls_of_other_sizes_compile_nothing_more(what, tmp_path):
    from ..offline import absent

    with absent.gpu(90, folder=str(tmp_path)):
        done = warmup.compile_pass(CASE, what, torch.device("cpu"))
    assert done["why"] == "" and done["kernels"] == {"backward": 3, "training": 1, "inference": 1}[what]
    names = kernels(tmp_path)
    assert len(names) == done["kernels"]
    with absent.gpu(90, folder=str(tmp_path)):  # as in a new process
        for batch, heads, kv_heads, rows in ((1, 8, 2, 77), (3, 8, 2, 640)):
            shapes = [(batch, rows, h, 64) for h in (heads, kv_heads, kv_heads)]
            inputs = [torch.zeros(shape, dtype=torch.bfloat16).transpose(1, 2) for shape in shapes]
            for x in inputs:
                x.requires_grad_(what != "inference")
            with torch.set_grad_enabled(what != "inference"):
                out = fa.attention(*inputs, causal=True, backend="hopper")
            if what == "backward":
                torch.autograd.grad(out, inputs, torch.zeros_like(out))
    assert len(kernels(tmp_path)) == len(names) + (what == "backward"), "with a backward goes a forward"


@compiled
@pytest.mark.parametrize("case", [(1, 8, 1, 16384, 16384, 256, 256), (1, 2, 2, 4096, 4096, 100, 100)])
@pytest.mark.one_in(2)
def test_calls_for_which_torch_copies_and_adds(case, tmp_path):
    from ..offline import absent

    with absent.gpu(90, folder=str(tmp_path)):
        done = warmup.compile_pass(Case(*case, False, "bfloat16"), "backward", torch.device("cpu"))
    assert done["why"] == "" and done["kernels"] == len(kernels(tmp_path)) > 0


@pytest.fixture
def gpu(monkeypatch):
    """Simulate a GPU, and threads that compile nothing; return the list of requested passes."""
    asked = []

    def answered(case, what, device):
        asked.append((case, what))
        return dict(case=case.name, what=what, kernels=2, seconds=0.5, why="no room" if case.D == 256 else "")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(machine, "device", lambda: "cuda")
    monkeypatch.setattr(warmup, "ProcessPoolExecutor", lambda jobs, mp_context: ThreadPoolExecutor(jobs))
    monkeypatch.setattr(warmup, "compile_pass", answered)
    return asked


def test_the_command_compiles_each_pass_of_each_shape(gpu, capsys):
    options = ["--shape", "4,8,2,512,512,64", "--shape", "1,8,8,64,64,128", "--dtype", "float16", "--dtype", "bfloat16"]
    assert cli.main(["warmup", "--json", *options]) == 0
    said = json.loads(capsys.readouterr().out)
    assert len(gpu) == len({*gpu}) == 2 * 2 * 2 * 3 == len(said["passes"]) and said["failed"] == 0
    assert [what for _, what in gpu][:8] == ["backward"] * 8, "the longest first"
    assert said["passes"][0] == dict(case=gpu[0][0].name, what="backward", kernels=2, seconds=0.5, why="")
    gpu.clear()
    assert cli.main(["warmup", "--shape", "4,8,2,512,512,64", "--inference", "--causal", "--jobs", "1"]) == 0
    assert [(case.causal, what) for case, what in gpu] == [(True, "inference")]
    assert "2 kernels in" in capsys.readouterr().out
    assert cli.main(["warmup", "--shape", "4,8,2,512,512,256", "--no-causal"]) == 1  # a pass that fails is a row
    said = capsys.readouterr().out
    assert said.count("no room") == 3 and "causal" not in said
