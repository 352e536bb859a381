"""Tests the function that models of Hugging Face Transformers call, and its registration."""

import functools
import math
import sys

import pytest
import torch

import fusedattn as fa
from fusedattn.compat import transformers as compat

from ..close import assert_like

transformers = pytest.importorskip("transformers")


class Module:
    """Substitute for the module that transformers passes as the first argument."""

    def __init__(self, is_causal=None):
        if is_causal is not None:
            self.is_causal = is_causal


def drawn(B=2, Hq=4, Hkv=2, Lq=5, Lk=7, D=6, Dv=3, dtype=torch.float32):
    """Return random query, key and value that require gradients, views of (B, L, H, D); value is a slice of more."""
    query, key = torch.randn(B, Lq, Hq, D, dtype=dtype), torch.randn(B, Lk, Hkv, D, dtype=dtype)
    value = torch.randn(B, Lk, Hkv, 2 * Dv, dtype=dtype)
    return [x.transpose(1, 2).requires_grad_() for x in (query, key, value[..., Dv:])]


def eager(*inputs, **options):
    return fa.reference.eager(*inputs, **options).transpose(1, 2)


def upper_left(rows, columns):
    return torch.ones(rows, columns, dtype=torch.bool).tril()


def assert_attends(got, formula, inputs):
    """Assert that output and gradients are as exact as formula(*inputs), in the layout of transformers."""
    out, weights = got
    assert weights is None and out.is_contiguous() and out.dtype == inputs[0].dtype
    gradient = torch.randn_like(out)

    def results(out):
        return [out, *torch.autograd.grad(out, inputs, gradient)]

    assert_like(results(out), lambda: results(formula(*inputs)))


@pytest.mark.parametrize(
    ("is_causal", "attribute", "causal"),
    [(None, None, True), (None, True, True), (None, False, False), (True, False, True), (False, True, False)],
)
@pytest.mark.parametrize("Lq, Lk", [(5, 3), (5, 5), (5, 7), (1, 7)])
def test_causality_without_a_mask(is_causal, attribute, causal, Lq, Lk):
    """Without a mask attention is causal as transformers defines it; a single query sees all keys."""
    inputs = drawn(Lq=Lq, Lk=Lk)
    got = compat.fusedattn_forward(Module(attribute), *inputs, None, is_causal=is_causal)
    assert_attends(got, functools.partial(eager, mask=upper_left(Lq, Lk) if causal and Lq > 1 else None), inputs)


def test_the_empty_slots_of_a_static_cache_may_hold_anything():
    query, key, value = drawn(Lk=9)
    seen = query, key[:, :, :5], value[:, :, :5]
    with torch.no_grad():
        key[:, :, 5:], value[:, :, 5:] = math.nan, math.nan
    out, _ = compat.fusedattn_forward(Module(True), query, key, value, None)
    assert_like(out, functools.partial(eager, mask=upper_left(5, 5)), *seen)


@pytest.mark.parametrize("rank", [2, 3, 4])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_a_mask_is_all_there_is(kind, rank):
    """If there is a mask, causality and windows do not apply; columns of the mask past the last key are cut off."""
    inputs = drawn()
    visible = torch.rand(2, 4, 5, 9) < 0.6 if rank == 4 else torch.rand((4, 5, 9)[-rank:]) < 0.6
    visible[..., 0] = True
    mask = visible if kind == "bool" else (~visible).float() * torch.finfo(torch.float32).min
    got = compat.fusedattn_forward(Module(True), *inputs, mask, is_causal=True, sliding_window=2)
    assert_attends(got, functools.partial(eager, mask=visible.expand(2, 4, 5, 9)[..., :7]), inputs)


@pytest.mark.parametrize("mask", [None, "bool", "float"])
@pytest.mark.parametrize("shape", [(1, 4, 5, 7), (2, 4, 5, 7), (1, 4, 1, 7), (1, 4, 5, 9)], ids=str)
def test_position_bias_and_its_gradient(mask, shape):
    *inputs, bias = *drawn(), torch.randn(shape).transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    visible = torch.rand(2, 1, 5, 7) < 0.6
    visible[..., 0] = True
    scores = torch.where(visible, torch.randn(visible.shape), torch.finfo(torch.float32).min)
    given = {None: None, "bool": visible, "float": scores}[mask]
    got = compat.fusedattn_forward(Module(False), *inputs, given, scaling=1.0, position_bias=bias)

    def formula(query, key, value, bias):  # columns of a static cache past the keys are cut
        added = bias[..., :7] if mask != "float" else scores + bias[..., :7]
        return eager(query, key, value, bias=added, mask=given if mask == "bool" else None, scale=1.0)

    assert_attends(got, formula, [*inputs, bias])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_sinks_softcap_scaling_and_unknown_keywords(dtype):
    inputs = [*drawn(dtype=dtype), torch.randn(4).to(dtype).requires_grad_()]
    others = dict(output_attentions=False, position_ids=torch.arange(5), cu_seq_lens_q=None, indices=None)
    options = dict(scaling=2.0, softcap=1.5, s_aux=inputs[3])
    got = compat.fusedattn_forward(Module(True), *inputs[:3], None, **options, **others)

    def formula(*inputs):
        return eager(*inputs[:3], mask=upper_left(5, 7), scale=2.0, softcap=1.5, sinks=inputs[3])

    assert_attends(got, formula, inputs)


def test_rows_without_a_key_are_finite():
    inputs = drawn()
    hidden = torch.zeros(2, 1, 5, 7, dtype=torch.bool)
    out, _ = compat.fusedattn_forward(Module(True), *inputs, hidden, position_bias=torch.randn(1, 4, 5, 7))
    assert (out == 0).all()
    lowest = torch.full((2, 1, 5, 7), torch.finfo(torch.float32).min)
    got = compat.fusedattn_forward(Module(True), *inputs, lowest)
    assert_like(got[0], functools.partial(eager, scale=0.0), *inputs)
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.sum() + got[0].sum(), inputs))


def test_dropout_is_applied_as_given_and_follows_the_seed():
    inputs = drawn(Lq=20, Lk=20)
    module = torch.nn.Module().eval()
    torch.manual_seed(4)
    out, _ = compat.fusedattn_forward(module, *inputs, None, dropout=0.5)
    torch.manual_seed(4)
    want = fa.attention(*inputs, causal=True, dropout_p=0.5).transpose(1, 2)
    assert torch.equal(out, want) and not torch.equal(compat.fusedattn_forward(module, *inputs, None)[0], want)


def test_queries_for_all_samples_come_as_a_batch_of_one():
    query = torch.randn(1, 4, 5, 6, requires_grad=True)
    inputs = [query, *drawn(B=3)[1:]]
    got = compat.fusedattn_forward(Module(False), *inputs, None)
    assert_attends(got, lambda query, *rest: eager(query.expand(3, -1, -1, -1), *rest), inputs)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("beside", [None, "mask", "scores", "position_bias"])
def test_documents_do_not_see_each_other(beside, causal, dtype):
    inputs = drawn(B=1, Lq=6, Lk=6)
    documents = torch.tensor([0, 0, 0, 2, 2, 2])
    visible = documents[:, None] == documents
    scores, given = None, {}
    if beside == "mask":
        given["attention_mask"] = torch.rand(1, 1, 6, 6) > 0.3
        given["attention_mask"] |= torch.eye(6, dtype=torch.bool)
        visible = visible & given["attention_mask"]
    elif beside is not None:
        scores = torch.randn(1, 4, 6, 6)
        given["attention_mask" if beside == "scores" else beside] = scores
    if causal and beside in (None, "position_bias"):
        visible = visible & upper_left(6, 6)
    offsets = torch.tensor([0, 3, 3, 6], dtype=dtype)
    given |= dict(cu_seq_lens_q=offsets, cu_seq_lens_k=offsets, max_length_q=3, max_length_k=torch.tensor(3))
    got = compat.fusedattn_forward(Module(causal), *inputs, **given)
    assert_attends(got, lambda *x: eager(*x, bias=scores, mask=visible), inputs)


@pytest.mark.parametrize(
    ("name", "error", "options"),
    [
        ("attention_mask", TypeError, dict(attention_mask=torch.ones(5, 7, dtype=torch.int64))),
        ("attention_mask", ValueError, dict(attention_mask=torch.ones(5, 6, dtype=torch.bool))),
        ("position_bias", ValueError, dict(position_bias=torch.ones(1, 3, 5, 7))),
        ("attention_mask", ValueError, dict(attention_mask=torch.ones(5, 6))),
        ("scaling", TypeError, dict(scaling="1")),
        ("softcap", ValueError, dict(softcap=0.0)),
        ("s_aux", ValueError, dict(s_aux=torch.ones(3))),
        ("dropout", ValueError, dict(dropout=1.5)),
        ("indices", NotImplementedError, dict(indices=torch.zeros(2, 5, 1, dtype=torch.int64))),
        ("block_indices", NotImplementedError, dict(block_indices=torch.zeros(2, 2, 5, 1, dtype=torch.int64))),
        ("sinks", NotImplementedError, dict(sinks=torch.zeros(2, 4, 5, 1))),
        ("head_mask", NotImplementedError, dict(head_mask=torch.ones(4))),
        ("cu_seq_lens_k", TypeError, dict(cu_seq_lens_q=torch.tensor([0, 10]))),
        ("cu_seq_lens_q", TypeError, dict(cu_seq_lens_k=torch.tensor([0, 10]))),
        ("cu_seq_lens_q", ValueError, dict(cu_seq_lens_q=torch.tensor([0, 10]), cu_seq_lens_k=torch.tensor([0, 14]))),
        ("cu_seq_lens_q", TypeError, dict(cu_seq_lens_q=[0, 10], cu_seq_lens_k=torch.tensor([0, 14]))),
    ],
)
def test_what_it_cannot_do_is_named(name, error, options):
    with pytest.raises(error, match=f"^{name}: "):
        compat.fusedattn_forward(Module(True), *drawn(), **options)


@pytest.mark.parametrize(
    ("argument", "value", "error"),
    [
        *(("name", x, ValueError) for x in ("my_flash", "me/fused", "paged|fused", "", "eager", "sdpa")),
        *(("name", 1, TypeError), ("masks", "bits", ValueError)),
    ],
)
def test_a_name_that_transformers_has_or_would_take_for_another_is_refused(argument, value, error):
    before = transformers.AttentionInterface().get(value)
    with pytest.raises(error, match=f"^{argument}: "):
        compat.register(**{argument: value})
    assert transformers.AttentionInterface().get(value) is before


def test_another_name_twice():
    from transformers.masking_utils import AttentionMaskInterface

    compat.register("ours")
    before = vars(transformers.PreTrainedModel).copy()
    compat.register("ours")
    compat.register("another")
    assert vars(transformers.PreTrainedModel) == before  # the hooks of models are installed once
    assert transformers.AttentionInterface()["ours"] is compat.fusedattn_forward
    masks = AttentionMaskInterface()
    assert masks["ours"] is masks["another"] is not masks["sdpa"]


def test_without_transformers_it_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match="transformers"):
        compat.register()


def test_with_an_older_transformers_it_says_so(monkeypatch):
    monkeypatch.delitem(sys.modules, "fusedattn.compat._hf", raising=False)
    monkeypatch.delattr(transformers.PreTrainedModel, "_check_and_adjust_attn_implementation")
    with pytest.raises(ImportError, match="needs transformers 4"):
        compat.register()
