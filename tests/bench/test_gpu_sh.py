"""gpu.sh, by a Python that answers at once, hangs, dies or fails: the order of steps, the archive, a second slot."""

import os
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
from fusedattn.bench import cases
from fusedattn.bench.dev import questions, warm

ROOT = Path(__file__).parents[2]
SCRIPT = (ROOT / "bench" / "gpu.sh").read_text()
FIRST = ("first-contact", "attention", "hopper-tests", "tune", "core-tests")
THEN = ("decode", "varlen", "tuned", "other-tests", "options", "skipping", "small", "backward_flex", "minilm", "module")
STEPS = (*FIRST, *THEN, "check", "peers")
TESTS = tuple(name for name in STEPS if name.endswith("-tests") or name == "first-contact")
pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")

PYTHON = r"""#!/usr/bin/env bash
# Says which step it is called for, and does what the file of that name says.
here=$(dirname "$0")
case "$1" in
    -) cat >/dev/null && cat "$here/about" && exit ;;
    -c) exit 1 ;;
esac
name=$3 file=/dev/null
while [ $# -gt 0 ]; do
    case "$1" in
        --csv | --but) name=$(basename "${2%.*}") file=$2 ;;
        --part) name=warm-$2 ;;
    esac
    words+=" $1"
    shift
done
case $name in
    warm-*) echo "$name" >>"$here/ahead" && exit ;;
esac
echo "$name$words" >>"$here/calls"
tar -tzf "$here/out/results.tgz" | tr '\n' ' ' >>"$here/archives" && echo >>"$here/archives"
passes() { echo "tests/a.py::test_$name[$1] PASSED  [ 50%]"; }
row() { echo "$name" >>"$file"; }
if [ -f "$here/$name" ]; then . "$here/$name"; exit; fi
case $words in
    *pytest*) passes 1; echo "=== 1 passed in 0.10s ===" ;;
    *.bench*) row; printf 'Cases are\n\nthe table of %s\n' "$name" ;;
esac
"""
TIMEOUT = """#!/usr/bin/env bash
# All waiting is for two seconds.
while [ "${1#-}" != "$1" ]; do [ "$1" != -s ] || signal=$2; shift 2; done
shift
exec %s -s "${signal:-TERM}" -k 0.5 2 "$@"
"""
HANGS = "trap '' INT TERM; while :; do sleep 0.1; done"
GPU = "some versions\ncompute capability 9.0\n"


@pytest.fixture
def slot(tmp_path):
    """Runs gpu.sh in a folder; {step: what the Python then does} and arguments of the script."""
    for name, text in (("python", PYTHON), ("timeout", TIMEOUT % shutil.which("timeout")), ("about", GPU)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)

    def run(*arguments, does=None, about=GPU, seconds=0):
        (tmp_path / "about").write_text(about)
        for name in ("calls", "archives", "ahead", *STEPS):
            (tmp_path / name).unlink(missing_ok=True)
        for name, text in (does or {}).items():
            (tmp_path / name).write_text(text)
        known = dict(OUT=str(tmp_path / "out"), PYTHON=str(tmp_path / "python"), SECONDS=str(seconds))
        path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", str(ROOT / "bench" / "gpu.sh"), *arguments],
            env=dict(os.environ, **known, PATH=path),
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        calls = (tmp_path / "calls").read_text().splitlines() if (tmp_path / "calls").exists() else []
        return done, {line.partition(" ")[0]: line for line in calls}

    run.out = tmp_path / "out" / "results.tgz"
    run.folder = tmp_path
    return run


def held(archive):
    """{name: text} of the files in an archive."""
    with tarfile.open(archive) as kept:
        files = (member for member in kept.getmembers() if member.isfile())
        return {member.name.removeprefix("./"): kept.extractfile(member).read().decode() for member in files}


def test_each_step_has_its_turn_and_what_it_left_is_in_the_archive_before_the_next(slot):
    done, calls = slot("abc123", does={"tune": 'mkdir -p "$XDG_CACHE_HOME/fusedattn/tuning"; echo {} >"$_/a.json"'})
    assert done.returncode == 0 and done.stdout.splitlines()[-1].endswith("passed"), done.stdout + done.stderr
    assert tuple(calls) == STEPS
    for number, files in enumerate((slot.folder / "archives").read_text().splitlines()):
        for name in STEPS[:number]:
            assert f"./{name}.log" in files.split(), (name, STEPS[number])
    found = held(slot.out)
    assert found["done.txt"].split() == list(STEPS) and "tuned/fusedattn/tuning/a.json" in found
    assert all("the table of" in found[f"{name}.txt"] for name in STEPS if name not in (*TESTS, "tune", "check"))
    assert (slot.folder / "ahead").read_text().split() == [f"warm-{part}" for part in warm.PARTS]
    assert len(done.stdout) < 12_000 and [path.name for path in slot.out.parent.iterdir()] == ["results.tgz"]
    assert "the table of attention" in done.stdout and "first-contact: 1 passed, 0 failed" in done.stdout
    assert "matrix" not in calls["hopper-tests"]


def test_what_hangs_dies_or_fails_costs_itself_alone_and_a_second_slot_goes_on(slot):
    does = {
        "attention": f"row; {HANGS}",
        "hopper-tests": f"passes 1; {HANGS}",  # a kernel that waits for ever
        "tune": "kill -SEGV $$",
        "core-tests": 'passes 1; echo "tests/a.py::test_b FAILED [ 99%]"; exit 1',
        "decode": 'row; echo "the budget of 9 s is over" >&2',
        "varlen": 'row; [ "$(wc -l <"$file")" != 1 ] || exit 3',  # it broke the GPU, and a new process goes on
        "other-tests": "passes 1; passes 2; echo 'tests/a.py::test_c '; sleep 9",  # its time is over
        "options": "kill -KILL $$",
    }
    done, calls = slot(does=does)
    assert tuple(calls) == STEPS and done.returncode == 1, done.stdout + done.stderr
    said, found = done.stdout.splitlines(), held(slot.out)
    left = ["attention", "hopper-tests", "tune", "decode", "other-tests", "options"]
    assert said[-2].endswith(f"for another slot, with --resume: {' '.join(left)}")
    assert said[-1].endswith("FAILED: core-tests: 1 of its tests failed;tune: it ended with status 139")
    assert any("other-tests: time over, 2 passed, 0 failed" in line for line in said)
    assert any("hopper-tests: time over, 1 passed, 0 failed" in line for line in said)
    assert found["attention.csv"] == "attention\n" and found["varlen.csv"] == "varlen\n" * 2
    shutil.move(slot.out, slot.folder / "first.tgz")

    done, calls = slot("--resume", "first.tgz")
    assert list(calls) == left and done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].endswith("FAILED: core-tests: 1 of its tests failed")
    found = held(slot.out)
    assert set(found["done.txt"].split()) == set(STEPS) and "tune.failed" not in found
    assert found["attention.csv"] == "attention\n" * 2  # it went on in the same file
    assert found["other-tests.passed"].split() == [f"tests/a.py::test_other-tests[{n}]" for n in (1, 2, 1)]
    assert found["hopper-tests.passed"].split() == ["tests/a.py::test_hopper-tests[1]"] * 2


def test_a_folder_is_taken_up_too_and_one_of_another_machine_is_kept_beside(slot):
    slot(does={"check": "exit 1"})
    folder = slot.folder / "folder"
    with tarfile.open(slot.out) as kept:
        kept.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    done, calls = slot("--resume", "folder")
    assert list(calls) == ["check"] and done.returncode == 0, done.stdout + done.stderr
    done, calls = slot("--resume", "folder", about=GPU.replace("some", "other"))
    assert tuple(calls) == STEPS and "begun anew" in done.stdout and done.returncode == 0
    assert {"before/attention.csv", "before/check.failed", "attention.csv"} <= held(slot.out).keys()
    done, calls = slot("--resume", "nothing")
    assert done.returncode == 2 and not calls and "attention.csv" in held(slot.out)


def test_where_there_is_no_time_left_nothing_begins(slot):
    done, calls = slot(seconds=512)
    assert done.returncode == 0 and not calls
    assert f"for another slot, with --resume: {' '.join(STEPS)}" in done.stdout


def test_without_a_gpu_it_is_a_rehearsal(slot):
    skipped = "echo 'tests/a.py::test_a SKIPPED (no GPU) [100%]'; echo '== 1 skipped in 0.10s =='"
    done, calls = slot(about="no GPU\n", does=dict.fromkeys(TESTS, skipped) | {"tune": "exit 2"}, seconds=600)
    assert tuple(calls) == STEPS and done.returncode == 0, done.stdout + done.stderr
    assert held(slot.out)["done.txt"].split() == list(STEPS)


def test_another_gpu_has_no_kernel_for_hopper_to_test(slot):
    done, calls = slot(about=GPU.replace("9.0", "8.0"))
    assert tuple(calls) == tuple(name for name in STEPS if "hopper" not in name) and done.returncode == 0


def test_a_first_slot_is_in_time_and_tests_and_questions_are_there():
    script = SCRIPT.replace("\\\n", " ")
    timed = re.findall(r"^ *(?:XDG\S+ )?timings (\S+) (\S+) (\d+) (\d+)(.*)$", script, re.M)
    tested = re.findall(r"^ *(?:part=(\w+) )?run_tests (\S+) (\d+) (\d+) (\d+) (.*)$", script, re.M)
    seconds = {name: int(number) for name, _, number, *_ in timed} | {
        name: int(number) for _, name, number, *_ in tested
    }
    seconds |= {name: int(number) for name, number in re.findall(r"fusedattn (tune|check) (\d+) \d+", script)}
    assert set(seconds) == set(STEPS)
    limit = int(re.search(r"^limit=(\d+)", script, re.M).group(1))
    assert limit + 2 * 5 < 540 and sum(seconds[name] for name in FIRST) + 15 + 25 <= limit  # 25 s for what comes then
    assert all(name in questions.ASKS and int(margin) < int(end) - 5 for _, name, end, margin, _ in timed)
    assert [part for part, *_ in tested if part] == list(warm.PARTS)
    for _, name, number, kill, stuck, _ in tested:
        assert int(kill) == 5 and int(stuck) <= int(number), name
    for file in re.findall(r"tests/\S+\.py", script):
        assert (ROOT / file).exists()


def test_what_timings_need_is_compiled_ahead():
    every = warm.everything(True)
    ahead = {case._replace(B=0, Sq=0, Sk=0) for case, name in every if name == "fusedattn"}
    needed = cases.SMALL + cases.MODULE + cases.OPTIONS + cases.TABLES["all"] + cases.HOPPER
    assert {case._replace(B=0, Sq=0, Sk=0) for case in needed + cases.BACKWARD} <= ahead
    named = {name: {case for case, each in every if each == name} for name in (*warm.PACKED[1:], *warm.CACHES)}
    assert {case.words.get("lengths") for case in named["fusedattn+packed"]} == {None, "zipf", "uniform", "one-long"}
    assert named["flex+packed"] == set(cases.VARLEN)
    assert {case.Hkv for case in named["fusedattn:cache"]} == {case.Hkv for case in cases.DECODE}
    assert [name for _, name in warm.everything(True, "first")][0] == "fusedattn"
    assert [name.startswith("flex") for _, name in every] == sorted(name.startswith("flex") for _, name in every)


def test_what_gpu_sh_has_is_in_its_archive_whenever_it_ends(tmp_path):
    steps = """say first; echo a >"$OUT/a.csv"; say second; echo b >"$OUT/b.csv"; """
    head = SCRIPT.partition('say "an importable tree"')[0]
    for end, there in (("kill -KILL $$", {"a.csv"}), ("exit 1", {"a.csv", "b.csv"})):
        environment = dict(os.environ, OUT=str(tmp_path))
        ran = subprocess.run(["bash", "-c", head + steps + end], env=environment, capture_output=True, text=True)
        assert ran.returncode and "first" in ran.stdout and "second" in ran.stdout
        with tarfile.open(tmp_path / "results.tgz") as archive:
            names = {Path(member.name).name for member in archive.getmembers() if member.isfile()}
        assert names == {"steps.txt", *there} and [path.name for path in tmp_path.iterdir()] == ["results.tgz"]
