"""Tests what zizmor does not check in GitHub's workflows: who publishes, and which versions are tested."""

import re
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml", reason="PyYAML, which transformers brings, reads the workflows")

ROOT = Path(__file__).parents[2]
GITHUB = ROOT / ".github"
FILES = sorted((GITHUB / "workflows").glob("*.yml"))
PROJECT = (ROOT / "pyproject.toml").read_text()
# The only job that may write. It runs no code of ours and publishes the files of the other jobs.
PUBLISHES = ("release.yml", "publish")


def workflow(path):
    content = yaml.safe_load(path.read_text())
    content["on"] = content.pop(True)  # YAML 1.1 reads the key `on` as True
    return content


def jobs():
    for path in FILES:
        for name, job in workflow(path)["jobs"].items():
            yield path.name, name, job


def test_what_publishes_waits_for_a_person_and_for_what_checks():
    (job,) = [job for file, name, job in jobs() if (file, name) == PUBLISHES]
    assert job["environment"]["name"] == "pypi" and set(job["needs"]) == {"build", "check"}
    assert job["if"] == "github.event_name == 'push'"
    assert workflow(GITHUB / "workflows" / "release.yml")["on"]["push"] == {"tags": ["v*"]}


def test_each_python_that_is_promised_is_tested():
    (job,) = [job for file, name, job in jobs() if (file, name) == ("tests.yml", "python")]
    tested = job["strategy"]["matrix"]["python"]
    classifiers = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PROJECT)
    assert tested == classifiers == [f"3.{minor}" for minor in range(10, 15)]
    assert f'requires-python = ">={tested[0]}"' in PROJECT


def test_the_oldest_versions_are_tested():
    (job,) = [job for file, name, job in jobs() if (file, name) == ("tests.yml", "versions")]
    pairs = [(row["torch"], row["triton"]) for row in job["strategy"]["matrix"]["include"]]
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
