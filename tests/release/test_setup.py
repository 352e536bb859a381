"""Tests that the script which makes .venv says in one line what to install."""

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / ".ci" / "setup_venv.py"


@pytest.mark.parametrize(
    "missing, folders", [({"venv"}, ["here"]), ({"ensurepip"}, []), ({"ensurepip", "pip"}, ["here"])]
)
def test_a_python_that_cannot_make_a_venv(missing, folders, tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("setup_venv", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in missing else spec)
    monkeypatch.setattr(script.subprocess, "run", lambda command: pytest.fail("it must not be tried"))
    with pytest.raises(SystemExit, match="^make: python3 cannot make a venv; install it, .*python3-venv$"):
        script.make_venv("python3", folders)
