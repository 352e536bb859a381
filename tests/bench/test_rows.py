"""Tests the rows of the CSV, and the report and the plot made from them."""

import csv
from pathlib import Path

import pytest
from fusedattn.bench import plot, report, rows
from fusedattn.bench.cases import Case

RESULTS = Path(__file__).parents[2] / "bench" / "results"
CASE = Case(2, 4, 2, 40, 40, 16, 16, False, "float32")
COLUMNS = (
    "commit date gpu driver cuda torch triton python mode provider dtype B Hq Hkv Sq Sk D Dv causal options "
    "ms_p20 ms_p50 ms_p80 tflops gbps peak_mib err_max err_eager status"
).split()


def made(case, provider, ms=1.0, mode="forward", status="ok", spread=0.0, **columns):
    machine = dict.fromkeys(COLUMNS[:8], "x") | dict(gpu="cpu")
    times = dict(ms_p20=ms - spread, ms_p50=ms, ms_p80=ms + spread, tflops=1 / ms) if ms else {}
    return rows.row(machine, mode, provider, case, status, **times, **columns)


def test_rows_survive_the_file(tmp_path):
    path = tmp_path / "a.csv"
    for row in (
        made(CASE, "naive", 0.125, status="unsupported: it said:\n  no, never"),
        made(CASE._replace(options="window=3,0"), "naive", None),
    ):
        rows.create(path)
        rows.append(path, row)
    with open(path, "a") as file:
        file.write("abc,def")  # as if the benchmark was killed while writing
    rows.create(path)  # the next run begins a line of its own
    rows.append(path, made(CASE, "sdpa", 0.25))
    first, second, _ = rows.read(path)
    assert path.read_text().splitlines()[0].split(",") == COLUMNS
    assert first == made(CASE, "naive", 0.125, status="unsupported: it said: no, never")
    assert second.case == CASE._replace(options="window=3,0") and second.ms_p50 == "" and second.status == "ok"
    path.write_text("commit,date\n")
    for read in (rows.read, rows.create):
        with pytest.raises(ValueError, match="expected the columns"):
            read(path)


@pytest.mark.parametrize("path", sorted({*RESULTS.glob("*.csv")} - {RESULTS / "plans.csv"}), ids=lambda path: path.name)
def test_the_rows_that_are_kept_are_read(path):
    with open(path, newline="") as file:
        assert len(rows.read(path)) == len(list(csv.reader(file))) - 1 > 100


def test_the_rows_of_a_cpu_are_right():
    written = rows.read(RESULTS / "cpu.csv")
    assert all(row.status == "ok" for row in written) and len(report.groups(written)) > 50


def test_a_standing_is_of_cases_that_both_ran():
    others = [CASE._replace(causal=True), CASE._replace(Sq=64, Sk=64)]
    some = [made(CASE, "fusedattn:cpu", 1.0), made(CASE, "sdpa", 2.0), made(CASE, "naive", 3.0)]
    some += [made(others[0], "fusedattn:cpu", 4.0), made(others[0], "sdpa", 2.0)]
    some += [made(others[1], "fusedattn:cpu", 1.0, status="wrong"), made(others[1], "sdpa", 9.0)]
    assert [one[1:] for one in report.standings(some)] == [("sdpa", 2, 1.25, 0.5, 2.0), ("naive", 1, 3.0, 3.0, 3.0)]
    near = [made(CASE, "fusedattn", 1.0, spread=0.5), made(CASE, "sdpa", 1.2, spread=0.5)]
    assert "within noise" in "".join(report.lines(near))


def test_the_text_has_each_row_and_what_is_wrong():
    some = [
        made(CASE, "fusedattn:cpu", 1.0, err_max=3.6e-4),
        made(CASE, "sdpa", 2.0, status="wrong", err_max=0.0),
        made(CASE, "naive", None, status="oom"),
        made(CASE, "fusedattn:cpu", 1.0, "backward", "wrong: key: too far", err_max=float("nan")),
    ]
    lines = list(report.lines(some))
    text = "\n".join(lines)
    assert "FORWARD" in text and "BACKWARD" in text and lines.count(CASE.name) == 2
    (ours,) = (line for line in lines if line.startswith("  fusedattn:cpu") and line.endswith("ok"))
    (theirs,) = (line for line in lines if line.startswith("  sdpa"))
    assert "3.6e-04" in ours and "2.00x faster" in theirs and theirs.endswith("wrong")
    assert any(line.startswith("  naive") and "out of memory" in line for line in lines)
    assert any(line.startswith("  fusedattn:cpu") and line.endswith("wrong: key: too far") for line in lines)
    assert "1 of 2 results right" in text and "1 WRONG" in text and "1 of 1 results not right" in text
    assert report.wrong(some) == some[3:]


def test_a_figure_has_a_panel_a_kind_and_a_line_a_provider(tmp_path):
    pytest.importorskip("matplotlib")
    some = [
        made(CASE._replace(Sq=length, Sk=length, D=dim), name, length / 100)
        for length in (256, 128, 512)
        for dim in (16, 32, 48, 64, 80)
        for name in ("fusedattn:cpu", "sdpa")
    ]
    some.append(made(CASE._replace(Sq=1024, Sk=1024), "fusedattn:cpu", 1.0, status="wrong"))
    some.append(made(CASE._replace(Sq=1024, Sk=1024), "naive", None))
    some.append(made(CASE._replace(causal=True), "flex", 1.0))  # one length is too few for a line
    figure = plot.figure(some)
    assert len(figure.axes) == 5
    for axes in figure.axes:
        assert {line.get_label() for line in axes.lines} == {"fusedattn:cpu", "sdpa"}
        assert [*axes.lines[0].get_xdata()] == [128, 256, 512]
    with pytest.raises(ValueError, match="no row"):
        plot.figure(some[-2:-1])
