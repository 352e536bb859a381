"""Tests the autograd node of a CPU call: incoming gradients, hooks, and repeated backwards."""

import functools
import threading

import pytest
import torch

import fusedattn as fa

from ..close import assert_like
from ..conftest import in_threads
from ..inside import alike

NAIVE = dict(backend="naive")


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
        want = torch.autograd.grad(attend(leaves, **NAIVE), leaves, incoming.clone())
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
