"""Tests benchmark rows: all cases are measured, wrong results are found, and failures are explained in a row."""

import re

import pytest
import torch
from fusedattn.bench import cases, measure, providers, rows
from fusedattn.bench.cases import QUESTIONS, Case
from torch.nn.attention.flex_attention import create_block_mask, create_mask

import fusedattn as fa

pytestmark = pytest.mark.usefixtures("at_once", "one_thread")
TINY = Case(2, 4, 2, 40, 40, 16, 16, False, "float32")
FEW = ("fusedattn", "naive", "sdpa:math")


@pytest.fixture(autouse=True)
def _no_compiler(monkeypatch):
    """Skip FlexAttention, which takes half a minute to compile for each case."""
    for name in ("flex", "flex+packed"):
        monkeypatch.setitem(providers.PROVIDERS, name, lambda case, tensors: 1 / 0)


def measured(some, names=FEW, modes=measure.MODES):
    return [*measure.measure(rows.machine("cpu"), some, names, modes, "cpu")]


def statuses(some, names=FEW, modes=measure.MODES):
    return {re.sub(":(cpu|naive)$", "", row.provider): row.status for row in measured(some, names, modes)}


def smaller(case):
    sizes = dict(B=min(case.B, 3), Hq=4, Hkv=4 if case.Hq == case.Hkv else 2, D=16, Dv=16 if case.D == case.Dv else 8)
    keys = 64 if case.Sq < case.Sk else min(case.Sk, 48)
    return case._replace(Sq=min(case.Sq, 48), Sk=keys, dtype="float32", **sizes)


@pytest.mark.parametrize("name", QUESTIONS["cpu"])
def test_every_question_is_measured_and_right_on_a_cpu(name):
    some, names, modes = QUESTIONS["cpu"][name]
    tiny = list(dict.fromkeys(map(smaller, some)))
    found = measured(tiny, names, modes)
    assert len(found) == len(tiny) * len(names) * len(modes)
    assert {row.status for row in found} == {"ok"}
    for row in found:
        assert (row.ms_p20, row.ms_p50, row.ms_p80) == (1.0, 2.0, 3.0) and row.peak_mib == ""
        assert row.tflops == pytest.approx(row.case.flops(row.mode) / 2e9)
        assert row.gpu == "cpu" and row.torch == torch.__version__
        assert (row.gbps != "") == (row.mode == "forward")


@pytest.mark.parametrize("name", QUESTIONS["cpu"])
def test_ours_is_right_in_every_case_of_a_gpu(name):
    some, names, modes = QUESTIONS["cuda"][name]
    ours = [each for each in names if each.startswith("fusedattn") and "pages=256" not in each]
    kinds = {(smaller(case)._replace(B=2), case.options.partition("=")[0]): smaller(case) for case in some}
    found = measured([*kinds.values()], ours, [mode for mode in modes if mode != "graph"])
    assert {row.status for row in found} == {"ok"}


def test_work_of_a_case():
    case = Case(2, 8, 2, 100, 300, 64, 32, False, "float16")
    forward = 2 * 2 * 8 * 100 * 300 * (64 + 32)
    assert [case.flops(mode) / forward for mode in ("forward", *measure.MODES[1:])] == [1.0, 2.5, 3.5]
    assert case._replace(causal=True).flops("forward") == forward * (300 - 50) / 300
    assert case._replace(causal=True, Sk=100).flops("forward") == forward / 6
    assert case._replace(causal=True, Sk=50).flops("forward") == forward / 24
    tensors = case.draw("cpu")
    assert case.moved() == sum(x.nbytes for x in tensors[:4])
    half = case._replace(options="filled=0.5")
    assert half.flops("forward") == forward / 2 and half.moved() == case._replace(Sk=150).moved()
    packed = Case(3, 2, 2, 60, 60, 8, 8, False, "float32", "lengths=zipf")
    assert sorted(packed.lengths("cpu").tolist()) == [20, 30, 60]
    assert packed.flops("forward") == 2 * 2 * (60**2 + 30**2 + 20**2) * 16
    square = TINY._replace(Hkv=4, options="module")
    projections = 4 * 2 * square.B * square.Sq * 64**2
    plain = square._replace(options="")
    for mode, passes in (("forward", 1), ("forward_backward", 3)):
        assert square.flops(mode) - plain.flops(mode) == passes * projections


VISIBLE = [TINY._replace(options=x) for x in ("", "window=9,3", "documents=3")]
VISIBLE += [case._replace(causal=True) for case in VISIBLE]
VISIBLE += [TINY._replace(Sq=24, causal=True), TINY._replace(Sq=56, options="keys=0.5")]


@pytest.mark.parametrize("case", VISIBLE, ids=lambda case: case.name)
def test_peers_get_the_same_mask_as_ours(case):
    tensors = case.draw("cpu")
    found = fa.attention(*tensors[:3], **case.arguments(tensors.masks), return_weights=True)[1] > 0
    seen = providers.mask_of(create_mask, case, "cpu")
    assert torch.equal(found, torch.ones_like(found) if seen is None else seen.expand_as(found))
    block_mask = providers.mask_of(create_block_mask, case, "cpu")
    got = providers.flex_function(case)(*tensors.inputs, block_mask=block_mask)
    assert measure.Workload(case, "cpu").judge("forward", providers.Call(None), got)[2] == ""


def test_what_cannot_run_is_a_row_that_says_why(monkeypatch):
    def too_large(case, tensors):
        raise torch.OutOfMemoryError("too much")

    monkeypatch.setitem(providers.PROVIDERS, "broken", too_large)
    named = ("flex", "fusedattn:hopper", "sdpa:flash", "flash-attn", "broken", "torch.nn", "sdpa")
    found = statuses([TINY._replace(Dv=8, causal=True, Sq=30)], named, ["forward"])
    assert "ZeroDivisionError" in found["flex"] and found["fusedattn:hopper"].startswith("unsupported: ")
    assert "same last dimension" in found["sdpa:flash"] and "flash_attn" in found["flash-attn"]
    assert found["broken"] == "oom" and found["torch.nn"].startswith("unsupported: ") and found["sdpa"] == "ok"
    assert "CUDA graph" in statuses([TINY], ["fusedattn:cache"], ["graph"])["fusedattn:cache"]
    assert "no module" in statuses([TINY._replace(Hkv=4, options="module")], ["naive"])["naive"]
    for name in ("softcap", "alibi", "sinks"):
        case, why = TINY._replace(options="softcap=2" if name == "softcap" else name), f"unsupported: it has no {name}"
        found = statuses([case], ["sdpa", "fusedattn:cache", "fusedattn"], ["forward"])
        assert found == {"sdpa": why, "fusedattn:cache": why, "fusedattn": "ok"}
    assert set(statuses([TINY._replace(options="random")], ["sdpa", "fusedattn"], ["backward"]).values()) == {"ok"}


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("x"), RuntimeError("CPUAllocator: can't allocate memory")])
def test_a_case_too_large_to_draw_is_rows_and_the_next_one_is_measured(error, monkeypatch):
    draw = Case.draw

    def small_ones(case, device):
        if case.Sq == 40:
            raise error
        return draw(case, device)

    monkeypatch.setattr(Case, "draw", small_ones)
    found = measured([TINY, TINY._replace(Sq=24)], ["naive", "fusedattn"], ["forward"])
    assert [row.status for row in found] == ["oom", "oom", "ok", "ok"]


def _wrong_in_the_last_head(query, key, value):
    out = fa.attention(query, key, value)
    return torch.cat([out[:, :-1], out[:, -1:] * 1.01], 1)


ALL, FORWARD, BACKWARDS = {*measure.MODES}, {"forward"}, {"backward", "forward_backward"}
WRONG = {  # {wrong result: (function, options, modes in which it is wrong)}
    "last head": (_wrong_in_the_last_head, "", ALL),
    "gradient of the key": (lambda q, k, v: fa.attention(q, k.detach() + 0 * k, v), "", BACKWARDS),
    "gradient of the bias": (lambda *x: fa.attention(*x[:3], bias=x[3].detach() + 0 * x[3]), "bias", BACKWARDS),
    "weights": (lambda *x: (fa.attention(*x), fa.attention(*x, return_weights=True)[1].flip(-1)), "weights", FORWARD),
    "dropout": (lambda *x: fa.attention(*x, dropout_p=0.1, seed=cases.SEED + 1), "dropout=0.1", ALL),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_answer_is_found(what, monkeypatch):
    function, options, modes = WRONG[what]
    monkeypatch.setitem(providers.PROVIDERS, "fusedattn+wrong", lambda case, tensors: function)
    found = measured([TINY._replace(options=options)], ["fusedattn+wrong"])
    assert {row.mode for row in found if row.wrong} == modes
    assert all(row.ms_p50 == 2.0 for row in found)


@pytest.mark.parametrize("name, function", [("packed", "attention_varlen"), ("decode", "attention_decode")])
def test_a_wrong_answer_of_packed_sequences_and_caches_is_found(name, function, monkeypatch):
    right = getattr(fa, function)
    monkeypatch.setattr(fa, function, lambda *x, **options: 1.02 * right(*x, **options))
    some, names, _ = QUESTIONS["cpu"][name]
    found = measured([smaller(some[0])], names[:1], ["forward"])
    assert [row.wrong for row in found] == [True]


def test_turns_alternate_and_are_cpu_time():
    called = []

    def spins(name, milliseconds):
        called.append(name)
        end = measure.time.process_time() + milliseconds / 1e3
        while measure.time.process_time() < end:
            pass

    steps = dict(long=lambda: spins("long", 8.0), short=lambda: spins("short", 6.0))
    found = measure.in_turns(steps, budget_ms=1.0)
    assert called[4:] == ["long", "long", "short", "short"] * 5
    assert 8.0 <= found["long"][0] <= found["long"][1] <= found["long"][2] and 6.0 <= found["short"][1] < 8.0
