"""Tests scales that are tensors of rank 0, as in torch, or numbers of NumPy."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fusedattn as fa
from fusedattn import distributed
from fusedattn.compat import flash_attn, torch as compat

from ..close import assert_like
from ..inside import differentiated, same
from ..mistakes import assert_named, of_values, wrong

X, OFFSETS = (
    torch.randn(2, 4, 8, 16, generator=torch.Generator().manual_seed(0)),
    torch.tensor([0, 5, 8], dtype=torch.int32),
)
ROWS, LENGTHS = X[0].transpose(0, 1), torch.tensor([8, 3], dtype=torch.int32)
NESTED = torch.nested.nested_tensor([*X], layout=torch.jagged)
PACKED = ROWS, ROWS, ROWS, OFFSETS, OFFSETS


def module(kind, *sizes):
    def run(scale):
        torch.manual_seed(0)
        return kind(*sizes, scale=scale)(X[0])[0]

    return run


CALLS = dict(
    attention=lambda scale: fa.attention(X, X, X, scale=scale),
    varlen=lambda scale: fa.attention_varlen(*PACKED, scale=scale),
    decode=lambda scale: fa.attention_decode(X[:, :, :1], X, X, cache_seqlens=LENGTHS, scale=scale),
    reference=lambda scale: fa.reference.attention(X, X, X, scale=scale),
    eager=lambda scale: fa.reference.eager(X, X, X, scale=scale),
    jagged=lambda scale: fa.attention(*[NESTED.transpose(1, 2)] * 3, scale=scale).transpose(1, 2),
    ring=lambda scale: distributed.ring_attention(X, X, X, scale=scale),
    gather=lambda scale: distributed.gather_attention(X, X, X, scale=scale),
    gather_varlen=lambda scale: distributed.gather_attention_varlen(ROWS, ROWS, ROWS, OFFSETS, scale=scale),
    ulysses=lambda scale: distributed.ulysses_attention(X, X, X, scale=scale),
    module=module(fa.MultiHeadAttention, 16, 2),
    self_attention=module(fa.SelfAttention, 16),
    layer=lambda scale: module(fa.layers.TransformerEncoderLayer, 16, 2, 32)(scale),
    sdpa=lambda scale: compat.scaled_dot_product_attention(X, X, X, scale=scale),
    flash=lambda scale: flash_attn.flash_attn_func(X, X, X, softmax_scale=scale),
    flash_varlen=lambda scale: flash_attn.flash_attn_varlen_func(*PACKED, 5, 5, softmax_scale=scale),
    flash_cache=lambda scale: flash_attn.flash_attn_with_kvcache(X, X, X, softmax_scale=scale),
)
RANK_0 = [torch.tensor(0.3), torch.tensor(2), torch.tensor(0.25, dtype=torch.float16), nn.Buffer(torch.tensor(0.7))]


@pytest.mark.parametrize("name", CALLS)
def test_it_is_the_number(name):
    for scale in RANK_0:
        same(CALLS[name](scale).unbind(), CALLS[name](scale.item()).unbind())


@pytest.mark.parametrize("name", CALLS)
def test_one_that_requires_a_gradient_is_refused_by_name(name):
    learned = nn.Parameter(torch.tensor(0.3))
    with torch.no_grad(), pytest.raises(TypeError, match="scale: expected .* requires grad"):
        CALLS[name](learned)


def test_a_call_sees_the_number_that_a_tensor_holds_now():
    scale = torch.tensor(0.3)
    for _ in range(4):
        scale += 0.5
        assert torch.equal(fa.attention(X, X, X, scale=scale), fa.attention(X, X, X, scale=scale.item()))


def test_what_holds_no_number_is_refused():
    given, values = dict(query=X, key=X, value=X), [torch.ones(1), torch.tensor(True), torch.tensor(1j)]
    for row in of_values(dict(scale=[*values, torch.tensor(1.0, device="meta")]), TypeError):
        assert_named(fa.attention, given, row)
    assert_named(fa.attention, given, wrong("scale", scale=torch.tensor(torch.inf)))
    with pytest.raises(TypeError, match="^scale: expected "):
        torch.vmap(lambda x: fa.attention(X, X, X, scale=x))(torch.ones(2))


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.one_in(2)
def test_compiled(whole):
    """Compiled calls accept a scale tensor; under fullgraph it must be a constant, as for torch's own function."""

    def attend(query, scale):
        return compat.scaled_dot_product_attention(query, X, X, scale=torch.tensor(0.5) if whole else scale)

    query, scale = X.clone().requires_grad_(), torch.tensor(0.5)
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=whole)
    for _ in range(2):
        got = differentiated(compiled, [query], scale=scale)
        torchs = functools.partial(F.scaled_dot_product_attention, key=X, value=X, scale=scale.item())
        assert_like(got, differentiated, torchs, [query])
        if not whole:
            scale.mul_(2)


def test_options_may_be_numbers_of_numpy():
    numpy = pytest.importorskip("numpy")
    options = dict(scale=0.5, softcap=3.0, window=(2, 1), dropout_p=0.5, seed=3)
    of_numpy = dict(scale=numpy.float32(0.5), softcap=numpy.float64(3), window=(numpy.int32(2), numpy.int64(1)))
    of_numpy |= dict(dropout_p=numpy.float16(0.5), seed=numpy.int64(3))
    for _ in range(4):  # the last calls are replays
        assert torch.equal(fa.attention(X, X, X, **of_numpy), fa.attention(X, X, X, **options))
    longest = dict(max_seqlen_q=numpy.int32(5), max_seqlen_k=numpy.int64(5))
    got, want = (fa.attention_varlen(*PACKED, return_weights=True, **each)[1] for each in (longest, {}))
    assert torch.equal(got, want)


@pytest.mark.parametrize("layer", [fa.MultiHeadAttention, compat.MultiheadAttention], ids=["ours", "torch's"])
def test_sizes_may_be_numbers_of_numpy(layer):
    numpy = pytest.importorskip("numpy")
    made = layer(numpy.int64(16), numpy.int32(2), dropout=numpy.float32(0.5), kdim=numpy.int64(4))
    assert {type(x) for x in (made.embed_dim, made.num_heads, made.kdim, made.head_dim)} == {int}
    assert type(made.dropout) is float


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit.trace.*:DeprecationWarning")
def test_a_traced_call_has_the_default_scale_in_float64():
    query = X[..., :8].double()  # 8 ** -0.5 is no float32
    traced = torch.jit.trace(lambda x: fa.attention(x, x, x), (query,))
    assert torch.equal(traced(query), fa.attention(query, query, query))
