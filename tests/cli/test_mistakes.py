"""A user's mistake, or a disk that is full, is one line on stderr and an exit status of 2; never a traceback."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fusedattn.bench import rows

from fusedattn import cli

ONE = ["--shape", "1,1,1,8,8,8", "--providers", "fusedattn", "--mode", "forward"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Make a folder and files of no use, and work beside them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRITON_INTERPRET", os.environ.get("TRITON_INTERPRET", "0"))
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("no table\n")
    (tmp_path / "mine.png").write_text("no picture\n")


# A command, and what its one line says.
MISTAKES = [
    ([], "the following arguments are required: COMMAND"),
    (["nope"], "invalid choice: 'nope'"),
    (["info", "nope"], "fusedattn info: unrecognized arguments: nope (see fusedattn info --help)"),
    (["bench", "--shpe", "1"], "unrecognized arguments: --shpe 1 (see fusedattn bench --help)"),
    (["check", "--case", "nope"], "case: expected one of plain"),
    (["check", "--backend", "nope"], "backend: expected one of hopper"),
    (["check", "--dtype", "int8"], "argument --dtype: invalid choice: 'int8'"),
    (["bench", "--preset", "slow"], "argument --preset: invalid choice: 'slow'"),
    (["bench", "--preset", "quick", "--shape", "1,1,1,8,8,8"], "not allowed with argument --preset"),
    *(
        (["bench", "--shape", shape], "shape: expected ")
        for shape in ("", "1,2,3", "1,1,1,8,8,x", "1,1,1,8,8,1.5", "0,1,1,8,8,8", "1,-1,1,8,8,8", "1,3,2,8,8,8")
    ),
    (["bench", "--shape", "1,1,1,8,8,99999999999999999999"], "shape: expected sizes that some machine has memory for"),
    (["bench", "--shape", "1,1,1,2000000000,2000000000,8"], "shape: expected sizes that some machine has memory for"),
    (["bench", "--providers", "nope"], "providers: there is no 'nope'"),
    (["bench", "--mode", ""], "mode: there is no ''"),
    (["bench", *ONE, "--csv", "folder"], "csv: cannot append to folder"),
    (["bench", *ONE, "--csv", "file"], "csv: cannot append to file: file: expected the columns"),
    (["bench", *ONE, "--csv", "file/rows.csv"], "csv: cannot append to file/rows.csv"),
    (["bench", *ONE, "--csv", "/dev/full"], "csv: cannot append to /dev/full: /dev/full is no file"),
    (["bench", *ONE, "--plot", "folder"], "plot: folder is a folder"),
    (["bench", *ONE, "--plot", ""], "plot: expected the name of a file, got an empty one"),
    (["bench", *ONE, "--csv", ""], "csv: cannot append to it: an empty name is no file"),
    (["bench", *ONE, "--plot", "nowhere/bench.png"], "plot: there is no folder "),
    (["bench", *ONE, "--plot", "/dev/full"], "plot: expected a name that ends in .png, got /dev/full"),
    (["bench", *ONE, "--csv", "a.csv", "--plot", "a.csv"], "plot: expected a name that ends in .png, got a.csv"),
    (["bench", *ONE, "--csv", "a.png", "--plot", "a.png"], "plot: a.png is where the rows go"),
    (["bench", *ONE, "--csv", "nowhere/a.csv"], "csv: cannot append to nowhere/a.csv: there is no folder nowhere"),
    (["bench", *ONE, "--plot", "mine.png"], "plot: mine.png is there, and is no PNG that may be drawn over"),
    (["warmup"], "the following arguments are required: --shape"),
    (["warmup", "--shape", "1,1,1,8,8,8", "--jobs", "0"], "argument --jobs: expected 1 or more, got 0"),
]


@pytest.mark.parametrize("command, said", MISTAKES, ids=lambda x: " ".join(x) if isinstance(x, list) else "")
@pytest.mark.usefixtures("at_once", "one_thread")
def test_a_mistake_is_one_line(command, said, capsys):
    if "--plot" in command:
        pytest.importorskip("matplotlib")
    if "/dev/full" in command and not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full")
    try:
        status = cli.main(command)
    except SystemExit as exited:  # argparse
        status = exited.code
    shown = capsys.readouterr()
    assert status == 2
    assert shown.err.count("\n") == 1 and shown.err.startswith("fusedattn") and said in shown.err
    assert "folder" in os.listdir() and not os.listdir("folder")


@pytest.mark.usefixtures("at_once", "one_thread")
def test_a_disk_that_is_full_after_some_rows(monkeypatch, capsys):
    """What was measured until then is shown."""
    append = rows.Writer._append

    def full(self, values):
        if len(self.rows) == 2:
            raise OSError(28, "No space left on device")
        append(self, values)

    monkeypatch.setattr(rows.Writer, "_append", full)
    assert cli.main(["bench", *ONE, "--mode", "backward", "--csv", "rows.csv"]) == 2
    shown = capsys.readouterr()
    assert shown.err == "fusedattn bench: csv: cannot write rows.csv: No space left on device\n"
    assert "1 of 2 rows" in shown.out and len(rows.read("rows.csv")) == 1


@pytest.mark.usefixtures("at_once", "one_thread")
def test_files_that_exist_are_appended_to_and_drawn_over(capsys):
    pytest.importorskip("matplotlib")
    for number in (1, 2):
        assert cli.main(["bench", *ONE, "--csv", "rows.csv", "--plot", "a.png"]) == 0
        assert len(rows.read("rows.csv")) == number
        with open("a.png", "rb") as file:
            assert file.read(4) == b"\x89PNG"
    capsys.readouterr()


def test_a_disk_that_is_full_is_told_of_before_the_work(monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("tempfile.TemporaryFile", lambda **where: open("/dev/full", "wb"))
    assert cli.main(["bench", *ONE, "--plot", "a.png"]) == 2
    shown = capsys.readouterr()
    assert shown.err == "fusedattn bench: plot: cannot write a.png: No space left on device\n"
    assert not shown.out and not os.path.exists("a.png")


def run(*arguments, **options):
    return subprocess.Popen(
        [sys.executable, "-m", "fusedattn", *arguments], stderr=subprocess.PIPE, text=True, **options
    )


@pytest.mark.parametrize("arguments", [("info",), ("info", "--json"), ("--help",)], ids=" ".join)
def test_a_screen_that_takes_nothing(arguments):
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full")
    with open("/dev/full", "w") as full:
        command = run(*arguments, stdout=full)
        said = command.communicate(timeout=60)[1]
    assert command.returncode == 2
    assert said.count("\n") == 1 and said.startswith("fusedattn") and "No space left on device" in said


@pytest.mark.parametrize("arguments", [("info",), ("info", "--json"), ("--help",)], ids=" ".join)
def test_a_reader_that_has_gone(arguments):
    read, write = os.pipe()
    os.close(read)
    command = run(*arguments, stdout=write)
    os.close(write)
    assert command.communicate(timeout=60)[1] == "" and command.returncode == 141


def test_an_interrupt():
    """Ctrl-C during a measurement: the rows until then are shown, and no traceback."""
    heard = dict(preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))  # which a shell's `&` has ignored
    command = run("bench", "--csv", "rows.csv", stdout=subprocess.PIPE, **heard)
    until = time.monotonic() + 60
    while not (os.path.exists("rows.csv") and len(Path("rows.csv").read_text().splitlines()) > 2):
        assert time.monotonic() < until
        time.sleep(0.1)
    command.send_signal(signal.SIGINT)
    out, said = command.communicate(timeout=60)
    assert command.returncode == 130 and said == "", said
    assert "rows (" in out
