"""Tests that the demo trains, checks, times and plots."""

import importlib.util
import os
from pathlib import Path

import torch

DEMO = Path(__file__).parent.parent / "examples" / "demo.py"


def test_the_demo_learns_checks_times_and_draws(tmp_path, monkeypatch, capsys, one_thread, at_once):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRITON_INTERPRET", os.environ.get("TRITON_INTERPRET", "0"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    Path("text").write_text("What is written here is learnt by heart, and nothing in it is new.\n" * 30)
    spec = importlib.util.spec_from_file_location("demo", DEMO)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    small = dict(CONTEXT=32, WIDTH=32, HEADS=1, LAYERS=1, BATCH=2, DTYPES=(torch.float32,))
    vars(module).update(small)
    assert module.main(["--text", "text", "--steps", "4"]) == 0
    shown = capsys.readouterr().out
    assert "FAIL" not in shown and "2,1,1,32,32,32 causal fp32" in shown
    assert "layer 1 by Triton, float32: ok" in shown or "kernels are not checked" in shown
    assert importlib.util.find_spec("matplotlib") is None or Path("demo.png").read_bytes().startswith(b"\x89PNG")
