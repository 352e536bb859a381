"""Tests modules that are copied or saved, and modules with wrapped, replaced or parametrized projections."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import fusedattn as fa
from fusedattn import layers

from .close import assert_like

WIDTH, INSIDE = 16, 32
X, KEY_MASK = torch.randn(2, 5, WIDTH), torch.arange(5) < torch.tensor([[5], [3]])
IDS = torch.tensor([[1, 2, 3], [4, 0, 6]])

# {name: (function that makes the module, function that calls it)}
MODULES = {
    "attention": (
        lambda: fa.MultiHeadAttention(WIDTH, 4, num_kv_heads=2, causal=True, window=(3, None), softcap=3.0),
        lambda module: module(X, key_mask=KEY_MASK, need_weights=True),
    ),
    "one head": (lambda: fa.SelfAttention(WIDTH, dropout=0.2), lambda module: module(X, need_weights=True)),
    "positions": (lambda: layers.SinusoidalPositionalEncoding(WIDTH, 9), lambda module: (module(X),)),
    "embeddings": (lambda: layers.Embeddings(7, WIDTH, 5, 0.2), lambda module: (module(IDS),)),
    "encoder": (
        lambda: layers.TransformerEncoder(2, WIDTH, 2, INSIDE, 0.2, attention_dropout=0.2, scale=0.3),
        lambda module: (module(X, key_mask=KEY_MASK),),
    ),
    "decoder": (
        lambda: layers.AttentionDecoder(7, 3, 6, WIDTH),
        lambda module: module(IDS[:, 0], X[:, 0, :6], X, key_mask=KEY_MASK),
    ),
}


def saved(thing, **options):
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, **options)


def saved_whole(module):
    with torch.serialization.safe_globals([type(part) for part in module.modules()]):
        return saved(module, weights_only=True)


def loaded(module):
    other = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.fill_(float("nan"))
    other.load_state_dict(saved(module.state_dict(), weights_only=True))
    return other


COPIES = dict(deepcopy=copy.deepcopy, pickle=lambda module: pickle.loads(pickle.dumps(module)))
COPIES |= dict(whole=saved_whole, state_dict=loaded)


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("name", MODULES)
def test_a_copy_gives_the_same_bits_and_shares_nothing(name, how):
    make, call = MODULES[name]
    module = make()
    other = COPIES[how](module)
    for training in (True, False):
        outcomes = []
        for each in (module, other):
            torch.manual_seed(3)
            outcomes.append([x for x in call(each.train(training)) if x is not None])
        assert all(map(torch.equal, *outcomes))
    assert not {x.data_ptr() for x in other.parameters()} & {x.data_ptr() for x in module.parameters()}


class Adapted(nn.Module):
    """Linear layer plus a LoRA, without most attributes of nn.Linear."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.down = nn.Linear(layer.in_features, 2, bias=False)
        self.up = nn.Linear(2, layer.out_features, bias=False)

    def forward(self, x):
        return self.layer(x) + self.up(self.down(x))


def by_hand(*projected):
    """Return the input of out_proj of a MultiHeadAttention with two heads, by the formula."""
    query, key, value = (x.unflatten(-1, (2, -1)).transpose(1, 2) for x in projected)
    weights = (query @ key.mT / query.shape[-1] ** 0.5).softmax(-1)
    return (weights @ value).transpose(1, 2).flatten(2)


def test_projections_that_were_wrapped_are_called():
    layer, given = fa.MultiHeadAttention(WIDTH, 2), []
    for name, child in list(layer.named_children()):
        setattr(layer, name, Adapted(child))
    layer.out_proj.register_forward_hook(lambda module, inputs, out: given.append((*inputs, out)))
    result = layer(X)[0]
    ((got, out),) = given
    with torch.no_grad():
        projected = [f(X) for f in (layer.q_proj, layer.k_proj, layer.v_proj)]
    assert_like(got, by_hand, *projected)
    assert torch.equal(result, out)


class Counted(nn.Module):
    calls = 0

    def forward(self, weight):
        self.calls += 1
        return weight * 2


def test_a_weight_that_is_computed_is_computed_once_a_call():
    """A parametrized weight is computed once a call: spectral_norm takes a step each time, and it may be expensive."""
    layer, twin = fa.MultiHeadAttention(WIDTH, 2), fa.MultiHeadAttention(WIDTH, 2)
    twin.load_state_dict(layer.state_dict())
    counts = [Counted() for _ in range(4)]
    for projection, count in zip(layer.children(), counts, strict=True):
        parametrize.register_parametrization(projection, "weight", count)
        count.calls = 0
    with torch.no_grad():
        for projection in twin.children():
            projection.weight.mul_(2)
    out = layer(X)[0]
    assert [count.calls for count in counts] == [1, 1, 1, 1]
    assert torch.equal(out, twin(X)[0])
    layer(X)[0].sum().backward()
    twin(X)[0].sum().backward()
    for projection, of_twin in zip(layer.children(), twin.children(), strict=True):
        assert torch.equal(projection.parametrizations.weight.original.grad, of_twin.weight.grad * 2)
