"""The question what a CPU user gets: what is measured beside what, in turns, whether it is right, and what is asked."""

import functools
import time
from types import SimpleNamespace

import pytest
import torch
from fusedattn.bench import calls, cases, cpu, engine, module, peers, plots, providers, report, rows, timing
from fusedattn.bench.cpu import PARTS, SIZES

import fusedattn as fa
from fusedattn import cli
from fusedattn.cli import machine
from fusedattn.cli.bench import presets

from ..close import assert_like
from .test_bench import made
from .test_questions import ask

pytestmark = pytest.mark.usefixtures("one_thread")
MEMORY = PARTS[-1]
TINY = [part for part in SIZES["tiny"] if part.value is not cpu.memory_over]


@pytest.fixture
def quickly(monkeypatch):
    """Where it is not asked how long a step takes, nor how much memory."""

    def in_turns(steps, budget_ms):
        return {name: (timing.Times(1.0, 2.0, 3.0, 1.0), 5.0) for name in steps}

    monkeypatch.setattr(timing, "in_turns", in_turns)
    monkeypatch.setitem(SIZES, "tiny", TINY)


def spin(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def test_every_part_is_measured_and_right_and_says_what_is_asked(tmp_path, quickly, capsys):
    pytest.importorskip("transformers")
    found = ask("cpu", tmp_path / "a.csv", "--size", "tiny")
    assert len(found) == len(cpu.units(TINY, (1,))) == len({(row.case, row.provider, row.mode) for row in found})
    assert {row.status for row in found if report.is_ours(row)} == {"ok"}
    assert {(row.ms_min, row.ms_p50, row.ms_wall, row.peak_mib) for row in found} == {(1.0, 2.0, 5.0, "")}
    assert all("threads=1" in row.options.split() for row in found)
    shown = capsys.readouterr().out
    for part in TINY:
        for goal in part.goals():
            (line,) = (line for line in shown.splitlines() if line.startswith(f"goal {goal.said} <= {part.ask:g}: "))
            assert "not measured" not in line, line
    assert "wall the caller's" in shown and "      wall" in shown


def test_what_is_asked_of_a_cpu():
    """The numbers of the issue, in each part and mode."""
    asked = {part.said.partition(",")[0]: part.ask for part in PARTS}
    assert asked == {
        "float32": 1.1,
        "bfloat16": 1.1,
        "a mask": 1.1,
        "half of the keys padding": 0.75,
        "a window": 0.6,
        "packed": 0.9,
        "decode less 40 us": 1.15,
        "Llama's prefill": 1.1,
        "a module": 1.05,
        "a converted encoder": 1.05,
        "us that a call takes more than one of sdpa": 25.0,
        "memory added": 1.5,
    }
    every = {case for part in PARTS for case in part.cases}
    assert {case.Sq for case in PARTS[0].cases} == {128, 256, 512, 1024, 2048, 4096}
    assert len(every) == sum(len(part.cases) for part in PARTS), "a goal would count a case of another part"


def test_a_value_is_of_ours_over_its_peer():
    def value(number, **milliseconds):
        case = PARTS[number].cases[0]
        threads = case._replace(options=f"{case.options} threads=2".strip())
        some = [made(threads, name.replace("_", ":"), ms=ms) for name, ms in milliseconds.items()]
        (line, *_) = (goal.line(some) for goal in PARTS[number].goals())
        return line.partition(": ")[2]

    name = {part.said.partition(",")[0]: number for number, part in enumerate(PARTS)}
    assert value(0, fusedattn_cpu=3.0, sdpa=2.0, naive=1.0).startswith("met in 0 of 1 case, median 1.500")
    assert value(0, fusedattn_cpu=2.0, sdpa=2.0).startswith("met in 1 of 1 case, median 1.000")
    tokens = made(PARTS[name["decode less 40 us"]].cases[0], "x").case
    rows_of = [made(tokens, "fusedattn:cache", ms=0.27), made(tokens, "sdpa+slice", ms=0.2)]
    assert cpu.over_slice(tokens, rows_of) == pytest.approx((0.27 - 0.04) / 0.2)
    call = [made(cases.CPU_CALL[0], "fusedattn:cpu", ms=0.03), made(cases.CPU_CALL[0], "sdpa", ms=0.01)]
    assert cpu.microseconds_more(cases.CPU_CALL[0], call) == pytest.approx(20.0)
    held = [
        made(MEMORY.cases[0], each, peak_mib=mib, status="unchecked: x")
        for each, mib in (("fusedattn:cpu", 12), ("sdpa", 8))
    ]
    assert cpu.memory_over(MEMORY.cases[0], held) == 1.5
    assert cpu.memory_over(MEMORY.cases[0], held[:1]) is None
    assert value(name["us that a call takes more than one of sdpa"], sdpa=1.0) == "not measured"


def test_turns_are_of_cpu_time_and_alternate(monkeypatch):
    called = []

    def slow():
        called.append("slow")
        spin(8e-3)

    def waits():
        called.append("waits")
        time.sleep(6e-3)

    found = timing.in_turns({"slow": slow, "waits": waits}, budget_ms=1.0)
    assert called == ["slow", "waits"] * timing.FEWEST_TURNS
    (spun, _), (slept, wall) = found["slow"], found["waits"]
    assert 8.0 <= spun.p20 <= spun.p50 <= spun.p80 < 30.0
    assert slept.p50 < 2.0 and wall >= 6.0  # what waits takes no CPU


def test_a_turn_of_a_quick_step_is_many_calls(monkeypatch):
    called = []  # each takes 20 us by a clock that nothing else advances
    clock = SimpleNamespace(perf_counter_ns=lambda: 20_000 * len(called), process_time_ns=lambda: 10_000 * len(called))
    monkeypatch.setattr(timing, "time", clock)
    found = timing.in_turns({"quick": lambda: called.append(1)}, budget_ms=timing.TURN_MS * 3)
    of_a_turn = int(timing.TURN_MS / 20e-3)
    assert len(called) > 2 * of_a_turn and found["quick"][0].p50 == 0.01 and found["quick"][1] == 0.02


def test_threads_are_set_and_given_back(monkeypatch):
    seen = []
    attend = fa.attention

    def watched(*inputs, **options):
        seen.append(torch.get_num_threads())
        return attend(*inputs, **options)

    monkeypatch.setattr(fa, "attention", watched)
    work = cpu.units([TINY[0]._replace(cases=TINY[0].cases[:1], names=["fusedattn"])], (1, 2))
    found = [row for row, _ in cpu.measure(rows.machine("cpu"), work, "cpu", 1.0)]
    assert [row.case.words["threads"] for row in found] == ["1", "1", "2", "2"]
    assert [row.mode for row in found] == [*cpu.BOTH] * 2 and set(seen) == {1, 2}
    assert torch.get_num_threads() == 1
    monkeypatch.setattr(cpu, "cores", lambda: 1)
    assert cpu.threads("full") == (1,) == cpu.threads("quick")
    monkeypatch.setattr(cpu, "cores", lambda: 8)
    assert cpu.threads("full") == (1, 2)


def test_the_formula_and_flex_are_timed_where_they_can_be():
    work = cpu.units(PARTS, (1, 2))
    of = {
        name: {(c.Sq, c.words["threads"], m) for c, each, m in work if each.startswith(name)}
        for name in ("naive", "flex")
    }
    assert {count for _, count, _ in of["naive"]} == {"1"} and max(length for length, *_ in of["naive"]) == 2048
    assert {(count, mode) for _, count, mode in of["flex"]} == {("1", "forward")}
    lengths = [case.Sq for case, *_ in work if "memory" not in case.words]
    assert lengths[-32:] == [4096] * 32 and 2048 in lengths[-64:-32] and max(lengths[:-80]) == 1024
    assert not any(each.startswith("flex") for size in ("quick", "tiny") for _, each, _ in cpu.units(SIZES[size], (1,)))


@pytest.mark.parametrize("part", [2, 3, 4, 5], ids=lambda number: TINY[number].said)
def test_a_wrong_answer_is_found(part, quickly, monkeypatch):
    attend = {
        "attention": fa.attention,
        "attention_varlen": fa.attention_varlen,
        "attention_decode": fa.attention_decode,
    }
    for name, function in attend.items():
        monkeypatch.setattr(fa, name, lambda *x, function=function, **options: 1.02 * function(*x, **options))
    found = list(cpu.measure(rows.machine("cpu"), cpu.units([TINY[part]], (1,)), "cpu", 1.0))
    assert {row.status for row, _ in found if report.is_ours(row)} == {"wrong"}
    assert all(why for row, why in found if report.is_ours(row))


@pytest.mark.parametrize("model", [module.Encoder, module.Llama])
def test_a_wrong_model_is_found(model, monkeypatch):
    if model is module.Llama:
        pytest.importorskip("transformers")
    (part,) = (part for part in TINY if module.MODELS.get(part.cases[0].words.get("model")) is model)
    workload = engine.prepare(part.cases[0], "cpu")
    assert type(workload) is model
    for mode in part.modes:
        for name in part.names:
            provider = workload.setup(name)
            with workload.step(mode, provider) as step:
                result = step()
            assert workload.judge(mode, provider, result)[2] == ""
            off = tuple(1.01 * x for x in result) if isinstance(result, tuple) else 1.01 * result
            assert workload.judge(mode, provider, off)[2]
    label = workload.label(part.names[0])
    assert label.startswith(f"{part.names[0]}:") and workload.label(part.names[1]) == part.names[1]


def test_what_a_machine_lacks_is_rows(monkeypatch, quickly):
    def missing():
        raise ImportError("no module")

    monkeypatch.setattr(fa.compat.transformers, "register", missing)
    (part,) = (part for part in TINY if part.cases[0].options == "model=llama")
    found = [row for row, _ in cpu.measure(rows.machine("cpu"), cpu.units([part], (1,)), "cpu", 1.0)]
    assert [row.provider for row in found] == ["fusedattn", "sdpa"]
    assert all(row.status.startswith("unsupported: transformers is not installed") for row in found)
    case = cases.CPU_KEYS[0]
    with pytest.raises(calls.Unsupported, match="no C"):
        peers.flex(case, case.draw("cpu"))


def test_memory_is_of_a_process_of_its_own():
    """Of 2048 rows and keys: all weights are 16 MiB, what torch's own adds is the output, half a MiB."""
    case = cases.Case(1, 1, 1, 2048, 2048, 64, 64, False, "float32", "memory")
    part = MEMORY._replace(cases=[case], names=["sdpa", "sdpa:math"], modes=["forward"])
    found = [row for row, _ in cpu.measure(rows.machine("cpu"), cpu.units([part], (1, 2)), "cpu", 1.0)]
    bare, whole = found
    assert bare.case.words == {"memory": "", "threads": "2"} and bare.provider == "sdpa" and bare.ms_p50 > 0
    assert {row.status for row in found} == {"unchecked: its memory alone is asked for"}
    assert 0.4 < bare.peak_mib < 4 and 16 < whole.peak_mib < 80
    case = case._replace(D=0)
    (broken,) = cpu.measure(
        rows.machine("cpu"), [(case._replace(options="memory threads=1"), "sdpa:cudnn", "forward")], "", 1
    )
    assert broken[0].status.startswith("unsupported: ") and broken[0].peak_mib == ""


def test_keys_and_caches_are_filled_as_they_say():
    case = cases.CPU_KEYS[0]
    masks = case.masks("cpu")
    assert set(masks) == {"key_mask"} and masks["key_mask"].float().mean().item() == pytest.approx(0.5, abs=0.01)
    assert len(set(masks["key_mask"].sum(1).tolist())) > 1
    half = cases.CPU_DECODE[1]
    assert half.lengths("cpu").tolist() == [1024] * 8
    small = half._replace(Sk=32, D=16, Dv=16)
    tensors = small.draw("cpu")
    eager = functools.partial(fa.reference.eager, **tensors.masks)
    for name in ("fusedattn:cache", "sdpa+slice"):
        assert_like(providers.find(name)(small, tensors)(*tensors.inputs), eager, *tensors.inputs)
    tiny = case._replace(Sq=32, Sk=32, D=16, Dv=16)
    tensors = tiny.draw("cpu")
    out = peers.flex_function(tiny, tensors)(*tensors.inputs, block_mask=peers.block_mask(tiny, tensors))
    assert_like(out, functools.partial(fa.reference.eager, **tensors.masks), *tensors.inputs)
    for packed in (peers.jagged, providers.packed):
        with pytest.raises(calls.Unsupported, match="it packs"):
            packed(tiny, tensors)


def test_the_picture_is_speed_over_length_by_one_thread():
    pytest.importorskip("matplotlib")
    some = [
        made(case._replace(options=f"threads={count}"), name, mode, ms_wall=1.0, gbps=1.0)
        for case in cases.CPU_LENGTHS
        for count in (1, 2)
        for name in ("fusedattn:cpu", "sdpa")
        for mode in cpu.BOTH
    ]
    some.append(made(cases.CPU_WINDOW[0]._replace(options="window=64,0 threads=1"), "sdpa", gbps=1.0))
    figure = cpu.draw(some)
    titles = {axes.get_title().replace("\n", " ") for axes in figure.axes}
    kinds = ("full", "causal")
    assert titles == {f"{m}, fp32, d64, {k}, threads=1" for m in ("forward", "forward + backward") for k in kinds}
    for axes in figure.axes:
        assert {line.get_label() for line in axes.lines} == {"fusedattn:cpu", "sdpa"}
        assert sorted(axes.lines[0].get_xdata()) == [128, 256, 512, 1024, 2048, 4096]
    others = [made(case, "sdpa", gbps=1.0) for case in cases.LONG[:2]]
    assert len(cpu.draw(others).axes) == len(plots.draw(others).axes)


def test_it_is_what_fusedattn_bench_asks_on_a_cpu(quickly, monkeypatch, capsys):
    def chosen(*arguments, on_gpu=False):
        return presets.choose(cli._parser().parse_args(["bench", *arguments]), on_gpu)

    assert chosen().parts == SIZES["quick"] and chosen("--preset", "full").parts == PARTS
    for more in (
        ["--preset", "paper"],
        ["--mode", "forward"],
        ["--causal"],
        ["--dtype", "float32"],
        ["--shape", "1,1,1,8,8,8"],
    ):
        assert not chosen(*more).parts and not chosen("--providers", "sdpa").parts
    assert not chosen(on_gpu=True).parts and not chosen("--preset", "full", on_gpu=True).parts
    monkeypatch.setitem(SIZES, "quick", (TINY[0], TINY[-1]))
    monkeypatch.setattr(machine, "busy", lambda: False)
    monkeypatch.setattr(presets, "device", lambda: "cpu")
    assert cli.main(["bench"]) == 0
    shown = capsys.readouterr().out
    count = len(cpu.units(SIZES["quick"], (1,)))
    assert shown.startswith(f"{count} rows on the CPU, 1 thread, torch ") and f"{count} of {count} rows" in shown
    assert "goal" not in shown, "what is asked of us is no answer to a user"
    assert engine.measure is not cpu.measure and torch.get_num_threads() == 1
