"""Packed sequences in the benchmarks: their lengths, what is counted of them, how each peer gets them, what is said."""

import os
import sys
from types import ModuleType

import pytest
import torch
import torch.nn.attention.varlen as torch_varlen
from fusedattn.bench import accuracy, attention, calls, cases, cost, engine, peers, providers
from fusedattn.bench.dev import questions

import fusedattn as fa

from .test_bench import COLUMNS, made
from .test_questions import ask

pytestmark = pytest.mark.usefixtures("one_thread")
MACHINE = dict.fromkeys(COLUMNS[:8], "x")
PACKED = [name for name in providers.ASIDE if name.endswith("+packed") or name == "torch:varlen"]
MIXED = cases.Case(5, 2, 2, 40, 40, 16, 16, False, "float32", "lengths=uniform")


def test_lengths_are_of_the_kind_that_a_case_names():
    for case in cases.VARLEN:
        lengths, kind = case.lengths("cpu"), case.words.get("lengths", "equal")
        assert len(lengths) == case.B and lengths.max() == case.Sq and lengths.min() >= 1
        assert abs(lengths.sum() / 32768 - 1) < 0.02 and torch.equal(lengths, case.lengths("cpu"))
        ordered = lengths.sort(descending=True).values
        if kind == "equal":
            assert lengths.unique().tolist() == [case.Sq] and not case.masks("cpu")
        else:
            assert not torch.equal(lengths, ordered)
        if kind == "zipf":
            assert ordered.tolist() == [round(case.Sq / (n + 1)) for n in range(case.B)]
        if kind == "one-long":
            assert ordered[1:].unique().tolist() == [case.Sq // 16]
        if kind == "uniform":
            assert ordered[0] > 2 * ordered[case.B // 2] - 1500 and ordered[-1] < case.Sq / 8
    kinds = {(case.words.get("lengths", "equal"), case.D, case.causal) for case in cases.VARLEN}
    assert kinds == {(kind, dim, causal) for kind in cases.LENGTHS for dim in (64, 128) for causal in (True, False)}


def test_no_length_is_0_and_any_number_of_sequences_has_some():
    for kind in cases.LENGTHS:
        for count in (1, 2, 3, 40):
            lengths = MIXED._replace(B=count, Sq=7, Sk=7, options=f"lengths={kind}").lengths("cpu")
            assert len(lengths) == count and lengths.dtype == torch.int64 and lengths.min() >= 1 and lengths.max() == 7


@pytest.mark.parametrize("mode", engine.MODES)
def test_what_a_case_costs_is_what_its_sequences_cost_alone(mode):
    case = MIXED._replace(Hq=4, Dv=8, causal=True)
    each = [case._replace(B=1, Sq=n, Sk=n, options="") for n in case.lengths("cpu").tolist()]
    assert cost.flops(case, mode) == sum(cost.flops(one, mode) for one in each)
    assert cost.moved(case, mode) == sum(cost.moved(one, mode) for one in each)
    assert cost.ideal(case) == sum(cost.ideal(one) for one in each)
    padding = case._replace(options="padding=0.5")  # as it always was: the grid
    assert cost.flops(padding, mode) == cost.flops(case._replace(options=""), mode)


def test_what_is_counted_is_what_the_masks_say():
    case = cases.Case(5, 1, 1, 700, 700, 128, 128, False, "bfloat16", "lengths=zipf")
    masks, lengths = case.masks("cpu"), case.lengths("cpu").tolist()
    real = masks["key_mask"]
    assert real.sum(1).tolist() == lengths and torch.equal(real, masks["query_mask"])
    pairs = int((real[:, :, None] & real[:, None, :]).sum())
    tiles = sum((-(-n // 128) * 128) ** 2 for n in lengths)
    said = questions.waste(case)
    assert f"zipf: 5 sequences of 140 to 700, {sum(lengths)} tokens; padded {3500 / sum(lengths):.2f} x" in said
    assert f"{5 * 700**2 / pairs:.2f} x the pairs; tiles of 128 x 128, packed, {tiles / pairs:.3f} x" in said


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
):
    assert all(x.is_contiguous() and x.dim() == 3 for x in (q, k, v)) and cu_seqlens_q.dtype == torch.int32
    assert max_seqlen_q == cu_seqlens_q.diff().max() and max_seqlen_k == cu_seqlens_k.diff().max()
    assert q.shape[-1] == v.shape[-1] and dropout_p == 0.0
    sides = tuple(None if side == -1 else side for side in window_size)
    options = dict(scale=softmax_scale, causal=causal, window=sides, softcap=softcap or None)
    return fa.reference.attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, **options)


def varlen_attn(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False):
    assert enable_gqa or q.shape[1] == k.shape[1]
    options = dict(softmax_scale=scale, window_size=window_size)
    return flash_attn_varlen_func(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, **options)


def varlen_attn_of_2_10(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None):
    return flash_attn_varlen_func(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, causal=is_causal)


@pytest.fixture
def installed(monkeypatch):
    """What needs a GPU or a package, as if it were there."""
    module = ModuleType("flash_attn")
    module.flash_attn_varlen_func = flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    monkeypatch.setattr(torch_varlen, "varlen_attn", varlen_attn)
    monkeypatch.setattr(peers, "_compiled", lambda attend, tensors: attend)


CASES = [
    *cases.TINY_VARLEN,
    MIXED._replace(causal=True),
    MIXED._replace(Hq=4),
    MIXED._replace(Dv=8),
    *(MIXED._replace(options=f"{MIXED.options} {word}") for word in ("bias", "softcap=2", "window=9,3", "weights")),
    MIXED._replace(options="padding=0.5"),
    MIXED._replace(options="documents=3"),
    MIXED._replace(Sk=48, options=""),
]
LACKS = {
    "fusedattn+packed": lambda case: "weights" in case.words,
    "torch:varlen": lambda case: {"bias", "documents", "softcap", "weights"} & set(case.words) or case.D != case.Dv,
    "flash-attn+packed": lambda case: {"bias", "documents", "weights"} & set(case.words) or case.D != case.Dv,
    "sdpa+packed": lambda case: {"bias", "documents", "softcap", "weights", "window"} & set(case.words),
    "flex+packed": lambda case: {"bias", "documents", "weights"} & set(case.words),
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_gets_packed_sequences_as_it_wants_them(case, installed):
    """Right, results back as (B, H, S, D); or the row says what it lacks. On a CPU FlexAttention has no backward."""
    workload = attention.Attention(case, "cpu")
    assert set(PACKED) == set(LACKS)
    taken = "naive" if "softcap" in case.words else "cpu"
    for name in PACKED:
        if name == "sdpa+packed" and (case.causal or case.Hq != case.Hkv):
            continue  # not on a CPU
        modes = ("forward",) if name == "flex+packed" else ("forward", "backward")
        refused = LACKS[name](case) or case.Sq != case.Sk
        for row, why in engine.measure(MACHINE, engine.units([case], [name], modes), "cpu", 0.1, lambda *_: workload):
            assert row.provider == (f"{name}:{taken}" if name in providers.OURS and case.Sq == case.Sk else name)
            assert row.status.startswith("unsupported: " if refused else "ok"), (name, row.mode, row.status, why)


def test_flex_attention_is_for_a_gpu_and_jagged_tensors_are_not_causal_on_a_cpu():
    case = cases.TINY_VARLEN[1]
    tensors = case.draw("cpu")
    with pytest.raises(calls.Unsupported, match="no C\\+\\+ compiler"):
        providers.find("flex+packed")(case, tensors)
    with pytest.raises(calls.Unsupported, match="No viable backend|CUDA driver version is insufficient"):
        providers.find("sdpa+packed")(case, tensors)(*tensors.inputs)


@pytest.mark.parametrize("options, right", [("", True), (" window=9,3", False)], ids=["causal", "window"])
def test_torch_2_10_says_causal_in_a_word_and_has_no_window(options, right, monkeypatch):
    monkeypatch.setattr(torch_varlen, "varlen_attn", varlen_attn_of_2_10)
    case = MIXED._replace(causal=True, options=MIXED.options + options)
    tensors = case.draw("cpu")
    if not right:
        with pytest.raises(calls.Unsupported, match="no window"):
            providers.find("torch:varlen")(case, tensors)
        return
    out = providers.find("torch:varlen")(case, tensors)(*tensors.inputs)
    assert accuracy.judge(case, "forward", out, accuracy.truth(case, tensors))[2] == ""


def test_a_call_gets_real_tokens_alone_and_gives_them_back():
    case = MIXED
    tensors, lengths = case.draw("cpu"), case.lengths("cpu").tolist()
    for by_token in (True, False):
        call = calls.Call(None, by_token=by_token, packing=providers.find("fusedattn+packed")(case, tensors).packing)
        query, key, value = calls.packed(call, tensors.inputs)
        each = torch.cat([tensors.query[b, :, :n].transpose(0, 1) for b, n in enumerate(lengths)])
        assert torch.equal(query, each if by_token else each.transpose(0, 1)[None]) and query.is_contiguous()
        back = calls.unpacked(call, (query, key, value))
        real = case.masks("cpu")["key_mask"][:, None, :, None]
        assert all(torch.equal(x, y * real) for x, y in zip(back, tensors.inputs, strict=True))


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="kernels need TRITON_INTERPRET=1")
def test_the_kernels_are_timed_on_packed_sequences(tmp_path, at_once):
    pytest.importorskip("triton")
    case = cases.Case(3, 2, 2, 40, 40, 16, 16, True, "float32", "lengths=uniform")
    units = engine.units([case], ["fusedattn+packed"], engine.MODES[:2])
    with fa.use_backend("triton"):
        found = [row for row, _ in engine.measure(MACHINE, units, "cpu", 1.0)]
    assert [(row.mode, row.provider, row.status) for row in found] == [
        ("forward", "fusedattn+packed:triton", "ok"),
        ("backward", "fusedattn+packed:triton", "ok"),
    ]
    assert found[0].tflops == pytest.approx(cost.flops(case, "forward") / 2.0 / 1e9)


def test_offsets_that_are_wrong_are_found(monkeypatch):
    """Also those that are right of all sequences but the last two."""
    right = calls.offsets_of

    def off_by_one(packed):
        cu_q, cu_k, *longest = right(packed)
        cu_k = cu_k.clone()
        cu_k[-2] -= 1
        return cu_q, cu_k, longest[0], longest[1] + 1

    monkeypatch.setattr(providers, "offsets_of", off_by_one)
    units = engine.units([MIXED], ["fusedattn+packed"], engine.MODES[:2])
    assert [row.status for row, _ in engine.measure(MACHINE, units, "cpu", 0.1)] == ["wrong", "wrong"]


def test_a_run_goes_on_behind_what_was_packed(tmp_path, at_once, monkeypatch, capsys):
    monkeypatch.setitem(cases.TABLES, "tiny-varlen", cases.TINY_VARLEN[:1])
    ask("varlen", tmp_path / "a.csv")
    found = ask("varlen", tmp_path / "a.csv", "--resume")
    assert len(found) == len(providers.usual_packed("cpu")) * 2
    assert [row.provider for row in found][:2] == ["fusedattn+packed:cpu"] * 2
    work = questions.units(cases.VARLEN, ["flex+packed", "fusedattn+packed"], ["forward"], questions.flex_last)
    assert [name for _, name, _ in work] == ["fusedattn+packed"] * 16 + ["flex+packed"] * 16
    assert capsys.readouterr().out.count("x the pairs") >= 8


def test_packed_is_compared_with_padded_and_where_lengths_are_equal_with_the_dense_kernel():
    equal, zipf = (case for case in cases.VARLEN[:3:2])
    assert not equal.options and zipf.options == "lengths=zipf"
    some = [
        made(equal, "fusedattn+packed:triton", ms=1.0, tflops=500.0),
        made(equal, "fusedattn:triton", ms=0.98),
        made(equal, "torch:varlen", ms=1.5, status="wrong"),  # by our rule; a peer all the same
        made(equal, "flex+packed", status="oom")._replace(ms_p50=""),
        made(equal, "fusedattn+packed:triton", "backward", ms=4.0),
        made(equal, "fusedattn:hopper", "backward", ms=3.0),
        made(zipf, "fusedattn+packed:triton", ms=1.0),
        made(zipf, "fusedattn:triton", ms=7.0),
        made(zipf, "fusedattn+packed:triton", "backward", ms=0.1, status="wrong"),  # fast and wrong is no ratio
        made(zipf, "fusedattn:triton", "backward", ms=7.0),
    ]
    shown = questions.QUESTIONS["varlen"].text(some).splitlines()
    goals = [line for line in shown if line.startswith("goal")]
    number = "met in 1 of 1 case, median 0.980, worst 0.980", "met in 0 of 1 case, median 0.750, worst 0.750"
    for line, mode, met in zip(goals, ("forward", "backward"), number, strict=True):
        assert line == f"goal {mode}, equal lengths, speed over the dense kernel's, >= 0.95: {met} ({equal.name})"
    assert sum("x the tokens" in line for line in shown) == len(cases.LENGTHS)
    tiny = [made(cases.TINY_VARLEN[0], name) for name in ("fusedattn:cpu", "fusedattn+packed:cpu")]
    assert questions.QUESTIONS["varlen"].text(tiny).count("not measured") == 2  # a goal is of long ones
