"""The peers that are not torch's: what they are given, held to the rule, with packages that answer as they do."""

import functools
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from fusedattn.bench import attention, calls, cases, engine, peers, providers, timing

import fusedattn as fa

from ..close import assert_like
from .test_bench import COLUMNS
from .test_questions import ask

NAMES = ("flash-attn", "fa4", "xformers")


def _heads(function, query, key, value, **options):
    """A function of (B, H, S, D), called with (B, S, H, D); which is what they want, and without gaps."""
    assert all(x.is_contiguous() for x in (query, key, value) if x.dim() == 4 and 0 not in x.stride())
    return function(*(x.transpose(1, 2) for x in (query, key, value)), **options).transpose(1, 2)


def flash_attn_func(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None
):
    assert q.shape[-1] == v.shape[-1]
    sides = tuple(None if side == -1 else side for side in window_size)
    options = dict(dropout_p=dropout_p, scale=softmax_scale, causal=causal, window=sides, softcap=softcap or None)
    return _heads(fa.reference.attention, q, k, v, seed=3, **options)


def fa4_func(q, k, v, softmax_scale=None, causal=False, window_size=(None, None), learnable_sink=None, softcap=0.0):
    options = dict(scale=softmax_scale, causal=causal, window=window_size, softcap=softcap or None)
    return _heads(fa.reference.attention, q, k, v, **options), None


class Masks:
    """xformers.ops.fmha.attn_bias, as far as it is asked for; each is options of ours."""

    class LowerTriangularMask(SimpleNamespace):
        def options(self):
            return dict(causal=True, align="top_left")

    class LowerTriangularFromBottomRightMask(SimpleNamespace):
        def options(self):
            return dict(causal=True)

    class LocalAttentionFromBottomRightMask:
        def __init__(self, window_left, window_right):
            self.sides = window_left, window_right

        def options(self):
            return dict(window=self.sides)


def memory_efficient_attention(query, key, value, attn_bias=None, p=0.0, scale=None):
    options = attn_bias.options() if hasattr(attn_bias, "options") else {}
    heads = query.shape[2:-1]
    assert key.shape[2:-1] == heads  # it broadcasts none
    if isinstance(attn_bias, torch.Tensor):
        assert attn_bias.shape == (query.shape[0], *heads, query.shape[1], key.shape[1])
        options["bias"] = attn_bias.flatten(1, -3)
    if len(heads) == 2:  # (B, M, G, H, K), and what is expanded is not read twice
        assert key.stride(3) == value.stride(3) == 0
        query, key, value = (x.flatten(2, 3) for x in (query, key, value))
    out = _heads(fa.reference.attention, query, key, value, dropout_p=p, seed=3, scale=scale, **options)
    return out.unflatten(2, heads)


@pytest.fixture
def installed(monkeypatch):
    """All three, as if they were."""

    def module(name, **names):
        made = ModuleType(name)
        made.__dict__.update(names)
        monkeypatch.setitem(sys.modules, name, made)
        return made

    module("flash_attn", flash_attn_func=flash_attn_func)
    module("flash_attn.cute")
    module("flash_attn.cute.interface", flash_attn_func=fa4_func)
    masks = module("xformers.ops.fmha.attn_bias", **{k: v for k, v in vars(Masks).items() if k[0] != "_"})
    module("xformers")
    module("xformers.ops", memory_efficient_attention=memory_efficient_attention)
    module("xformers.ops.fmha", attn_bias=masks)


LACKING = {
    "flash-attn": {"bias", "documents", "padding", "weights"},
    "fa4": {"bias", "documents", "padding", "weights", "dropout"},
    "xformers": {"documents", "padding", "softcap", "weights"},
}
GROUPED = cases.Case(2, 4, 2, 48, 80, 16, 16, False, "float32", "window=20,7")
CASES = [
    *cases.TINY,
    *cases.TINY_OPTIONS,
    GROUPED,
    GROUPED._replace(causal=True, options="window=9,5"),  # causal makes the right side 0
    GROUPED._replace(options="window=11,80"),
    GROUPED._replace(options="bias"),
    GROUPED._replace(options="bias", causal=True),
    GROUPED._replace(options="", causal=True),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_gets_the_case_as_it_wants_it(case, installed, monkeypatch):
    """Right in every mode, results back as (B, H, S, D); or the row says what it lacks, before anything is computed."""
    monkeypatch.setattr(timing, "measure", lambda step, *_: timing.Times(1.0, 1.0, 1.0))  # what it takes is not asked
    workload = attention.Attention(case, "cpu")
    for name in NAMES:
        units = engine.units([case], [name], ("forward", "forward_backward"))
        rows_of = engine.measure(dict.fromkeys(COLUMNS[:8], "x"), units, "cpu", 0.1, lambda *_: workload)
        found = {row.mode: row for row, _ in rows_of}
        lacking = LACKING[name] & set(case.words)
        if name == "xformers" and "bias" in case.words and case.causal:
            lacking |= {"bias"}
        if name == "flash-attn" and case.D != case.Dv:
            lacking |= {"Dv"}
        expected = "unsupported: it " if lacking else "unchecked: " if "dropout" in case.words else "ok"
        assert all(row.status.startswith(expected) for row in found.values()), (name, found)
        assert (found["forward"].ms_p50 != "") == (not lacking)


@pytest.mark.parametrize("name", NAMES)
def test_dropout_is_asked_for(name, installed):
    case = cases.Case(1, 2, 2, 64, 64, 16, 16, False, "float32", "dropout=0.5")
    tensors = case.draw("cpu")
    if name == "fa4":
        with pytest.raises(calls.Unsupported, match="it has no dropout"):
            providers.find(name)(case, tensors)
        return
    out = providers.find(name)(case, tensors)(*tensors.inputs)
    assert_like(out, functools.partial(fa.reference.eager, dropout_p=0.5, seed=3), *tensors[:3])


@pytest.mark.parametrize("name", NAMES)
def test_one_that_is_not_installed_says_so(name, monkeypatch):
    for module in ("flash_attn", "flash_attn.cute.interface", "xformers.ops"):
        monkeypatch.setitem(sys.modules, module, None)
    case = cases.TINY[0]
    with pytest.raises(calls.Unsupported, match=f"{peers.PACKAGES[name][0]}.* is not installed"):
        providers.find(name)(case, case.draw("cpu"))


def test_those_that_are_installed_are_compared_where_none_is_named(installed, monkeypatch):
    assert set(NAMES) < set(providers.usual("cuda")) and not set(NAMES) & set(providers.usual("cpu"))
    monkeypatch.setitem(sys.modules, "xformers.ops", None)
    assert "xformers" not in providers.usual("cuda") and {"flash-attn", "fa4"} < set(providers.usual("cuda"))


def test_a_layout_of_its_own_is_made_before_anything_is_timed(monkeypatch):
    """What is timed gets the same (B, S, H, D) tensors each time, and gradients come back as they lie."""
    seen = []

    def attend(query, key, value):
        seen.append((query, key, value))
        return flash_attn_func(query, key, value)

    case = cases.Case(2, 4, 2, 48, 80, 16, 16, False, "float32")
    tensors = case.draw("cpu")
    call = calls.Call(attend, by_token=True)
    with calls.step("forward_backward", call, tensors) as step:
        first, again = step(), step()
    assert seen[-1] == seen[-2] or all(a is b for a, b in zip(seen[-1], seen[-2], strict=True))
    assert [tuple(x.shape) for x in seen[-1]] == [(2, 48, 4, 16), (2, 80, 2, 16), (2, 80, 2, 16)]
    back = calls.unpacked(call, first)
    assert [x.shape for x in back] == [x.shape for x in tensors[:3]]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_torchs_own_backend_is_chosen_where_a_step_is_run():
    """A step runs inside `around`: the backend is the one that was named."""
    from torch.nn.attention import SDPBackend

    case = cases.TINY[0]
    tensors, called = case.draw("cpu"), []

    def attend(*inputs):
        called.append((torch.backends.cuda.flash_sdp_enabled(), torch.is_grad_enabled()))
        return inputs[0]

    call = providers.find("sdpa:math")(case, tensors)._replace(attend=attend)
    assert call.inside.args == (SDPBackend.MATH,)
    with calls.step("forward", call, tensors) as step:
        step()
    step()  # outside of it: as torch comes
    assert called == [(False, False), (True, True)]


def test_weights_are_held_to_the_rule_too(tmp_path, monkeypatch):
    def of_wrong_weights(case, tensors):
        def call(query, key, value):
            out, weights = fa.attention(query, key, value, causal=case.causal, return_weights=True)
            return out, weights * 1.01

        return call

    monkeypatch.setitem(providers.PROVIDERS, "weights", of_wrong_weights)
    monkeypatch.setitem(cases.TABLES, "some", [case for case in cases.TINY_OPTIONS if "weights" in case.words])
    found = ask("attention", tmp_path / "a.csv", "--cases", "some", "--providers", "weights,fusedattn")
    statuses = {(row.provider, row.mode): row.status for row in found}
    assert statuses["weights", "forward"] == "wrong" and statuses["weights", "backward"] == "ok"
    assert {status for (name, _), status in statuses.items() if name == "fusedattn:cpu"} == {"ok"}
