"""Tests MultiheadAttention of fusedattn.compat.torch against torch's own, and cases that torch computes wrong."""

import inspect
import math

import pytest
import torch
from torch import nn

import fusedattn as fa
import fusedattn.compat.torch as compat

from ..close import assert_as_good, assert_like, exactly
from ..inside import same, shake

hypothesis = pytest.importorskip("hypothesis")
from ..fuzz import modules  # noqa: E402

WIDTHS = [{}, dict(kdim=6, vdim=10), dict(bias=False), dict(kdim=6, bias=False), dict(add_bias_kv=True)]
EXTRAS = [dict(add_zero_attn=True), dict(add_bias_kv=True, add_zero_attn=True, vdim=3)]


def pair(num_heads=2, dtype=torch.float32, **options):
    theirs = shake(nn.MultiheadAttention(8, num_heads, dtype=dtype, **options))
    ours = compat.MultiheadAttention(8, num_heads, dtype=dtype, **options)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def draw_inputs(layer, batch, rows, keys, dtype=torch.float32):
    sizes = ((rows, layer.embed_dim), (keys, layer.kdim), (keys, layer.vdim))
    if batch is not None:
        sizes = (((batch, n, e) if layer.batch_first else (n, batch, e)) for n, e in sizes)
    return [torch.randn(size, dtype=dtype, requires_grad=True) for size in sizes]


def results(layer, inputs, *masks, **options):
    out, weights = layer(*inputs, **options)
    loss = (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).view(out.shape)).sum()
    wanted = [*dict.fromkeys(inputs), *layer.parameters(), *(x for x in masks if x is not None and x.requires_grad)]
    grads = torch.autograd.grad(loss, wanted, materialize_grads=True, retain_graph=True)
    if weights is None:
        return [out, *grads]
    more = torch.autograd.grad(weights.sin().sum(), wanted, materialize_grads=True)
    return [out, weights, *grads, *more]


@hypothesis.settings(derandomize=True, deadline=None, max_examples=60)
@hypothesis.given(modules.calls("MultiheadAttention"))
@pytest.mark.filterwarnings("ignore:Support for mismatched")
def test_values_and_gradients_are_torchs(call):
    call = call._replace(dtype=torch.float64)
    assert_like(call.results(torch.float64, None), call.oracle())


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("batch", [None, 3])
@pytest.mark.parametrize("tensors", [1, 2, 3])
def test_layouts_and_inputs_that_are_one_tensor(tensors, batch, batch_first, average):
    theirs, ours = pair(dtype=torch.float64, batch_first=batch_first)
    query, key, value = draw_inputs(ours, batch, 4, 4, dtype=torch.float64)
    inputs = {1: [query] * 3, 2: [query, key, key], 3: [query, key, value]}[tensors]
    got, want = (results(layer, inputs, average_attn_weights=average) for layer in (ours, theirs))
    assert_like(got, want)
    assert ours.training and got[0].is_contiguous()
    ours.eval(), theirs.eval()
    with torch.no_grad():
        assert_like(*(list(layer(*inputs, average_attn_weights=average)) for layer in (ours, theirs)))


@pytest.mark.parametrize("options", WIDTHS + EXTRAS, ids=str)
def test_a_seed_gives_torchs_initial_parameters_and_state_dicts_load_both_ways(options):
    made = []
    for kind in (nn.MultiheadAttention, compat.MultiheadAttention):
        torch.manual_seed(4)
        made.append(kind(8, 2, 0.1, batch_first=True, dtype=torch.float64, **options))
    theirs, ours = made
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert all(map(torch.equal, ours.state_dict().values(), theirs.state_dict().values()))
    theirs.load_state_dict(ours.state_dict(), strict=True)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    assert isinstance(ours, nn.MultiheadAttention) and type(ours.out_proj) is type(theirs.out_proj)


@pytest.mark.parametrize("method", ["__init__", "forward"])
def test_signatures_are_torchs(method):
    ours, theirs = (
        list(inspect.signature(getattr(x, method)).parameters.values())
        for x in (compat.MultiheadAttention, nn.MultiheadAttention)
    )
    assert [(x.name, x.default, x.kind) for x in ours] == [(x.name, x.default, x.kind) for x in theirs]


ROW = torch.zeros(4, 3, 3).bool()  # (samples * heads, rows, keys): row 0 of sample 0 sees no key
ROW[:2, 0] = True
SAMPLE = torch.tensor([[True] * 3, [False] * 3])
HIDING = {
    "padding": dict(key_padding_mask=SAMPLE),
    "float padding": dict(key_padding_mask=torch.zeros(2, 3).masked_fill(SAMPLE, -math.inf)),
    "mask": dict(attn_mask=ROW),
    "float mask": dict(attn_mask=torch.zeros(4, 3, 3).masked_fill(ROW, -math.inf)),
    "together": dict(attn_mask=ROW & (torch.arange(3) > 0), key_padding_mask=torch.tensor([[True, False, False]] * 2)),
}


@pytest.mark.parametrize("mode", ["train", "eval", "no_grad"])
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("kind", HIDING)
def test_a_query_that_sees_nothing_gets_the_bias_of_out_proj(kind, need_weights, mode):
    _, layer = pair(batch_first=True, dropout=0.0)
    layer.train(mode == "train")
    x = torch.randn(2, 3, 8, requires_grad=True)
    with torch.set_grad_enabled(mode != "no_grad"):
        out, weights = layer(x, x, x, need_weights=need_weights, **HIDING[kind])
    assert torch.equal(out[0, 0], layer.out_proj.bias) and out.isfinite().all()
    assert not torch.equal(out[1, 0], layer.out_proj.bias)
    if need_weights:
        assert (weights[0, 0] == 0).all()
        assert_like(weights[1].sum(-1), torch.ones(3).double())
    if mode != "no_grad":
        loss = out.sum() + (weights.square().sum() if need_weights else 0)
        assert all(x.isfinite().all() for x in torch.autograd.grad(loss, (x, *layer.parameters())))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("options", [{}, dict(kdim=6, vdim=10), EXTRAS[1]], ids=str)
@pytest.mark.parametrize("batch_first", [False, True])
def test_what_padding_hides_changes_no_bit_and_no_gradient(options, batch_first, bad):
    _, layer = pair(batch_first=batch_first, **options)
    query, key, value = draw_inputs(layer, 2, 4, 5)
    padding = torch.tensor([[False, True, False, False, True], [True, True, False, False, False]])
    want = results(layer, [query, key, value], need_weights=True, key_padding_mask=padding)
    hidden = (padding if batch_first else padding.T)[..., None]
    poisoned = [x.detach().masked_fill(hidden, bad).requires_grad_() for x in (key, value)]
    for mask in (None, torch.zeros(4, 5)):
        got = results(layer, [query, *poisoned], need_weights=True, key_padding_mask=padding, attn_mask=mask)
        same(got, want)
    shared = layer(query, poisoned[0], poisoned[0], padding)[0] if layer.kdim == layer.vdim else want[0]
    assert shared.isfinite().all()


@pytest.mark.parametrize("options", [{}, *EXTRAS, dict(add_bias_kv=True)], ids=str)
@pytest.mark.parametrize("contradicts", [False, True])
def test_is_causal_is_only_a_hint(options, contradicts):
    _, layer = pair(batch_first=True, **options)
    inputs = draw_inputs(layer, 2, 4, 4)
    mask = torch.zeros(4, 4).bool() if contradicts else torch.ones(4, 4).triu(1).bool()
    for need in (0, 1):
        hinted, told = (layer(*inputs, attn_mask=mask, need_weights=need, is_causal=hint)[0] for hint in (True, False))
        assert torch.equal(hinted, told)
    with pytest.raises(ValueError, match="is_causal: .*attn_mask"):
        layer(*inputs, is_causal=True)


@pytest.mark.parametrize("average", [False, True])
def test_weights_are_those_after_dropout_and_a_seed_drops_the_same_without_them(average):
    _, layer = pair(batch_first=True, dropout=0.5)
    x = torch.randn(2, 20, 8)
    torch.manual_seed(5)
    out, weights = layer(x, x, x, average_attn_weights=average)
    torch.manual_seed(5)
    assert torch.equal(layer(x, x, x, need_weights=False)[0], out)
    assert not torch.equal(layer(x, x, x)[0], out)
    if average:
        assert weights.shape == (2, 20, 20)
    else:
        assert 0.4 < (weights == 0).float().mean() < 0.6
        v = (x @ layer.in_proj_weight[16:].T + layer.in_proj_bias[16:]).unflatten(-1, (2, 4)).transpose(1, 2)
        assert_like(out, lambda: layer.out_proj((weights @ v).transpose(1, 2).flatten(2)))
    layer.eval()
    assert torch.equal(layer(x, x, x)[0], layer(x, x, x)[0])


def test_two_masks_of_the_lowest_number_are_still_the_mean():
    _, layer = pair(batch_first=True)
    inputs = draw_inputs(layer, 2, 3, 4)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        lowest = torch.finfo(dtype).min
        masks = dict(
            attn_mask=torch.full((3, 4), lowest, dtype=dtype),
            key_padding_mask=torch.full((2, 4), torch.finfo(torch.float32).min),
        )
        masks["key_padding_mask"][0, 1] = -math.inf
        weights = layer(*inputs, **masks)[1]
        want = torch.tensor([[1 / 3, 0, 1 / 3, 1 / 3], [0.25] * 4]).double()
        assert_like(weights, want[:, None].expand(2, 3, 4))


@pytest.mark.parametrize("name", ["attn_mask", "key_padding_mask"])
def test_a_mask_may_change_before_the_backward_and_come_from_inference_mode(name):
    _, layer = pair(batch_first=True)
    inputs = draw_inputs(layer, 3, 3, 3)
    with torch.inference_mode():
        mask = torch.randn(3, 3)
    layer(*inputs, **{name: mask})[0].sum().backward()
    mask = mask.clone()
    out = layer(*inputs, **{name: mask})[0]
    mask.add_(1.0)
    out.sum().backward()


@pytest.mark.parametrize("sizes", [(0, 3, 4), (2, 0, 4), (2, 3, 0)], ids=str)
@pytest.mark.parametrize("options", [{}, EXTRAS[1]], ids=str)
def test_sizes_of_zero(sizes, options):
    _, layer = pair(batch_first=True, **options)
    batch, rows, keys = sizes
    masks = dict(attn_mask=torch.zeros(batch * 2, rows, keys), key_padding_mask=torch.zeros(batch, keys).bool())
    out, weights = layer(*draw_inputs(layer, *sizes), **masks)
    assert out.shape == (batch, rows, 8) and weights.shape == (batch, rows, keys + 2 * bool(options))
    if keys == 0 and not options:
        assert torch.equal(out, layer.out_proj.bias.expand(out.shape))
    assert out.isfinite().all()


def test_autocast_is_torchs():
    theirs, ours = pair(add_bias_kv=True, add_zero_attn=True)
    x, padding = torch.randn(4, 2, 8), torch.tensor([[False, True, False, False], [False] * 4])
    with torch.autocast("cpu", torch.bfloat16):
        got, want = (layer(x, x, x, padding) for layer in (ours, theirs))
    assert got[0].dtype == want[0].dtype and got[1].dtype == want[1].dtype
    exact = exactly(theirs, x, x, x, padding)
    for ours, rounded, of_float64 in zip(got, want, exact, strict=True):
        assert_as_good(ours, rounded, of_float64)


def test_it_computes_by_the_backend_that_is_named(device):
    query, key = (torch.randn(n, 2, 8, device=device, requires_grad=True) for n in (2, 3))
    inputs = [query, key, key]
    padding = torch.tensor([[False, True, False], [True, True, True]], device=device)
    masks = dict(key_padding_mask=padding, attn_mask=torch.randn(2, 3, device=device))
    theirs, layer = (x.to(device) for x in pair(add_bias_kv=True))
    with fa.use_backend("triton"):
        got = results(layer, inputs, **masks)
    assert_like(got, lambda: results(theirs, inputs, **masks))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_weights_of_nested_inputs_are_those_of_each_head():
    theirs, ours = pair(batch_first=True)
    inputs = torch.randn(3, 8), torch.randn(7, 8)
    packed = torch.nested.nested_tensor(list(inputs))
    options = dict(need_weights=True, average_attn_weights=False)
    _, weights = ours(packed, packed, packed, **options)
    for found, x in zip(weights, inputs, strict=True):
        assert_like(found[:, : len(x), : len(x)], lambda x: theirs(x, x, x, **options)[1], x)
    jagged = torch.nested.nested_tensor(list(inputs), layout=torch.jagged)
    with pytest.raises(TypeError, match="^query: .* strided nested tensor .* torch.jagged"):
        ours(jagged, jagged, jagged)
    with pytest.raises((TypeError, ValueError), match="^query: "):
        pair()[1](packed, packed, packed)
