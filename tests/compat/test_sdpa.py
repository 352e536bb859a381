"""Tests our scaled_dot_product_attention against torch's own, and cases that torch computes wrong."""

import math

import pytest
import torch
import torch.nn.functional as F

import fusedattn as fa
import fusedattn.compat.torch as compat

from ..close import assert_as_good, assert_like
from ..inside import leaves

hypothesis = pytest.importorskip("hypothesis")
st = pytest.importorskip("hypothesis.strategies")
given, settings = hypothesis.given, hypothesis.settings

LOWEST = torch.finfo(torch.float32).min


def results(function, query, key, value, mask, **options):
    inputs = leaves(query, key, value)
    if mask is not None and mask.dtype != torch.bool:
        inputs.append(mask.detach().clone().requires_grad_())
        mask = inputs[3]
    out = function(*inputs[:3], mask, **options)
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).view(out.shape)
    return out, *torch.autograd.grad((out * weight).sum(), inputs, materialize_grads=True)  # empty inputs have none


@st.composite
def calls(draw):
    """Draw (query, key, value, mask, options) that torch's function accepts."""
    size = st.integers(1, 4)
    lead = draw(st.lists(st.integers(0, 3), max_size=4))
    gqa = bool(lead) and draw(st.booleans())
    rows, keys, dim = draw(size), draw(st.integers(0, 5)), draw(st.integers(0, 4))  # without columns all scores are 0
    value_dim = draw(st.sampled_from([dim, 3, 0]))
    shapes = []
    for last in ((rows, dim), (keys, dim), (keys, value_dim)):
        mine = [draw(st.sampled_from([n, n, 1])) for n in lead] if draw(st.booleans()) else list(lead)
        shapes.append([*mine, *last])
    if gqa:
        kv_heads = draw(st.sampled_from([1, 2]))
        shapes[0][-3] = kv_heads * draw(st.integers(1, 3))
        shapes[1][-3] = shapes[2][-3] = kv_heads
    whole = torch.broadcast_shapes(*(s[: -3 if gqa else -2] for s in shapes))
    scores = (*whole, *(shapes[0][-3:-2] if gqa else ()), rows, keys)
    # An empty result of torch has the query's shape, even if this shape should broadcast.
    hypothesis.assume(0 not in (*scores[:-2], value_dim) or tuple(shapes[0][:-2]) == scores[:-2])
    draws = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    query, key, value = (torch.randn(s, dtype=dtype, generator=draws) for s in shapes)
    kind = draw(st.sampled_from(["none", "causal", "bool", "float32", "own"]))
    mask = None
    if kind not in ("none", "causal"):
        shape = [draw(st.sampled_from([n, 1])) for n in scores][draw(st.integers(0, len(scores) - 2)) :]
        hidden = torch.rand(shape, generator=draws) < 0.3
        mask = ~hidden
        if kind != "bool":
            lowest = draw(st.sampled_from([-math.inf, LOWEST]))
            mask = torch.randn(shape, generator=draws).masked_fill(hidden, lowest)
            mask = mask if kind == "float32" else mask.to(dtype)
    scale = draw(st.sampled_from([None, 0.3, 1.5 if kind == "causal" else -1.0]))  # torch: causal * negative is NaN
    return query, key, value, mask, dict(is_causal=kind == "causal", scale=scale, enable_gqa=gqa)


@settings(derandomize=True, deadline=None, max_examples=80)
@given(calls())
@hypothesis.example(
    (torch.randn(2, 6, 4, 5), torch.randn(2, 2, 6, 5), torch.randn(2, 3, 6, 5), None, dict(enable_gqa=True))
)
def test_values_and_gradients_are_torchs(call):
    *inputs, options = call

    def computed(function):
        return results(function, *inputs, **options)

    assert_like(computed(compat.scaled_dot_product_attention), computed, F.scaled_dot_product_attention)


LAYOUTS = {
    "(B, H, L, D)": lambda: torch.randn(2, 3, 4, 8),
    "(B, L, H, D)": lambda: torch.randn(2, 4, 3, 8).transpose(1, 2),
    "packed": lambda: torch.randn(2, 4, 72)[..., 24:48].unflatten(-1, (3, 8)).transpose(1, 2),
    "(B, H, D, L)": lambda: torch.randn(2, 3, 8, 4).mT,
    "expanded": lambda: torch.randn(2, 1, 4, 8).expand(2, 3, 4, 8),
    "(A, B, L, H, D)": lambda: torch.randn(2, 2, 4, 3, 8).transpose(2, 3),
}


@pytest.mark.parametrize("options", [{}, dict(is_causal=True), dict(attn_mask=torch.ones(4, 5).bool())], ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_strides_are_torchs(name, options):
    query = LAYOUTS[name]()
    for key, value in (
        (torch.randn(*query.shape[:-2], 5, 8), torch.randn(*query.shape[:-2], 5, 8)),
        (torch.randn(*query.shape[:-2], 5, 8), torch.randn(*query.shape[:-2], 5, 6)),
        (torch.randn(*query.shape[:-2], 8, 5).mT, torch.randn(*query.shape[:-2], 5, 8)),
        (torch.randn(5, 8), torch.randn(5, 8)),
    ):
        out = compat.scaled_dot_product_attention(query, key, value, **options)
        want = F.scaled_dot_product_attention(query, key, value, **options)
        assert_like(out, lambda *x: F.scaled_dot_product_attention(*x, **options), query, key, value)
        # Torch 2.15 keeps the order of a query of rank 3; 2.10 and 2.13 do not, and ours is contiguous.
        kept = torch.__version__ >= (2, 15) and out.dim() == 3 and not want.is_contiguous()
        assert out.is_contiguous() if kept else out.stride() == want.stride()


def test_causal_biases_of_torch():
    bias = pytest.importorskip("torch.nn.attention.bias")
    query, key, value = (torch.randn(2, 3, n, 8) for n in (3, 5, 5))
    for make, diagonal in ((bias.causal_upper_left, 0), (bias.causal_lower_right, 2)):
        mask = torch.ones(3, 5, dtype=torch.bool).tril(diagonal)
        got = compat.scaled_dot_product_attention(query, key, value, make(3, 5))
        assert_like(got, F.scaled_dot_product_attention, query, key, value, mask)
    with pytest.raises(ValueError, match="attn_mask: .*lengths"):
        compat.scaled_dot_product_attention(query, key, value, bias.causal_upper_left(3, 4))


def test_dropout_always_applies():
    query, key, value = torch.randn(2, 3, 50, 8), torch.randn(2, 3, 40, 8), torch.ones(2, 3, 40, 4)
    torch.manual_seed(1)
    out = compat.scaled_dot_product_attention(query, key, value, dropout_p=0.5)
    torch.manual_seed(1)
    assert torch.equal(out, compat.scaled_dot_product_attention(query, key, value, None, 0.5))
    assert (out - 1).abs().max() > 0.05 and abs(out.mean() - 1) < 0.05  # the weights no longer sum to 1
    assert not torch.equal(out, compat.scaled_dot_product_attention(query, key, value, dropout_p=0.5))
    assert (compat.scaled_dot_product_attention(query, key, value, dropout_p=1.0) == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mask", [None, torch.bool, torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_autocast_is_torchs(dtype, mask):
    query, key, value = (torch.randn(2, 3, n, 8).to(dtype) for n in (4, 5, 5))
    key = key if dtype == torch.float64 else key.bfloat16()
    mask = None if mask is None else torch.ones(4, 5).tril().to(mask)
    with torch.autocast("cpu", torch.bfloat16):
        try:
            want = F.scaled_dot_product_attention(query, key, value, mask)
        except RuntimeError:
            if mask.dtype == torch.float32:
                pytest.skip("torch casts a mask that it then refuses")
            with pytest.raises(TypeError, match="attn_mask"):
                compat.scaled_dot_product_attention(query, key, value, mask)
            return
        out = compat.scaled_dot_product_attention(query, key, value, mask)
    assert out.dtype == want.dtype
    exact = (x.to(want.dtype).double() for x in (query, key, value))
    mask = mask if mask is None or mask.dtype == torch.bool else mask.double()
    assert_as_good(out, want, F.scaled_dot_product_attention(*exact, mask))


def test_it_computes_by_the_backend_that_is_named(device):
    query, key, value = (torch.randn(*s, device=device) for s in ((2, 1, 2, 3, 4), (2, 5, 4), (2, 2, 1, 5, 4)))
    mask = torch.randn(2, 1, 3, 1, device=device)

    def theirs(query, *rest):
        return F.scaled_dot_product_attention(query.expand(2, 2, 2, 3, 4), *rest)

    with fa.use_backend("triton"):
        got = results(compat.scaled_dot_product_attention, query, key, value, mask)
    assert_like(got, lambda: results(theirs, query, key, value, mask))
    with fa.use_backend("triton"), pytest.raises(NotImplementedError):
        compat.scaled_dot_product_attention(*(torch.randn(2, 600, device=device) for _ in range(3)))


def test_nested_tensors_take_a_scale():
    offsets = torch.tensor([0, 3, 10])
    inputs = [torch.nested.nested_tensor_from_jagged(torch.randn(10, 2, 8), offsets).transpose(1, 2) for _ in range(3)]
    found = compat.scaled_dot_product_attention(*inputs, scale=0.3, is_causal=True).unbind()
    for got, *one in zip(found, *(x.unbind() for x in inputs), strict=True):
        assert_like(got, lambda *x: F.scaled_dot_product_attention(*x, scale=0.3, is_causal=True), *one)
