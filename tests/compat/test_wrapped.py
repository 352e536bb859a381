"""Modules whose parameters are computed, and whose out_proj is another layer, are converted; out_proj is called."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from fusedattn.compat import torch as compat

from ..close import assert_like

X = torch.randn(2, 5, 16)


class Adapted(nn.Module):
    """A layer beside an adapter; the layer's weight is not the adapter's."""

    def __init__(self, base):
        super().__init__()
        self.base, self.more = base, nn.Linear(16, 16)

    @property
    def weight(self):
        return self.base.weight

    @property
    def bias(self):
        return self.base.bias

    def forward(self, x):
        return self.base(x) + self.more(x)


def attention(**options):
    torch.manual_seed(0)
    return nn.MultiheadAttention(16, 2, batch_first=True, **options)


def computed(norm, name, **options):
    module = attention(**options)
    norm(module if "." not in name else module.out_proj, name.rpartition(".")[2])
    return module


COMPUTED = {
    f"{norm.__name__} of {name}": (norm, name, options)
    for norm in (parametrizations.weight_norm, parametrizations.spectral_norm)
    for name, options in (
        ("in_proj_weight", {}),
        ("out_proj.weight", {}),
        ("q_proj_weight", dict(kdim=16, vdim=12)),
    )
}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("norm, name, options", COMPUTED.values(), ids=COMPUTED)
def test_computed_parameters(norm, name, options, training):
    theirs = computed(norm, name, **options).eval()
    ours = compat.convert(nn.ModuleList([copy.deepcopy(theirs)]))[0]
    assert isinstance(ours, compat.MultiheadAttention)
    if training and norm is parametrizations.weight_norm:  # the other takes a step at each look
        theirs.train(), ours.train()

    def results(module):
        out, weights = module(X, X, X[..., : options.get("vdim", 16)])
        return out, weights, *torch.autograd.grad(out.square().sum(), list(module.parameters()))

    assert_like(results(ours), results, theirs)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    again = compat.convert(copy.deepcopy(ours))
    assert type(again) is type(ours)
    assert_like(results(again), results, theirs)
    if "." not in name:
        parametrize.remove_parametrizations(ours, name)
        assert type(ours) is compat.MultiheadAttention
        assert_like(results(ours)[:2], lambda: results(theirs)[:2])


@pytest.mark.parametrize(
    "wrap, mode",
    [(Adapted, "compiled"), *((x, y) for x in (Adapted, nn.Sequential, nn.Identity) for y in ("train", "no_grad"))],
)
def test_another_out_proj_is_called(wrap, mode):
    """Its output counts where torch would take the fast path too; an nn.Sequential has no weight to read."""
    padding = torch.arange(5) >= torch.tensor([[5], [3]])
    model = compat.convert(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)).train(mode == "train")
    plain = copy.deepcopy(model)
    joined = plain.self_attn.out_proj
    model.self_attn.out_proj = wrap(copy.deepcopy(joined))
    if wrap is nn.Identity:
        joined.weight.data, joined.bias.data = torch.eye(16), torch.zeros(16)
    elif wrap is Adapted:
        more = model.self_attn.out_proj.more
        joined.weight.data += more.weight.data
        joined.bias.data += more.bias.data
    torch._dynamo.reset()
    run = torch.compile(model, backend="eager") if mode == "compiled" else model
    with torch.set_grad_enabled(mode != "no_grad"):
        found = run(X, src_key_padding_mask=padding)[~padding]
        assert_like(found, lambda: plain(X, src_key_padding_mask=padding)[~padding])


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_hooks_of_out_proj_and_a_quantized_one():
    layer, seen = compat.MultiheadAttention(16, 2, batch_first=True).eval(), []
    wanted, _ = layer(X, X, X)
    handle = layer.out_proj.register_forward_hook(lambda module, inputs, output: seen.append(output))
    layer(X, X, X)
    assert torch.equal(seen[0], wanted)
    handle.remove()
    layer.out_proj = nn.Linear(16, 16)
    layer.out_proj.load_state_dict(dict(weight=torch.eye(16), bias=torch.zeros(16)))
    exact = layer(X, X, X)[0]
    quantized = torch.ao.quantization.quantize_dynamic(layer, {nn.Linear})
    assert not isinstance(quantized.out_proj, nn.Linear)
    assert torch.equal(quantized(X, X, X)[0], quantized.out_proj(exact)) and not torch.equal(
        quantized.out_proj(exact), exact
    )
