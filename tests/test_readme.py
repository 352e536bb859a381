"""Tests that examples/demo.py runs, and that links lead somewhere; .ci/rehearse runs the examples of README.md."""

import importlib.util
import os
import re
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent


def test_every_link_leads_somewhere():
    for page in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"):
        for target in re.findall(r"\]\(([^)]+)\)", (ROOT / page).read_text()):
            assert ((ROOT / page).parent / target).exists(), f"{page}: {target}"


def test_the_rooms_of_the_architecture_are_there():
    page = (ROOT / "ARCHITECTURE.md").read_text()
    for room in ("call", "naive", "cpu", "launch", "operators", "dispatch", "distributed", "testing"):
        (row,) = re.findall(rf"^\| `{room}/` \| (.*) \|$", page, re.M)
        files = {path.stem for path in (ROOT / "fusedattn" / room).glob("*.py")} - {"__init__"}
        assert files <= set(re.findall(r"`(\w+)`", row)), room


def test_the_demo_learns_checks_times_and_draws(tmp_path, monkeypatch, capsys, one_thread, at_once):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRITON_INTERPRET", os.environ.get("TRITON_INTERPRET", "0"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    Path("text").write_text("What is written here is learnt by heart, and nothing in it is new.\n" * 30)
    spec = importlib.util.spec_from_file_location("demo", ROOT / "examples" / "demo.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    small = dict(CONTEXT=32, WIDTH=32, HEADS=1, LAYERS=1, BATCH=2)
    vars(module).update(small)
    assert module.main(["--text", "text", "--steps", "4"]) == 0
    shown = capsys.readouterr().out
    assert "wrong" not in shown and "2,1,1,32,32,32 causal fp32" in shown
    assert "gradients by triton: ok" in shown or "triton is not checked" in shown
    assert importlib.util.find_spec("matplotlib") is None or Path("demo.png").read_bytes().startswith(b"\x89PNG")
