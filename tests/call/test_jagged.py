"""Tests that nested tensors (torch.jagged) give the results of `attention_varlen` of their values."""

import pytest
import torch

import fusedattn as fa

from ..close import assert_like
from ..inside import same
from ..mistakes import of_values, wrong
from ..sample import one_in, product

OFFSETS_Q, OFFSETS_K = torch.tensor([0, 3, 3, 10]), torch.tensor([0, 5, 6, 9])
pytestmark = pytest.mark.filterwarnings("ignore")


def nested(values, offsets):
    return torch.nested.nested_tensor_from_jagged(values, offsets)


def draw():
    return [torch.randn(shape, requires_grad=True) for shape in ((10, 4, 8), (9, 2, 8), (9, 2, 6))]


def jagged(query, key, value):
    pairs = (query, OFFSETS_Q), (key, OFFSETS_K), (value, OFFSETS_K)
    return [nested(x, offsets).transpose(1, 2) for x, offsets in pairs]


OPTIONS = {
    "plain": {},
    "causal": dict(causal=True),
    "bias": dict(bias=torch.randn(3, 1, 7, 5), softcap=2.0),
    "dropout": dict(dropout_p=0.4, seed=3, window=(2, 1)),
}


@pytest.mark.parametrize("function", [fa.attention, fa.reference.attention], ids=["attention", "reference"])
@pytest.mark.parametrize("name", OPTIONS)
def test_values_and_gradients(name, function):
    tensors = draw()
    grad = torch.randn(10, 4, 6)
    out = function(*jagged(*tensors), **OPTIONS[name])
    packed = fa.attention_varlen if function is fa.attention else fa.reference.attention_varlen
    want = packed(*tensors, OFFSETS_Q.int(), OFFSETS_K.int(), **OPTIONS[name])
    assert torch.equal(out.transpose(1, 2).values(), want)
    same(*(torch.autograd.grad(x, tensors, grad) for x in (out.transpose(1, 2).values(), want)))


def test_all_results_and_masks_of_tokens():
    tensors = draw()
    masks = dict(key_mask=torch.rand(9) < 0.7, query_mask=torch.rand(10) < 0.7)
    both = dict(return_lse=True, return_weights=True)
    given = dict(key_mask=nested(masks["key_mask"], OFFSETS_K), query_mask=nested(masks["query_mask"], OFFSETS_Q))
    out, lse, weights = fa.attention(*jagged(*tensors), **given, **both)
    want = fa.attention_varlen(*tensors, OFFSETS_Q.int(), OFFSETS_K.int(), **masks, **both)
    same([x.transpose(1, 2).values() for x in (out, lse, weights)], [want[0], want[1].T, want[2].transpose(0, 1)])


def test_explained():
    lengths = dict(cu_seqlens_q=OFFSETS_Q.int(), cu_seqlens_k=OFFSETS_K.int())
    explained = fa.explain(*(tensors := draw()), **lengths, softcap=2.0)
    assert str(fa.explain(*jagged(*tensors), softcap=2.0)) == str(explained) and "softcap" in str(explained)


def test_what_comes_out_goes_in_again():
    query, _, _ = jagged(*draw())
    key, value = query + 1, query * 2
    out = fa.attention(query, key, value, causal=True) + query
    assert fa.attention(out, key, value).shape == query.shape


def test_rows_with_holes():
    whole = torch.randn(3, 5, 2, 4)
    starts, lengths = torch.tensor([0, 1, 2]), torch.tensor([2, 3, 3])
    query = torch.nested.narrow(whole, 1, starts, lengths, layout=torch.jagged).transpose(1, 2)
    out = fa.attention(query, query, query)
    for b, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
        one = whole[b : b + 1, start : start + length].transpose(1, 2)
        assert_like(out.unbind()[b], lambda one=one: fa.reference.eager(one, one, one)[0])


def test_wrong_arguments_are_named():
    query, key, value = jagged(*draw())
    given = dict(query=query, key=key, value=value)
    dense = torch.randn(3, 4, 5, 8)
    strided = torch.nested.nested_tensor([torch.randn(4, 3, 8), torch.randn(4, 7, 8)])
    others = nested(torch.randn(9, 2, 6), OFFSETS_K.clone()).transpose(1, 2)
    tokens = nested(torch.rand(9) < 0.7, OFFSETS_K)
    one = nested(torch.randn(10, 4, 8), torch.tensor([0, 10])).transpose(1, 2)
    types = dict(key=[dense, None], value=[dense], query=[strided], key_mask=[nested(torch.rand(9), OFFSETS_K)])
    values = dict(query=[query.transpose(1, 2), nested(torch.randn(10, 8), OFFSETS_Q)], value=[others])
    values |= dict(key_mask=[torch.rand(9) < 0.7], query_mask=[tokens], mask=[torch.ones(2, 2, dtype=torch.bool)])
    rows = of_values(types, TypeError) + of_values(values)
    for name, error, changed in [*rows, wrong("key", query=one), wrong("key", TypeError, query=dense)]:
        with pytest.raises(error, match=rf"^{name}: expected .+, got .+$"):
            fa.attention(**given | changed)


@pytest.mark.parametrize("options", [dict(causal=True, softcap=2.0), {}], ids=str)
@pytest.mark.one_in(2)
def test_a_compiled_module_finds_the_longest_length_of_nested_tensors(options):
    layer, x = fa.MultiHeadAttention(32, 2, backend="naive", **options), torch.randn(10, 32, requires_grad=True)

    def step(x):
        return layer(nested(x, OFFSETS_Q))[0].values()

    def with_gradient(step):
        out = step(x)
        return out, *torch.autograd.grad(out.square().sum(), x)

    assert_like(with_gradient(torch.compile(step, fullgraph=True, backend="aot_eager")), with_gradient, step)


def test_a_graph_that_needs_a_longest_length_says_how_to_give_it():
    step = torch.compile(
        lambda *x: fa.attention(*jagged(*x), bias=torch.zeros(7, 5)), fullgraph=True, backend="aot_eager"
    )
    with pytest.raises(torch._dynamo.exc.Unsupported, match="made with min_seqlen and max_seqlen"):
        step(*draw())


MASKS = dict(mask=torch.rand(7, 7) < 0.7, key_mask=torch.rand(10) < 0.7)
OF_MODULES = dict(
    plain={},
    mask=dict(mask=MASKS["mask"]),
    bias=dict(bias=torch.randn(7, 7)),
    key_mask=dict(key_mask=nested(MASKS["key_mask"], OFFSETS_Q)),
    query_mask=dict(query_mask=nested(MASKS["key_mask"], OFFSETS_Q)),
    weights=dict(need_weights=True),
    all=dict(mask=MASKS["mask"], key_mask=nested(MASKS["key_mask"], OFFSETS_Q), need_weights=True),
)
MODULES = dict(
    attention=lambda backend: fa.MultiHeadAttention(32, 2, backend=backend),
    layer=lambda backend: fa.layers.TransformerEncoderLayer(32, 2, 64, backend=backend),
)


@pytest.mark.parametrize("backend", ["cpu", "naive"])
@pytest.mark.parametrize(
    ("module", "name"),
    one_in(4, product(["attention"], OF_MODULES) + product(["layer"], ["plain", "mask", "key_mask"])),
)
@pytest.mark.one_in(18)
def test_compiled_modules_take_nested_tensors(module, name, backend):
    model, x = MODULES[module](backend), torch.randn(10, 32, requires_grad=True)

    def attend(x):
        try:
            found = model(x, **OF_MODULES[name])
        except ValueError:
            return [x.values() * 0]
        return [one.values() for one in (found if isinstance(found, tuple) else (found,)) if one is not None]

    got, want = (function(nested(x, OFFSETS_Q)) for function in (torch.compile(attend, backend="aot_eager"), attend))
    same(got, want)
    same(*(torch.autograd.grad(sum(one.sin().sum() for one in found), x)[0] for found in (got, want)))
