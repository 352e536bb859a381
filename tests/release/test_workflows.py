"""Tests which versions GitHub's workflows test, and that the script of an issue template runs."""

import re
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml", reason="PyYAML, which transformers brings, reads the workflows")

ROOT = Path(__file__).parents[2]
GITHUB = ROOT / ".github"
PROJECT = (ROOT / "pyproject.toml").read_text()
JOBS = yaml.safe_load((GITHUB / "workflows" / "tests.yml").read_text())["jobs"]


def test_each_python_that_is_promised_is_tested():
    tested = JOBS["python"]["strategy"]["matrix"]["python"]
    classifiers = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PROJECT)
    assert tested == classifiers == [f"3.{minor}" for minor in range(10, 15)]
    assert f'requires-python = ">={tested[0]}"' in PROJECT


def test_the_oldest_versions_are_tested():
    pairs = [(row["torch"], row["triton"]) for row in JOBS["versions"]["strategy"]["matrix"]["include"]]
    oldest = re.findall(r"(?:torch|triton)>=([\d.]+)", PROJECT)
    assert pairs[0] == tuple(f"{version}.0" for version in oldest)


def test_the_script_for_wrong_numbers_runs(capsys):
    form = yaml.safe_load((GITHUB / "ISSUE_TEMPLATE" / "numbers.yml").read_text())
    (script,) = [field["attributes"]["value"] for field in form["body"] if field.get("id") == "script"]
    here = script.replace('device="cuda"', 'device="cpu"').replace('backend="triton"', 'backend="cpu"')
    assert here != script
    exec(compile(here, "numbers.yml", "exec"), {})
    said = capsys.readouterr().out.split()
    assert said[::2] == ["ours", "eager"] and 0 < float(said[1]) < 0.01
