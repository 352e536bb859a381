"""`fusedattn bench`: what it measures, what it says of it, and its exit status."""

import functools
import json
import re
import sys

import pytest
import torch
from fusedattn.bench import cases, engine, providers, rows

import fusedattn as fa
from fusedattn import cli
from fusedattn.cli import bench, machine, screen
from fusedattn.cli.bench import presets

TINY = ["bench", "--shape", "1,2,1,24,40,16", "--providers", "fusedattn,naive,sdpa:math"]
SQUARE = ["bench", "--shape", "1,2,2,32,32,16", "--providers", "fusedattn,naive"]


@pytest.fixture(autouse=True)
def quick_on_the_cpu(monkeypatch):
    """Where kernels take seconds to compile, and where tiny steps wait for other threads, nothing is to be learned."""
    monkeypatch.setattr(presets, "device", lambda: "cpu")
    monkeypatch.setattr(bench, "BUDGET_MS", {"cpu": 0.1})
    monkeypatch.setattr(machine, "busy", lambda: False)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def answer(capsys, *arguments):
    """(exit status, the JSON a command printed)."""
    status = cli.main([*arguments, "--json"])
    return status, json.loads(capsys.readouterr().out)


def said(capsys, *arguments):
    """(exit status, what a command printed), with rich or without."""
    return cli.main(arguments), capsys.readouterr().out


def no_rich(monkeypatch):
    found = screen.importlib.util.find_spec
    monkeypatch.setattr(screen.importlib.util, "find_spec", lambda name: None if name == "rich" else found(name))


def times_too_large(case, tensors):
    return lambda query, key, value: fa.attention(query, key, value, causal=case.causal) * 1.01


def too_large(case, tensors):
    raise torch.OutOfMemoryError("too much")


def test_json_has_every_row_and_the_verdict(capsys):
    status, found = answer(capsys, *TINY, "--dtype", "float32", "--dtype", "bfloat16")
    assert status == 0 and found["ok"] and found["complete"] and found["device"] == "cpu" and found["preset"] is None
    assert len(found["rows"]) == 2 * 3 * 2
    for row in found["rows"]:
        assert set(row) == {*rows.COLUMNS, "why"} and row["status"] == "ok" and row["why"] == ""
        assert (row["B"], row["Hq"], row["Hkv"], row["Sq"], row["Sk"], row["D"], row["causal"]) == (
            1,
            2,
            1,
            24,
            40,
            16,
            0,
        )
        assert row["ms_p50"] > 0 and row["tflops"] > 0 and row["peak_mib"] is None and row["err_max"] >= 0
    named = [(row["dtype"], row["provider"], row["mode"]) for row in found["rows"]]
    assert named[:3] == [
        ("float32", "fusedattn:cpu", "forward"),
        ("float32", "fusedattn:cpu", "backward"),
        ("float32", "naive", "forward"),
    ]
    assert named[-1] == ("bfloat16", "sdpa:math", "backward")
    assert found["versions"]["torch"] == torch.__version__
    assert all(0 < row["ms_min"] <= row["ms_p20"] for row in found["rows"])
    by = found["verdict"]["by"]  # a machine that is disturbed may not be asked for less
    times = {(row["dtype"], row["mode"], row["provider"]): row[by] for row in found["rows"]}
    for one in found["verdict"]["each"]:
        ratios = [times[d, one["mode"], one["other"]] / times[d, one["mode"], "fusedattn:cpu"] for d in cli.DTYPES[1:3]]
        assert (one["least"], one["most"]) == pytest.approx((min(ratios), max(ratios)))
        assert one["median"] == pytest.approx(sum(ratios) / 2) and one["cases"] == 2
    assert [(one["mode"], one["other"]) for one in found["verdict"]["each"]] == [
        (mode, other) for mode in ("forward", "backward") for other in ("naive", "sdpa:math")
    ]


@pytest.mark.parametrize("rich", [True, False], ids=["rich", "plain"])
def test_in_words(rich, capsys, monkeypatch):
    if rich:
        pytest.importorskip("rich")
    else:
        no_rich(monkeypatch)
    status, shown = said(capsys, *TINY, "--causal", "--mode", "forward", "--providers", "sdpa:flash")
    lines = shown.splitlines()
    assert status == 0 and lines[0].startswith("1 case x 4 providers x 1 mode on the CPU, 1 thread, torch ")
    case = lines.index("1,2,1,24,40,16 causal fp32")
    assert all(word in lines[case - 1] for word in ("FORWARD", "ms", "GFLOP/s", "fusedattn is", "error"))
    under = {line.split()[0]: line for line in lines[case + 1 : case + 5]}
    assert list(under) == ["fusedattn:cpu", "naive", "sdpa:math", "sdpa:flash"]
    assert all("\u2713" in under[name] for name in ("fusedattn:cpu", "naive"))
    numbers, beside, right = (
        r"( +[0-9.]+){2}",
        r" +([0-9.]+x (fast|slow)er|as fast|within noise)",
        r" +[0-9.]+e-\d \u2713.*",
    )
    assert re.fullmatch(f"  naive{numbers}{beside}{right}", under["naive"])
    assert "its causal mask is aligned to the top left" in under["sdpa:math"] and "\u2713" not in under["sdpa:math"]
    assert sum("fastest" in line for line in under.values()) == 1
    assert "fusedattn: 1 of 1 result right" in shown and "2 of 4 could not be measured" in shown
    assert "this says nothing about its kernels" in shown
    assert max(map(len, lines[case : case + 3])) < 80


def test_a_terminal_that_cannot_write_a_tick_reads_ok(capsys, monkeypatch):
    class Ascii:
        encoding = "ascii"

    monkeypatch.setattr(sys, "stdout", Ascii())
    assert screen.tick() == "ok"


def test_a_result_of_ours_that_is_wrong_fails(capsys, monkeypatch):
    monkeypatch.setitem(providers.PROVIDERS, "fusedattn", times_too_large)
    status, found = answer(capsys, *SQUARE)
    ours = [row for row in found["rows"] if row["provider"].startswith("fusedattn")]
    assert status == 1 and not found["ok"] and [row["status"] for row in ours] == ["wrong", "wrong"]
    assert all("its largest error is" in row["why"] for row in ours)
    assert found["verdict"]["each"] == []  # fast and wrong is no ratio
    status, shown = said(capsys, *SQUARE, "--mode", "forward")
    (line,) = (line for line in shown.splitlines() if line.startswith("  fusedattn:cpu"))
    assert status == 1 and line.endswith("FAIL") and "FAIL fusedattn:cpu, forward, 1,2,2,32,32,16 fp32: out: " in shown
    assert "0 of 1 result right" in shown and "1 WRONG" in shown and "nothing to compare" in shown


def test_a_peer_that_is_wrong_is_shown_and_is_a_peer(capsys, monkeypatch):
    monkeypatch.setitem(providers.PROVIDERS, "naive", times_too_large)
    status, found = answer(capsys, *SQUARE)
    assert status == 0 and found["ok"]
    assert [row["status"] for row in found["rows"]] == ["ok", "ok", "wrong", "wrong"]
    assert [one["other"] for one in found["verdict"]["each"]] == ["naive", "naive"]
    assert any(line.startswith("Others: 2 of 2 results not right") for line in found["verdict"]["text"])


def test_out_of_memory_is_a_row(capsys, monkeypatch):
    monkeypatch.setitem(providers.PROVIDERS, "naive", too_large)
    status, found = answer(capsys, *SQUARE)
    assert status == 0 and [row["status"] for row in found["rows"]] == ["ok", "ok", "oom", "oom"]
    assert found["rows"][2]["ms_p50"] is None
    _, shown = said(capsys, *SQUARE, "--mode", "backward")
    assert "  naive           out of memory" in shown and "backward: nothing to compare" in shown


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("much"), RuntimeError("DefaultCPUAllocator: can't allocate memory")]
)
def test_a_case_too_large_to_draw_is_rows_and_the_next_one_is_measured(error, capsys, monkeypatch):
    draw = cases.Case.draw

    def small_ones(case, device):
        if case.Sq == 32:
            raise error
        return draw(case, device)

    monkeypatch.setattr(cases.Case, "draw", small_ones)
    status, found = answer(capsys, *SQUARE, "--shape", "1,2,2,16,16,16", "--mode", "forward")
    assert [(row["Sq"], row["status"]) for row in found["rows"]] == [(32, "oom"), (32, "oom"), (16, "ok"), (16, "ok")]
    assert status == 0 and found["verdict"]["each"][0]["cases"] == 1


def test_a_cpu_says_that_memory_is_out():
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**50)
    assert engine.out_of_memory(raised.value) and not engine.out_of_memory(RuntimeError("shape"))


def test_what_was_measured_before_an_interruption_is_shown(capsys, monkeypatch):
    def interrupted(case, tensors):
        raise KeyboardInterrupt

    monkeypatch.setitem(providers.PROVIDERS, "naive", interrupted)
    status, found = answer(capsys, *SQUARE)
    assert status == 130 and not found["complete"] and len(found["rows"]) == 2


@pytest.mark.parametrize(
    "arguments, why",
    [
        (
            ["--providers", "fusedattn,sdpa:flush,nobody"],
            "providers: there is no 'sdpa:flush', 'nobody'; there are fusedatt",
        ),
        (["--providers", "fusedattn:cuda"], "providers: there is no 'fusedattn:cuda'; there"),
        (["--mode", "forward,sideways"], "mode: there is no 'sideways'; there are forward, backward, forward_backward"),
        (["--shape", "1,2,3"], "shape: expected six whole numbers B,Hq,Hkv,Sq,Sk,D, got 1,2,3"),
        (["--shape", "1,2,2,8,8,x"], "shape: expected six whole numbers"),
        (["--shape", "1,2,2,0,8,8"], "shape: expected 1 or more of each"),
        (["--shape", "1,3,2,8,8,8"], "shape: expected Hq to be a multiple of Hkv"),
        (["--plot", "no/such/folder/a.png"], "plot: there is no folder"),
        (["--csv", "{other}"], "csv: cannot append to"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_options_that_do_not_fit_are_one_line(arguments, why, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    assert cli.main(["bench", "--json", *(one.format(other=tmp_path / "other.csv") for one in arguments)]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith(f"fusedattn bench: {why}") and shown.err.count("\n") == 1 and shown.out == ""


def test_help(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "--help"])
    shown = capsys.readouterr().out
    options = ("--preset", "--shape", "--dtype", "--causal", "--mode", "--providers", "--csv", "--json", "--plot")
    assert ended.value.code == 0 and all(option in shown for option in options)


def test_argparse_refuses_a_preset_beside_a_shape(capsys):
    for arguments in (["--preset", "quick", "--shape", "1,1,1,8,8,8"], ["--preset", "slow"], ["--dtype", "int8"]):
        with pytest.raises(SystemExit) as ended:
            cli.main(["bench", *arguments])
        assert ended.value.code == 2


def test_rows_are_appended_and_drawn(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path, picture = tmp_path / "a.csv", tmp_path / "a.png"
    for count in (4, 8):
        status, found = answer(capsys, *SQUARE, "--csv", str(path), "--plot", str(picture))
        assert status == 0 and found["csv"] == str(path) and found["picture"] == str(picture)
        assert len(rows.read(path)) == count and len(found["rows"]) == 4  # of this run
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_nothing_measured_is_no_picture(tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setitem(providers.PROVIDERS, "naive", too_large)
    command = ["bench", "--shape", "1,2,2,32,32,16", "--providers", "naive", "--plot", str(tmp_path / "a.png")]
    assert answer(capsys, *command)[1]["picture"] is None and not (tmp_path / "a.png").exists()
    assert "a.png is not drawn" in "".join(said(capsys, *command)[1].split("\n"))


def chosen(*arguments, on_gpu=False):
    return presets.choose(cli._parser().parse_args(["bench", *arguments]), on_gpu)


def test_presets():
    quick, on_gpu = chosen(), chosen(on_gpu=True)
    assert quick == chosen("--preset", "quick") and quick.modes == ["forward", "backward"]
    assert {case.dtype for case in quick.cases} == {"float32", "bfloat16"} and "sdpa" in quick.providers
    assert {(case.D, case.causal) for case in on_gpu.cases} == {(64, True), (64, False), (128, True), (128, False)}
    assert {case.Sq for case in on_gpu.cases} == {512, 2048, 8192} and {case.dtype for case in on_gpu.cases} == {
        "bfloat16"
    }
    assert all(case.B * case.Sq == 16384 and case.Hq * case.D == 2048 for case in on_gpu.cases)
    paper, full = chosen("--preset", "paper", on_gpu=True), chosen("--preset", "full", on_gpu=True)
    assert (
        paper.cases == cases.LONG and paper.modes == list(engine.MODES) and paper.providers == providers.usual("cuda")
    )
    assert set(full.cases) == {*cases.LONG, *cases.MORE, *cases.OPTIONS}
    assert chosen("--preset", "paper").providers == ["fusedattn", "sdpa"]  # what no CPU has the memory for is left out
    for name in ("quick", "paper", "full"):
        for gpu in (True, False):
            for provider in chosen("--preset", name, on_gpu=gpu).providers:
                providers.find(provider)


def test_modules_are_timed_where_nothing_else_is_asked_for_or_they_are():
    assert len(chosen().modules) == 1 and not chosen("--providers", "naive").modules
    alone = chosen("--providers", "torch.nn", "--shape", "1,2,2,8,8,4", "--shape", "1,2,1,8,8,4")
    assert (
        [case._replace(options="") for case in alone.modules] == alone.cases[:1]
        and not alone.providers
        and not chosen("--shape", "1,2,2,8,8,4").modules
    )
    with pytest.raises(screen.Problem, match=r"^providers: torch\.nn needs"):
        chosen("--providers", "torch.nn", "--shape", "1,2,2,8,9,4")
    for modes in ("forward", "backward", "forward_backward,forward"):
        preset = chosen("--providers", "torch.nn", "--shape", "1,2,2,8,8,4", "--dtype", "float32", "--mode", modes)
        found = list(engine.measure(rows.machine("cpu"), presets.units(preset), "cpu", 0.1))
        assert len(found) == len(presets.units(preset)) == {"forward": 4, "backward": 3}.get(modes, 7)
        assert {row.status for row, _ in found} == {"ok"} and {row.options for row, _ in found} == {"module"}
        assert {"torch.nn", "fusedattn:cpu", "fusedattn.compat:cpu"} <= {row.provider for row, _ in found}


def test_options_narrow_a_preset():
    assert all(case.causal for case in chosen("--causal").cases)
    narrowed = chosen("--dtype", "float16", "--preset", "paper", "--mode", "forward,backward", "--mode", "backward")
    assert {case.dtype for case in narrowed.cases} == {"float16"} and narrowed.modes == ["forward", "backward"]
    assert len(narrowed.cases) == len(set(narrowed.cases)) == len(cases.LONG) // 2
    twice = chosen(
        "--shape", "1,4,2,8,16,32", "--causal", "--dtype", "float32", "--dtype", "float16", "--providers", "naive"
    )
    expected = cases.Case(1, 4, 2, 8, 16, 32, 32, True, "float32")
    assert twice.cases == [expected, expected._replace(dtype="float16")] and twice.providers == ["naive"]
    assert chosen("--shape", "1,4,2,8,16,32", on_gpu=True).cases[0].dtype == "bfloat16"


def test_a_busy_cpu_is_timed_by_one_thread(capsys, monkeypatch):
    monkeypatch.setattr(machine, "busy", lambda: True)
    torch.set_num_threads(2)
    _, shown = said(capsys, *SQUARE, "--mode", "forward")
    assert "on the CPU, 1 thread," in shown and "Other work keeps this machine busy" in shown
    torch.set_num_threads(2)
    _, found = answer(capsys, *SQUARE, "--mode", "forward")
    assert found["threads"] == 1 and found["verdict"]["by"] == "ms_min"


def test_sdpa_as_torch_chooses_is_a_provider():
    case = cases.Case(1, 2, 2, 16, 16, 16, 16, True, "float32")
    tensors = case.draw("cpu")
    got = providers.find("sdpa")(case, tensors)(*tensors.inputs)
    want = functools.partial(torch.nn.functional.scaled_dot_product_attention, is_causal=True)(*tensors.inputs)
    assert torch.equal(got, want)


def test_a_gpu_that_broke_down_ends_the_run(capsys, monkeypatch):
    def broken(case, tensors):
        raise RuntimeError("CUDA error: an illegal memory access\nadvice")

    monkeypatch.setitem(providers.PROVIDERS, "naive", broken)
    assert cli.main(["bench", *SQUARE[1:], "--mode", "forward"]) == 2
    shown = capsys.readouterr()
    assert shown.err.endswith("the GPU broke down: RuntimeError: CUDA error: an illegal memory access\n")
    assert "fusedattn: 1 of 1 result right" in shown.out
