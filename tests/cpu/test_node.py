"""Tests the autograd node of a CPU call: incoming gradients, many at once, hooks, autocast; and its bits."""

import functools
import threading

import pytest
import torch

import fusedattn as fa

from ..close import assert_like
from ..conftest import in_threads
from ..inside import alike, same


def draw():
    return alike(1, 2, 90, 16, dtype=torch.float64, requires_grad=True)


def attend(leaves, **options):
    return fa.attention(*leaves, causal=True, **options)


HOSTILE = {
    "of one number": lambda x: x[:, :, :1, :1].expand_as(x),
    "of one row": lambda x: x[:, :, :1].expand_as(x),
    "columns apart": lambda x: x.mT.contiguous().mT,
    "rows that overlap": lambda x: x.reshape(-1).as_strided(x.shape, (1000, 400, 1, 1)),
    "negated": lambda x: torch._neg_view(x),
    "of nothing": lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_any_gradient_of_the_output(name):
    leaves = draw()
    plain = torch.randn(1, 2, 90, 16, dtype=torch.float64)
    hostile = HOSTILE[name](plain)
    for incoming in (plain, hostile):
        want = torch.autograd.grad(attend(leaves, backend="naive"), leaves, incoming.clone())
        assert_like(torch.autograd.grad(attend(leaves), leaves, incoming), want)


def test_two_threads_differentiate_one_graph():
    leaves = draw()
    out = attend(leaves)
    want = torch.autograd.grad(out.sum(), leaves, retain_graph=True)
    found, ready = [], threading.Barrier(2)

    def work(create_graph):
        ready.wait()
        for _ in range(20):
            found.append(torch.autograd.grad(out.sum(), leaves, retain_graph=True, create_graph=create_graph))

    in_threads(functools.partial(work, False), functools.partial(work, True))
    assert len(found) == 40
    for grads in found:
        assert_like(grads, want)


def test_many_gradients_at_once_and_tensors_that_were_elsewhere():
    leaves = alike(1, 2, 90, 16, requires_grad=True)
    for _ in range(3):
        with torch.autograd.graph.save_on_cpu():
            out = fa.attention(*leaves, backend="cpu")
        incoming = torch.randn(3, *out.shape)
        grads = torch.autograd.grad(out, leaves, incoming, is_grads_batched=True)
        for number, one in enumerate(incoming):
            want = lambda one: torch.autograd.grad(fa.reference.eager(*leaves), leaves, one)  # noqa: E731
            assert_like([grad[number] for grad in grads], want, one)


@pytest.mark.parametrize("lengths", [(40, 15, 1), (40, 39, 5), (200, 150, 200)], ids=str)
def test_many_gradients_of_values_with_much_in_common(lengths):
    """Mapped gradients (vmap) subtract the same mean of the values as the forward, although the batch differs."""
    leaves = [(x + 3.0).bfloat16() for x in alike(3, 2, max(lengths), 16)]
    key_mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    out, pull = torch.func.vjp(lambda *x: fa.attention(*x, key_mask=key_mask, backend="cpu"), *leaves)
    incoming = torch.randn(3, *out.shape).bfloat16()
    grads = torch.vmap(pull)(incoming)
    for number, one in enumerate(incoming):
        same([grad[number] for grad in grads], pull(one))


@pytest.mark.parametrize("keys", [64, 65])
def test_autocast_around_a_backward_rounds_nothing(keys):
    for _ in range(3):  # the last call is a replay
        inputs = [x.requires_grad_() for x in alike(1, 2, keys, 16)]
        grad, out = torch.randn(1, 2, keys, 16), fa.attention(*inputs, backend="cpu")
        want = torch.autograd.grad(out, inputs, grad, retain_graph=True)
        with torch.autocast("cpu", torch.bfloat16):
            same(torch.autograd.grad(out, inputs, grad), want)


ROWS, KEYS = 20, 90
DTYPES = torch.float32, torch.bfloat16, torch.float16, torch.float64
LEARNED = "bias", "alibi_slopes", "sinks"


def options():
    torch.manual_seed(0)
    return {
        "plain": {}, "causal": dict(causal=True), "window": dict(window=(20, 3)),
        "mask": dict(mask=torch.rand(ROWS, KEYS) < 0.7), "bias": dict(bias=torch.randn(1, 4, ROWS, KEYS)),
        "alibi_slopes": dict(alibi_slopes=torch.rand(4)), "sinks": dict(sinks=torch.randn(4)),
        "key_mask": dict(key_mask=torch.arange(KEYS) < torch.tensor([[30], [80]])),
        "query_mask": dict(query_mask=torch.rand(2, ROWS) < 0.8), "softcap": dict(softcap=3.0),
        "dropout": dict(dropout_p=0.3, seed=3),
        "dropout and mask": dict(dropout_p=0.3, seed=3, mask=torch.rand(ROWS, KEYS) < 0.7, causal=True),
    }  # fmt: skip


def outputs(query, key, value, more):
    for requires in (False, True):
        inputs = [x.detach().requires_grad_(requires) for x in (query, key, value)]
        given = {name: x.detach().requires_grad_(requires) if name in LEARNED else x for name, x in more.items()}
        for lse in (False, True):
            for weights in (False, True):
                for _ in range(2):
                    found = fa.attention(*inputs, **given, return_lse=lse, return_weights=weights)
                    yield found[0] if lse or weights else found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", options())
@pytest.mark.parametrize("dim, keys, common", [(8, KEYS, 0.0), (32, 40, 0.0), (32, KEYS, 4.0)])
@pytest.mark.one_in(5)
def test_an_output_has_the_same_bits(dtype, name, dim, keys, common):
    more = options()[name]
    cut = {key: x[..., :keys] for key, x in more.items() if key in ("mask", "bias", "key_mask")}
    query, key, value = (torch.randn(2, heads, rows, dim) for heads, rows in ((4, ROWS), (2, keys), (2, keys)))
    first, *others = outputs(query.to(dtype), key.to(dtype), (value + common).to(dtype), more | cut)
    assert all(torch.equal(first, x) for x in others)
