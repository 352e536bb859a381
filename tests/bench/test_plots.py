"""The pictures of benchmarks: which lines stand in which panel, at which numbers, under which labels."""

import io
import sys

import pytest
from fusedattn.bench import cases, cost, plots, rows
from fusedattn.bench.cases import Case
from fusedattn.bench.dev import questions

matplotlib = pytest.importorskip("matplotlib")

MACHINE = dict.fromkeys(rows.COLUMNS[:8], "x") | dict(
    gpu="a GPU", torch="2.13", triton="3.6", date="2026-01-02T03:04:05Z"
)
SPEEDS = {"fusedattn:triton": 300.0, "sdpa:flash": 200.0, "naive": 20.0}  # made up, TFLOP/s at a length of 1024
CEILINGS = dict(matmul_tflops=640.0, copy_gbps=2900.0)


def made(case, provider, speed, mode="forward", **columns):
    ms = cost.flops(case, mode) / speed / 1e9
    numbers = dict(ms_p50=ms, tflops=speed, gbps=cost.moved(case, mode) / ms / 1e6) | columns
    return rows.row(MACHINE, mode, provider, case, **numbers)


def square(length, causal=True, dtype="bfloat16", **sizes):
    return Case(4, 16, 16, length, length, 64, 64, causal, dtype)._replace(**sizes)


def some_rows(modes=("forward", "backward"), **columns):
    chosen = [square(length, causal) for length in (2048, 512, 1024) for causal in (True, False)]
    return [
        made(case, name, speed * case.Sq / 1024, mode, **columns)
        for case in chosen
        for mode in modes
        for name, speed in SPEEDS.items()
    ]


def panels(figure):
    return {axes.get_title().replace("\n", " "): axes for axes in figure.axes}


def lines(axes):
    """{label: [(x, y)]} of what is drawn."""
    return {line.get_label(): list(zip(*line.get_data(), strict=True)) for line in axes.lines if len(line.get_xdata())}


def ticks(axis):
    return [tick.label1.get_text() for tick in axis.get_major_ticks()]


def test_a_line_a_provider_in_a_panel_a_mode_and_kind():
    figure = plots.speed(some_rows())
    found = panels(figure)
    kinds = ["bf16, d64, causal", "bf16, d64, full"]
    assert list(found) == [f"{mode}, {kind}" for mode in ("forward", "backward") for kind in kinds]
    for axes in found.values():
        want = {
            name: [(s, pytest.approx(speed * s / 1024)) for s in (512, 1024, 2048)] for name, speed in SPEEDS.items()
        }
        assert lines(axes) == want
        assert axes.get_xlabel() == "sequence length" and axes.get_ylabel() == "TFLOP/s"
        assert axes.get_xscale() == "log" and ticks(axes.xaxis) == ["512", "1k", "2k"]
        low, high = axes.get_ylim()
        assert low == 0 and high > 600
    assert figure.get_suptitle() == "Attention on a GPU, torch 2.13, triton 3.6, 2026-01-02"
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == list(SPEEDS)


def test_a_provider_looks_the_same_everywhere():
    few, many = some_rows(), some_rows() + [made(square(512), name, 9.0) for name in ("flex", "fusedattn:cpu", "new")]
    styles = [
        {
            line.get_label(): (line.get_color(), line.get_marker())
            for axes in plots.draw(some).axes
            for line in axes.lines
        }
        for some in (few, many)
    ]
    assert all(styles[1][name] == style for name, style in styles[0].items())
    assert len(set(styles[1].values())) == len(styles[1]) - 1  # those of ours share theirs
    assert styles[1]["fusedattn:cpu"] == styles[1]["fusedattn:triton"]
    axes = plots.speed(many).axes[0]
    mine = [line for line in axes.lines if line.get_label().startswith("fusedattn")]
    assert {(line.get_linestyle(), line.get_fillstyle()) for line in mine} == {("-", "full"), ("--", "none")}


def test_every_provider_there_is_can_be_told_from_the_others():
    names = [*plots.providers.PROVIDERS, *plots.providers.ASIDE, *"abcdefgh"]
    styles = plots._styles(names)
    looks = {(one["color"], one["marker"], one["linestyle"]) for one in styles.values()}
    assert set(styles) == set(names) and len(looks) == len(names)


def test_the_roofline_has_the_ceilings_that_were_measured():
    some = some_rows(**CEILINGS)
    found = panels(plots.roofline(some))
    assert list(found) == ["roofline: forward, bf16", "roofline: backward, bf16"]
    for mode, axes in zip(("forward", "backward"), found.values(), strict=True):
        drawn = lines(axes)
        ceiling = drawn.pop("ceilings")
        for x, y in ceiling:
            assert y == pytest.approx(min(640.0, 2.9 * x))
        assert ceiling[1] == pytest.approx((640 / 2.9, 640))
        for name, points in drawn.items():
            own = [row for row in some if row.provider == name and row.mode == mode]
            ratio = {row: cost.flops(row.case, mode) / cost.moved(row.case, mode) for row in own}
            assert points == [(pytest.approx(ratio[row]), row.tflops) for row in own]
            (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
            assert all(left < x < right and low < y < high for x, y in points)
        assert [text.get_text().strip() for text in axes.texts] == ["copy 2,900 GB/s", "products 640 TFLOP/s"]
        assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
        assert axes.get_xlabel() == "operations a byte" and axes.get_ylabel() == "TFLOP/s"
    for axes in plots.roofline(some_rows()).axes:
        assert set(lines(axes)) == set(SPEEDS) and not axes.texts


def test_both_are_in_one_picture_that_can_be_saved():
    figure = plots.draw(some_rows(**CEILINGS))
    assert len(panels(figure)) == 6 and len(figure.legends) == 1
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=40)
    assert content.getvalue().startswith(b"\x89PNG")


def test_what_has_no_speed_or_is_ours_and_wrong_is_not_drawn():
    case, machine = square(512), MACHINE | dict(date="2025")
    some = [
        rows.row(machine, "forward", "flex", case, tflops=5.0, gbps=1.0),  # of a run before
        made(case, "fusedattn:triton", 900.0, status="wrong"),
        made(case, "sdpa:flash", 30.0, status="wrong"),
        rows.row(MACHINE, "forward", "naive", case, status="oom"),
    ]
    (axes,) = plots.speed(some).axes
    assert lines(axes) == {"sdpa:flash": [(512, 30.0)]}
    for nothing in ([], some[-1:]):
        with pytest.raises(ValueError, match="no row with a speed"):
            plots.draw(nothing)


def test_slow_ones_are_in_smaller_units():
    axes, _ = plots.draw([made(square(512), "naive", 0.05, **CEILINGS)]).axes
    assert axes.get_ylabel() == "GFLOP/s" and lines(axes) == {"naive": [(512, pytest.approx(50.0))]}


def test_what_differs_is_another_panel():
    others = [
        square(512, dtype="float16"),
        square(512, D=128, Dv=128),
        square(512, D=192),
        square(512, Hkv=2),
        square(512, Sq=128),
        square(512, options="window=64,0"),
        square(512, B=8),
    ]
    figure = plots.speed([made(case, "naive", 5.0) for case in (square(512), *others)])
    assert list(panels(figure)) == [
        "forward, bf16, d64, causal, batch 4",
        "forward, fp16, d64, causal",
        "forward, bf16, d128, causal",
        "forward, bf16, d192-64, causal",
        "forward, bf16, d64, causal, gqa8",
        "forward, bf16, d64, causal, 128 queries",
        "forward, bf16, d64, causal, window=64,0",
        "forward, bf16, d64, causal, batch 8",
    ]
    grown = [made(square(length, B=4096 // length), "naive", 5.0) for length in (512, 1024)]
    assert list(panels(plots.speed(grown))) == ["forward, bf16, d64, causal"]  # as many tokens: one line


def test_the_largest_table_fits():
    """No two panels in one place, and each mode on a line of its own."""
    everything = cases.TABLES["all"] + cases.OPTIONS
    figure = plots.speed([made(case, "naive", 5.0, mode) for case in everything for mode in ("forward", "backward")])
    places = [axes.get_subplotspec().num1 for axes in figure.axes]
    assert len(set(places)) == len(places) == len({plots.kind(case) for case in everything}) * 2
    first = next(axes for axes in figure.axes if axes.get_title().startswith("backward"))
    assert first.get_subplotspec().colspan.start == 0


def test_from_a_file(tmp_path, capsys):
    writer = rows.Writer(tmp_path / "a.csv")
    for row in some_rows(**CEILINGS):
        writer.write(row)
    assert questions.main(["plots", str(writer.path), "--out", str(tmp_path / "a.png")]) == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "b.csv").write_text("a,b\n")
    for name, why in (("b.csv", "expected the columns"), ("none.csv", "No such file")):
        with pytest.raises(SystemExit) as ended:
            questions.main(["plots", str(tmp_path / name), "--out", str(tmp_path / "b.png")])
        assert ended.value.code == 2 and why in capsys.readouterr().err


def test_without_matplotlib_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install 'fusedattn\\[plot\\]'"):
        plots.draw(some_rows())
