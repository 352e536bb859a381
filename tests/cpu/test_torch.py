"""Tests the backend "cpu" inside PyTorch: exports, hooks, autocast and forked processes."""

import pytest
import torch
import torch.utils.checkpoint

import fusedattn as fa

from ..close import assert_like
from ..inside import alike as draw, same


@pytest.fixture(autouse=True)
def _compiled_anew():
    torch.compiler.reset()


def test_many_gradients_at_once_and_tensors_that_were_elsewhere():
    leaves = draw(1, 2, 90, 16, requires_grad=True)
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
    leaves = [(x + 3.0).bfloat16() for x in draw(3, 2, max(lengths), 16)]
    key_mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    out, pull = torch.func.vjp(lambda *x: fa.attention(*x, key_mask=key_mask, backend="cpu"), *leaves)
    incoming = torch.randn(3, *out.shape).bfloat16()
    grads = torch.vmap(pull)(incoming)
    for number, one in enumerate(incoming):
        same([grad[number] for grad in grads], pull(one))


@pytest.mark.parametrize("keys", [64, 65])
def test_autocast_around_a_backward_rounds_nothing(keys):
    for _ in range(3):  # the last call is a replay
        inputs = [x.requires_grad_() for x in draw(1, 2, keys, 16)]
        grad, out = torch.randn(1, 2, keys, 16), fa.attention(*inputs, backend="cpu")
        want = torch.autograd.grad(out, inputs, grad, retain_graph=True)
        with torch.autocast("cpu", torch.bfloat16):
            same(torch.autograd.grad(out, inputs, grad), want)
