"""Each example runs on a CPU, finds what it shows to be true, and is short."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fusedattn as fa

ROOT = Path(__file__).parent.parent
DEMO = ROOT / "examples" / "demo.py"
EXAMPLES = sorted({*(ROOT / "examples").glob("*.py")} - {DEMO})
SECONDS = 300


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
@pytest.mark.one_in(4)
def test_what_it_shows_is_true(path):
    """An example raises where it is not."""
    if "from transformers import" in path.read_text():
        pytest.importorskip("transformers")
    environment = os.environ | dict(CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", [*EXAMPLES, DEMO], ids=lambda path: path.stem)
def test_it_is_short_and_says_how_to_run_it(path):
    lines = path.read_text().splitlines()
    assert len(lines) <= (260 if path == DEMO else 60)
    assert lines[0].startswith('"""') and lines[0].endswith(f".    python examples/{path.name}")


def test_there_are_examples():
    assert EXAMPLES


@pytest.fixture
def demo(tmp_path, monkeypatch):
    """Runs examples/demo.py, made small, on a CPU, and returns the exit status."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRITON_INTERPRET", os.environ.get("TRITON_INTERPRET", "0"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    threads = torch.get_num_threads()
    text = "What is written here is learnt by heart, and nothing in it is new.\n" * 30
    (tmp_path / "text").write_text(text)

    def run(*arguments):
        spec = importlib.util.spec_from_file_location("demo", DEMO)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        small = dict(CONTEXT=32, WIDTH=32, HEADS=1, LAYERS=1, BATCH=2, DTYPES=(torch.float32,))
        vars(module).update(small, milliseconds=lambda function: (function(), 1.0)[1])
        return module.main(["--text", "text", "--steps", "4", *arguments])

    yield run
    torch.set_num_threads(threads)


def test_the_demo_learns_checks_times_and_draws(demo, capsys):
    assert demo() == 0
    shown = capsys.readouterr().out
    assert "FAIL" not in shown and "torch (2, 1, 32, 32)" in shown
    assert "layer 1 by Triton, float32: ok" in shown or "kernels are not checked" in shown
    assert importlib.util.find_spec("matplotlib") is None or Path("demo.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "name, wrong", [("attention", "the model"), ("attention_decode", "written with a cache")], ids=lambda x: x
)
def test_the_demo_fails_if_attention_is_wrong(name, wrong, demo, monkeypatch, capsys):
    right = getattr(fa, name)

    def slightly_wrong(*inputs, **options):
        result = right(*inputs, **options)
        return 1.01 * result if isinstance(result, torch.Tensor) else result

    monkeypatch.setattr(fa, name, slightly_wrong)
    assert demo() == 1
    assert f"{wrong}: FAIL" in capsys.readouterr().out


def test_the_demo_needs_a_text(demo, capsys):
    with pytest.raises(SystemExit) as ended:
        demo("--text", "nowhere")
    assert ended.value.code == 2 and "--text" in capsys.readouterr().err
