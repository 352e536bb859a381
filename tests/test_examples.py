"""Each example runs on a CPU, finds what it shows to be true, and is short."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
LINES, SECONDS = 60, 300


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_what_it_shows_is_true(path):
    """An example raises where it is not."""
    if "from transformers import" in path.read_text():
        pytest.importorskip("transformers")
    environment = os.environ | dict(CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_it_is_short_and_says_how_to_run_it(path):
    lines = path.read_text().splitlines()
    assert len(lines) <= LINES
    assert lines[0].startswith('"""') and lines[0].endswith(f".    python examples/{path.name}")


def test_there_are_examples():
    assert EXAMPLES
