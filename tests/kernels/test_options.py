"""Tests options against the definition, computed pair by pair in Python floats, and against exact results."""

import itertools
import math

import numpy
import pytest
import torch

import fusedattn as fa

from .. import sample
from ..close import assert_like

B, HQ, HKV, SQ, SK, D, DV = 2, 4, 2, 5, 6, 4, 3


def draw(dtype=torch.float64):
    shapes = (B, HQ, SQ, D), (B, HKV, SK, D), (B, HKV, SK, DV)
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


def bias(*shape):
    made = torch.randn(*shape, dtype=torch.float64)
    if made.shape[-2:] == (SQ, SK):
        made[..., 1, :] = float("-inf")  # a row that sees no key
        made[..., 2, ::2] = float("-inf")
    return made


OPTIONS = {
    "bias": lambda: dict(bias=bias(B, HQ, SQ, SK)),
    "bias over heads": lambda: dict(bias=bias(B, 1, SQ, SK)),
    "bias of rank 2": lambda: dict(bias=bias(SQ, SK)),
    "bias of keys": lambda: dict(bias=bias(1, HQ, 1, SK)),
    "bias of rows": lambda: dict(bias=bias(B, 1, SQ, 1)),
    "softcap": lambda: dict(softcap=0.7),
    "alibi": lambda: dict(alibi_slopes=torch.rand(HQ, dtype=torch.float64)),
    "alibi of each batch, top left": lambda: dict(
        alibi_slopes=torch.rand(B, HQ, dtype=torch.float64), align="top_left"
    ),
    "sinks": lambda: dict(sinks=torch.randn(HQ, dtype=torch.float64)),
    "dropout": lambda: dict(dropout_p=0.3, seed=1234567890123),
    "causal": lambda: dict(causal=True),
    "window": lambda: dict(window=(2, 1)),
    "left window, top left": lambda: dict(window=(1, None), align="top_left"),
    "right window": lambda: dict(window=(None, 1)),
    "negative scale": lambda: dict(scale=-0.3),
    "masks": lambda: dict(
        mask=torch.rand(B, 1, SQ, SK) < 0.7, query_mask=torch.rand(B, SQ) < 0.8, key_mask=torch.rand(B, SK) < 0.8
    ),
}


def by_the_definition(query, key, value, o):
    """Return (out, lse, weights), computed pair by pair in Python floats by the definition of `attention`."""
    shift = 0 if o.get("align") == "top_left" else SK - SQ
    left, right = (SK + SQ if side is None else side for side in o.get("window", (None, None)))
    right = min(right, 0) if o.get("causal") else right
    lse = torch.full((B, HQ, SQ), float("-inf"), dtype=torch.float64)
    weights = torch.zeros(B, HQ, SQ, SK, dtype=torch.float64)
    whole = torch.broadcast_to(o.get("bias", torch.zeros(1, 1)), (B, HQ, SQ, SK)).tolist()
    slopes = torch.broadcast_to(o.get("alibi_slopes", torch.zeros(HQ)), (B, HQ)).tolist()
    mask = torch.broadcast_to(o.get("mask", torch.ones(1, 1, dtype=torch.bool)), (B, HQ, SQ, SK))
    for b, h, i in itertools.product(range(B), range(HQ), range(SQ)):
        scores = {}
        for j in range(SK):
            s = o.get("scale", D**-0.5) * float(query[b, h, i] @ key[b, h // (HQ // HKV), j])
            if "softcap" in o:
                s = o["softcap"] * math.tanh(s / o["softcap"])
            s = s - slopes[b][h] * abs(i + shift - j) + whole[b][h][i][j]
            seen = mask[b, h, i, j] and s > float("-inf") and i + shift - left <= j <= i + shift + right
            if seen and all(name not in o or o[name][b, at] for name, at in (("query_mask", i), ("key_mask", j))):
                scores[j] = s
        total = sum(map(math.exp, scores.values())) + (math.exp(o["sinks"][h]) if "sinks" in o else 0.0)
        if total:
            lse[b, h, i] = math.log(total)
        for j, s in scores.items():
            weights[b, h, i, j] = math.exp(s) / total
    if "dropout_p" in o:
        words = torch.stack([by_numpy(o["seed"], plane, SQ, SK) for plane in range(B * HQ)]).view(B, HQ, SQ, SK)
        weights = weights * (words >= int(o["dropout_p"] * 2**32)) / (1 - o["dropout_p"])
    return weights @ value.repeat_interleave(HQ // HKV, 1), lse, weights


def by_numpy(seed, plane, rows, keys):
    """Return the dropout words of one head of one batch (`plane`): Philox4x32-7, computed by NumPy."""
    low, word = numpy.uint64(0xFFFFFFFF), numpy.uint64(32)
    i, j = numpy.arange(rows, dtype=numpy.uint64)[:, None], numpy.arange(keys, dtype=numpy.uint64)[None, :]
    i_half, j_half = ((x >> numpy.uint64(4)) * numpy.uint64(8) + (x & numpy.uint64(7)) for x in (i, j))
    zero = numpy.zeros((rows, keys), numpy.uint64)
    c0, c1, c2, c3 = i_half + zero, j_half + zero, zero + numpy.uint64(plane % 2**32), zero + numpy.uint64(plane >> 32)
    k0, k1 = seed % 2**32, seed % 2**64 >> 32
    for _ in range(7):
        a, b = c0 * numpy.uint64(0xD2511F53), c2 * numpy.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (b >> word) ^ c1 ^ numpy.uint64(k0), b & low, (a >> word) ^ c3 ^ numpy.uint64(k1), a & low
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    which = 2 * (i >> numpy.uint64(3) & numpy.uint64(1)) + (j >> numpy.uint64(3) & numpy.uint64(1))
    return torch.from_numpy(numpy.choose(which.astype(int), [c0, c1, c2, c3]).astype(numpy.int64))


def pairs(n):
    """Return test parameters: each option, and each pair of options, of which `make test` takes one in n."""
    pairs = (x for x in itertools.combinations(OPTIONS, 2) if x[0].split()[0] != x[1].split()[0])
    named = [pytest.param(x, id=" + ".join(x)) for x in (*((name,) for name in OPTIONS), *pairs)]
    return named[: len(OPTIONS)] + sample.one_in(n, named[len(OPTIONS) :])


@pytest.mark.parametrize("names", pairs(6))
def test_the_definition_pair_by_pair(names):
    tensors, options = draw(), {name: option for each in names for name, option in OPTIONS[each]().items()}
    got = fa.attention(*tensors, **options, return_lse=True, return_weights=True)
    assert torch.equal(got[0], fa.attention(*tensors, **options))
    assert_like(got, by_the_definition(*tensors, options))


@pytest.fixture(params=["naive", "triton"])
def backend(request, device):
    with fa.use_backend(request.param):
        yield request.param


def on(device, dtype, requires_grad=False):
    return [x.detach().to(device).requires_grad_(requires_grad) for x in draw(dtype)]


def test_any_floating_dtype_of_bias_slopes_and_sinks(device, backend):
    tensors = on(device, torch.float32)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        options = dict(bias=torch.randn(SQ, SK), alibi_slopes=torch.rand(HQ), sinks=torch.randn(HQ))
        options = {name: x.to(device, dtype).requires_grad_() for name, x in options.items()}
        out = fa.attention(*tensors, **options)
        assert out.dtype == torch.float32
        assert all(g.dtype == dtype for g in torch.autograd.grad(out.sum(), list(options.values())))
        given = {name: x.detach() for name, x in options.items()}
        assert_like(out, lambda given=given: fa.reference.eager(*tensors, **given))


def test_a_bias_of_any_strides_is_read_where_it_lies(device, backend):
    tensors, wide = on(device, torch.float32), torch.randn(SK, 3, SQ, device=device)
    for given in (wide[:, 1].T, wide.permute(1, 2, 0)[:1, None], wide[0, 0, :1].expand(B, HQ, SQ, SK)):
        same = given.contiguous()
        assert torch.equal(fa.attention(*tensors, bias=given), fa.attention(*tensors, bias=same))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.one_in(4)
def test_a_row_of_the_lowest_number_is_not_empty(dtype, device, backend):
    tensors = on(device, torch.float32, requires_grad=True)
    lowest = torch.zeros(SQ, SK, dtype=dtype, device=device)
    lowest[1] = torch.finfo(dtype).min
    out, lse, weights = fa.attention(*tensors, bias=lowest, return_lse=True, return_weights=True)
    assert_like(weights[:, :, 1], torch.full((B, HQ, SK), 1 / SK, device=device, dtype=torch.float64))
    assert_like(out[:, :, 1], lambda: tensors[2].mean(2).repeat_interleave(HQ // HKV, 1))
    assert lse.isfinite().all()
    # Its gradients, through output, lse and weights, are those of a mean over the keys.
    given = [torch.randn_like(x) for x in (out, lse, weights)]
    bias = lowest.clone().requires_grad_()
    results = fa.attention(*tensors, bias=bias, return_lse=True, return_weights=True)
    grads = torch.autograd.grad(results, [*tensors, bias], given)
    flat, query = torch.zeros(SQ, SK, device=device, requires_grad=True), tensors[0].detach().clone()
    query[:, :, 1] = 0.0  # the bias absorbs the products of this row, so key has no gradient from it

    def by_formula():
        results = fa.reference.eager(query, *tensors[1:], bias=flat, return_lse=True, return_weights=True)
        return torch.autograd.grad(results, [tensors[2], flat], given)

    assert_like(grads[2:], by_formula)


def test_a_sink_of_minus_infinity_is_none(device, backend):
    tensors, sinks = on(device, torch.float32), torch.full((HQ,), float("-inf"), device=device)
    assert_like(fa.attention(*tensors, sinks=sinks), fa.reference.eager, *tensors)


@pytest.mark.parametrize("cap", [1e-3, 1e-30, 3e38])
def test_caps_of_any_size(cap, device, backend):
    tensors = on(device, torch.float32, requires_grad=True)
    out = fa.attention(*tensors, softcap=cap)
    assert_like(out, lambda: fa.reference.eager(*tensors, softcap=cap))
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.sum(), tensors))
    # The derivative of a score of 0 is 1, however small the cap is.
    query = torch.zeros_like(tensors[0], requires_grad=True)

    def grad(attend, **options):
        return torch.autograd.grad(attend(query, *tensors[1:], **options)[..., 0].sum(), query)[0]

    assert_like(grad(fa.attention, softcap=cap), grad, fa.reference.eager)


def test_dropout_keeps_the_same_weights_on_every_path(device):
    """Output, weights and gradients drop by the words of `by_numpy`, in tiles [rows, keys] and [keys, rows]."""
    rows, keys, seed = 33, 50, 2**63 - 25
    query, key, value = (torch.randn(B, HQ, n, 16, device=device, requires_grad=True) for n in (rows, keys, keys))
    options = dict(dropout_p=0.4, seed=seed, backend="triton")
    words = torch.stack([by_numpy(seed, plane, rows, keys) for plane in range(B * HQ)]).view(B, HQ, rows, keys)
    kept = (words >= int(0.4 * 2**32)).to(device)
    out, weights = fa.attention(query, key, value, return_weights=True, **options)
    assert torch.equal(weights > 0, kept)
    (grad,) = torch.autograd.grad(out, value, torch.ones_like(out))
    assert_like((out, grad), lambda: (weights @ value, weights.mT @ torch.ones_like(out)))


def test_dropout_of_everything_and_of_nothing(device, backend):
    tensors = on(device, torch.float32, requires_grad=True)
    out = fa.attention(*tensors, dropout_p=1.0)
    assert (out == 0).all() and all((grad == 0).all() for grad in torch.autograd.grad(out.sum(), tensors))
    state = torch.get_rng_state()
    assert torch.equal(fa.attention(*tensors, dropout_p=0.0, seed=3), fa.attention(*tensors))
    assert torch.equal(torch.get_rng_state(), state)


def test_weights_come_in_the_dtype_and_rank_of_the_query(device, backend):
    query, key, value = (torch.randn(3, s, 8, device=device).bfloat16() for s in (4, 5, 5))
    out, weights = fa.attention(query, key, value, return_weights=True)
    assert weights.shape == (3, 4, 5) and weights.dtype == torch.bfloat16
    assert fa.attention(query[0], key[0], value[0], return_weights=True)[1].shape == (4, 5)
    assert torch.equal(fa.attention(query, key, value), out)
