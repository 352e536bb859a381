"""Tests GitHub's workflows: least permissions, pinned actions, and no text of strangers in commands."""

import re
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml", reason="PyYAML, which transformers brings, reads the workflows")

ROOT = Path(__file__).parents[2]
GITHUB = ROOT / ".github"
FILES = sorted((GITHUB / "workflows").glob("*.yml"))
PROJECT = (ROOT / "pyproject.toml").read_text()
# The only job that may do more than read. It runs no code of ours and publishes the files of the other jobs.
PUBLISHES = ("release.yml", "publish")
READS = {"contents": "read"}
# Expressions that shell commands and their environment may contain. Strangers cannot choose their values.
OURS = re.compile(r"matrix\.\w+|github\.(workflow|ref)")


def workflow(path):
    content = yaml.safe_load(path.read_text())
    content["on"] = content.pop(True)  # YAML 1.1 reads the key `on` as True
    return content


def jobs():
    for path in FILES:
        for name, job in workflow(path)["jobs"].items():
            yield path.name, name, job


def steps():
    for file, name, job in jobs():
        for step in job["steps"]:
            yield f"{file} {name}", step


def test_jobs_may_read_and_one_may_publish():
    for path in FILES:
        assert workflow(path)["permissions"] == {}, f"{path.name}: what a job may do, the job says"
    for file, name, job in jobs():
        wanted = {"id-token": "write"} if (file, name) == PUBLISHES else READS
        assert job["permissions"] == wanted, (file, name)
        assert job["timeout-minutes"] <= 90 and job["runs-on"] == "ubuntu-24.04", (file, name)


def test_what_publishes_waits_for_a_person_and_for_what_checks():
    (job,) = [job for file, name, job in jobs() if (file, name) == PUBLISHES]
    assert job["environment"]["name"] == "pypi" and set(job["needs"]) == {"build", "check"}
    assert job["if"] == "github.event_name == 'push'"
    assert workflow(GITHUB / "workflows" / "release.yml")["on"]["push"] == {"tags": ["v*"]}


def test_actions_are_pinned_to_a_commit_with_their_version():
    pinned = {}
    for path in FILES:
        lines = [line for line in path.read_text().splitlines() if "uses:" in line]
        assert len(lines) == sum("uses" in step for where, step in steps() if where.startswith(f"{path.name} "))
        for line in lines:
            found = re.fullmatch(r"\s+(?:- )?uses: ([\w-]+/[\w-]+)@([0-9a-f]{40}) # (v\d+\.\d+\.\d+)", line)
            assert found, f"{path.name}: {line}"
            pinned.setdefault(found[1], set()).add((found[2], found[3]))
    assert all(len(versions) == 1 for versions in pinned.values()), pinned


def test_nothing_of_a_stranger_runs_with_secrets_or_in_a_command():
    for path in FILES:
        text = path.read_text()
        assert not {"pull_request_target", "workflow_run", "issue_comment"} & set(workflow(path)["on"])
        assert "secrets." not in text
        for expression in re.findall(r"\$\{\{\s*(.*?)\s*\}\}", text):
            assert OURS.fullmatch(expression), f"{path.name}: {expression}"
    for where, step in steps():
        assert "${{" not in step.get("run", ""), f"{where}: by way of env, where a shell does not read it as code"
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False, where


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
