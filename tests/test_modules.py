"""Tests the modules against torch's own: masks, weights, dropout, parameters and nested tensors."""

import functools

import pytest
import torch
from torch import nn

import fusedattn as fa

from .close import assert_as_good, assert_like, exactly
from .inside import shake


def copied(layer):
    twin = nn.MultiheadAttention(layer.embed_dim, layer.num_heads, kdim=layer.kdim, vdim=layer.vdim, batch_first=True)
    inner = dict(q=layer.q_proj, k=layer.k_proj, v=layer.v_proj)
    state = dict(in_proj_bias=torch.cat([x.bias for x in inner.values()]))
    if twin.in_proj_weight is None:
        state |= {f"{name}_proj_weight": x.weight for name, x in inner.items()}
    else:
        state["in_proj_weight"] = torch.cat([x.weight for x in inner.values()])
    twin.load_state_dict(state | {f"out_proj.{name}": x for name, x in layer.out_proj.state_dict().items()})
    return twin


@pytest.mark.parametrize("widths", [{}, dict(kdim=10, vdim=6)], ids=str)
@pytest.mark.parametrize("need_weights", [False, True])
def test_it_equals_torchs_module(widths, need_weights):
    layer = shake(fa.MultiHeadAttention(16, 4, **widths))
    query, key, value = torch.randn(2, 5, 16), torch.randn(2, 7, layer.kdim), torch.randn(2, 7, layer.vdim)
    key_mask = torch.arange(7) < torch.tensor([[5], [7]])
    mask = torch.rand(5, 7) < 0.7
    mask[:, 0] = True
    out, weights = layer(query, key, value, mask, key_mask=key_mask, need_weights=need_weights)

    def torchs(module, *inputs):
        return module(*inputs, key_padding_mask=~key_mask, attn_mask=~mask, average_attn_weights=False)

    want, exact = (apply(copied(layer), query, key, value) for apply in (torchs, functools.partial(exactly, torchs)))
    assert_as_good(out, want[0], exact[0])
    assert (weights is not None) == need_weights
    if need_weights:
        assert_as_good(weights, want[1], exact[1])
    got = torch.autograd.grad(out.sum(), list(layer.parameters()))
    assert all(grad.isfinite().all() for grad in got) and len(got) == 8
    padding, twin = torch.randn(2, 7), copied(layer)  # as docs/pages/migrate/multihead.md says
    out = layer(query, key, value, bias=padding[:, None, None])[0]
    assert_like(out, lambda: twin(query, key, value, key_padding_mask=padding)[0])


def test_grouped_heads_widths_and_options(backend, device):
    layer = fa.MultiHeadAttention(
        12, 4, num_kv_heads=2, head_dim=8, value_head_dim=5, causal=True, window=(3, None), scale=0.2, device=device
    )
    x = torch.randn(2, 9, 12, device=device, requires_grad=True)
    results = functools.partial(type(layer).__call__, need_weights=True)
    want, exact = results(layer, x), exactly(results, layer, x)
    layer.backend = backend
    out, weights = layer(x, need_weights=True)
    assert out.shape == (2, 9, 12) and weights.shape == (2, 4, 9, 9)
    assert torch.equal(weights[0, 0] > 0, torch.ones(9, 9, device=device).tril().triu(-3).bool())  # causal, in a window
    assert_as_good(out, want[0], exact[0])
    assert_as_good(weights, want[1], exact[1])
    value = layer.v_proj(x).unflatten(-1, (2, 5)).transpose(1, 2).repeat_interleave(2, 1)
    again = layer.out_proj((weights @ value).transpose(1, 2).flatten(2))
    assert_as_good(out, again, exact[0])
    assert torch.equal(layer(x)[0], out)  # returned weights change nothing
    out.sum().backward()
    assert x.grad.isfinite().all()


def test_masks_of_every_rank_and_query_mask():
    layer = shake(fa.MultiHeadAttention(8, 2))
    x = torch.randn(3, 4, 8)
    mask = torch.rand(4, 4) < 0.6
    want = layer(x, mask=mask)[0]
    for shape in ((3, 4, 4), (3, 1, 4, 4), (3, 2, 4, 4), (1, 4, 4)):
        assert torch.equal(layer(x, mask=mask.expand(shape))[0], want)
    for name, pairs in (("mask", torch.ones(2, 4, 4).bool()), ("bias", torch.ones(3, 5, 4))):
        with pytest.raises(ValueError, match=f"^{name}: ") as raised:
            layer(x, **{name: pairs})
        assert all(str(tuple(shape)) in str(raised.value) for shape in ((3, 4, 4), pairs.shape))
    query_mask = torch.tensor([[True, False, True, True]])
    out, weights = layer(x, query_mask=query_mask, need_weights=True)
    assert (weights[:, :, 1] == 0).all()
    assert torch.equal(out[:, 1], layer.out_proj.bias.expand(3, 8))


def test_dropout_is_for_training_and_for_weights():
    layer = shake(fa.MultiHeadAttention(8, 2, dropout=0.5))
    x = torch.randn(2, 20, 8)
    torch.manual_seed(3)
    out, weights = layer(x, need_weights=True)
    torch.manual_seed(3)
    assert torch.equal(layer(x)[0], out)  # returned weights change nothing
    value = layer.v_proj(x).unflatten(-1, (2, 4)).transpose(1, 2)
    assert_like(out, lambda: layer.out_proj((weights @ value).transpose(1, 2).flatten(2)))
    assert 0.4 < (weights == 0).float().mean() < 0.6 and not torch.equal(layer(x)[0], out)
    layer.eval()
    assert torch.equal(layer(x)[0], layer(x)[0]) and (layer(x, need_weights=True)[1] > 0).all()
    single = fa.SelfAttention(8, dropout=0.5)
    assert (single(x, need_weights=True)[1] == 0).any() and (single.eval()(x, need_weights=True)[1] > 0).all()


@pytest.mark.parametrize("scale", [None, 0.4])
def test_scale_bias_and_softcap_reach_attention(scale):
    layer = shake(fa.MultiHeadAttention(8, 2, head_dim=9, softcap=0.5, scale=scale))
    x, bias = torch.randn(2, 5, 8), torch.randn(2, 5, 5, requires_grad=True)
    out, weights = layer(x, bias=bias, need_weights=True)

    def textbook():
        query, key = (f(x).unflatten(-1, (2, 9)).transpose(1, 2) for f in (layer.q_proj, layer.k_proj))
        return (0.5 * torch.tanh(query @ key.mT * (scale or 1 / 3) / 0.5) + bias[:, None]).softmax(-1)

    assert_like(weights, textbook)
    assert torch.equal(layer(x, bias=bias[:, None])[0], out)
    out.sum().backward()
    assert bias.grad.abs().sum() > 0


def test_self_attention_is_one_head_without_output_projection():
    layer = fa.SelfAttention(6)
    assert sorted(name for name, _ in layer.named_children()) == ["k_proj", "q_proj", "v_proj"]
    x, mask, key_mask = torch.randn(2, 5, 6), torch.ones(5, 5).tril().bool(), torch.ones(2, 5).bool()
    key_mask[0, 3:] = False
    out, weights = layer(x, mask, key_mask=key_mask, need_weights=True)

    def textbook():
        scores = (layer.q_proj(x) @ layer.k_proj(x).mT) / 6**0.5
        weights = scores.masked_fill(~(mask & key_mask[:, None]), float("-inf")).softmax(-1)
        return weights @ layer.v_proj(x), weights

    assert_like((out, weights), textbook)
    assert_like(layer(x, mask.expand(2, 5, 5), key_mask=key_mask)[0], lambda: textbook()[0])
    assert layer(x)[1] is None


@pytest.mark.parametrize("name", ["mask", "bias"])
def test_pairs_of_rank_3_beside_nested_inputs(name):
    """Masks and biases (B, Sq, Sk) work with nested inputs; their sizes are those of the longest sequences."""
    layer, rows = fa.MultiHeadAttention(16, 4), (torch.randn(3, 16), torch.randn(5, 16))
    nested, padded = torch.nested.nested_tensor(list(rows), layout=torch.jagged), torch.zeros(2, 5, 16)
    for batch, x in enumerate(rows):
        padded[batch, : len(x)] = x
    pairs = torch.randn(2, 5, 5)
    pairs = pairs > -1 if name == "mask" else pairs
    real = torch.arange(5) < torch.tensor([[3], [5]])
    got = layer(nested, **{name: pairs})[0].unbind()

    def without_nesting():
        with fa.use_backend("naive"):
            want = layer(padded, key_mask=real, query_mask=real, **{name: pairs})[0]
        return [want[0, :3], want[1]]

    assert_like(list(got), without_nesting)
    with pytest.raises(ValueError, match=f"^{name}: expected"):
        layer(nested, **{name: pairs[:, :2, :2]})


def test_it_is_printed_with_its_options():
    layer = fa.MultiHeadAttention(8, 2, causal=True, window=(3, 0), scale=0.0, backend="naive")
    assert "num_heads=2, num_kv_heads=2, causal=True, window=(3, 0), scale=0.0, backend='naive'" in repr(layer)
    assert "dropout" not in repr(fa.MultiHeadAttention(8, 2))
