"""Tests gpu.sh with a fake Python that succeeds, hangs or fails: each step leaves its results in the archive."""

import os
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
from fusedattn.bench.cases import QUESTIONS

ROOT = Path(__file__).parents[2]
STEPS = "info first forward backward decode kernels hopper others matrix tune options packed module flex check".split()
pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
PYTHON = r"""#!/usr/bin/env bash
here=$(dirname "$0")
[ "$1" != -c ] || exit 1
echo "$*" >>"$here/calls"
echo "log of $*"
for word in "$@"; do
    [ ! -f "$here/does-$word" ] || . "$here/does-$word"
    [[ $word != *.csv ]] || echo row >>"$word"
done
"""
LIMIT = r"(?:step|tests) (\w+) (\d+) |^question (\d+) (\w+)"
TIMEOUT = """#!/usr/bin/env bash
exec %s -s INT -k 0.5 2 "${@:6}"
"""


@pytest.fixture
def run(tmp_path):
    for name, text in (("python", PYTHON), ("timeout", TIMEOUT % shutil.which("timeout"))):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)

    def run(*arguments, **does):
        for word, text in does.items():
            (tmp_path / f"does-{word}").write_text(text)
        known = dict(OUT=str(tmp_path / "out"), PYTHON=str(tmp_path / "python"))
        known["PATH"] = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
        command = ["bash", str(ROOT / "bench" / "gpu.sh"), *arguments]
        done = subprocess.run(command, env=os.environ | known, capture_output=True, text=True)
        with tarfile.open(tmp_path / "out" / "results.tgz") as kept:
            files = (member for member in kept.getmembers() if member.isfile())
            found = {x.name.removeprefix("./"): kept.extractfile(x).read().decode() for x in files}
        return done, (tmp_path / "calls").read_text().splitlines(), found

    return run


def test_each_step_runs_and_what_it_left_is_in_the_archive(run):
    done, calls, found = run("abc123", tune='mkdir -p "$XDG_CACHE_HOME/fusedattn"; echo {} >"$_/a.json"')
    assert done.returncode == 0 and done.stdout.splitlines()[-1].endswith("passed"), done.stdout + done.stderr
    assert {f"{name}.log" for name in STEPS} <= found.keys() and len(calls) == len(STEPS)
    assert {f"{name}.csv" for name in (*QUESTIONS["cpu"], "flex")} <= {*found} and found["fusedattn/a.json"] == "{}\n"
    assert all("--commit abc123" in call for call in calls if "fusedattn bench" in call)
    named = [word for call in calls for word in call.split() if word.startswith("tests/")]
    assert named and all((ROOT / word.partition("::")[0].removeprefix("--ignore=")).exists() for word in named)
    assert len(done.stdout) < 12_000


def test_slots_of_ten_minutes():
    text = (ROOT / "bench" / "gpu.sh").read_text()
    limits = {name or question: int(a or b) for name, a, b, question in re.findall(LIMIT, text, re.MULTILINE)}
    slots = [slot.split() for slot in re.search("# +(info .*)", text)[1].split("|")]
    assert sorted(sum(slots, [])) == sorted(STEPS) and all(sum(map(limits.get, slot)) <= 600 for slot in slots)


def test_what_hangs_or_fails_costs_itself_alone(run):
    hangs = "trap '' INT TERM; while :; do sleep 0.1; done"
    done, _, found = run("abc", "forward", "decode", "module", forward=hangs, decode="exit 9")
    assert done.returncode == 1 and done.stdout.splitlines()[-1].endswith("failed: forward decode")
    assert "forward: time over" in done.stdout and found["module.csv"] == "row\n" and "kernels.log" not in found


def test_results_are_kept_from_run_to_run_and_an_unknown_step_is_an_error(run):
    run("abc", "forward")
    done, _, found = run("abc", "decode", "tests")
    assert {"forward.csv", "decode.csv"} <= found.keys()
    assert done.returncode == 1 and "tests (there is no such step)" in done.stdout


def test_python_finds_a_whole_package(run):
    listed = 'cd "$PYTHONPATH" && ls fusedattn/kernels/*.py fusedattn/bench/*.py tests/*.py'
    files = run("abc", "info", info=listed)[2]["info.log"].split()
    assert {"fusedattn/kernels/forward.py", "fusedattn/bench/rows.py", "tests/conftest.py"} <= {*files}
