"""Gradients of a tangent that are taken while its `dual_level` is still open."""

import pytest
import torch
from torch.autograd import forward_ad

import fusedattn as fa

from ..close import assert_like

OPTIONS = {
    "plain": lambda: {},
    "causal": lambda: dict(causal=True),
    "bias": lambda: dict(bias=_leaf(1, 2, 5, 5)),
    "slopes": lambda: dict(alibi_slopes=_leaf(2), causal=True),
    "sinks": lambda: dict(sinks=_leaf(2)),
    "softcap": lambda: dict(softcap=3.0),
    "dropout": lambda: dict(dropout_p=0.3, seed=3),
}


def _leaf(*shape):
    return torch.randn(shape, dtype=torch.float64).requires_grad_()


def gradients(attend, inputs, direction, options):
    """Gradients of all inputs and learned options, of the squares of what the tangents of all results are."""
    query, *others = inputs
    learned = [*inputs, *(x for x in options.values() if isinstance(x, torch.Tensor))]
    with forward_ad.dual_level():
        results = attend(forward_ad.make_dual(query, direction), *others, **options)
        total = sum(forward_ad.unpack_dual(x).tangent.square().sum() for x in results)
        found = torch.autograd.grad(total, learned)
    return [forward_ad.unpack_dual(x).primal for x in found]


def by_func(attend, inputs, direction, options):
    """The same by `torch.func` alone."""
    names = [name for name, x in options.items() if isinstance(x, torch.Tensor)]

    def total(query, key, value, *learned):
        given = options | dict(zip(names, learned, strict=True))
        tangents = torch.func.jvp(lambda x: attend(x, key, value, **given), (query,), (direction,))[1]
        return sum(x.square().sum() for x in tangents)

    inputs = *inputs, *(options[name] for name in names)
    return torch.func.grad(total, argnums=tuple(range(len(inputs))))(*inputs)


@pytest.mark.parametrize("weights", [False, True], ids=["output and lse", "weights too"])
@pytest.mark.parametrize("backend", [None, "naive"], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_are_those_of_the_formula(name, backend, weights):
    torch.manual_seed(0)
    *inputs, direction = (_leaf(1, 2, 5, 16) for _ in range(4))
    options, asked = OPTIONS[name](), dict(return_lse=True, return_weights=weights)
    found = gradients(
        lambda *x, **more: fa.attention(*x, **more, **asked, backend=backend), inputs, direction.detach(), options
    )
    want = by_func(lambda *x, **more: fa.reference.attention(*x, **more, **asked), inputs, direction.detach(), options)
    assert_like(found, want)


def test_gradients_of_packed_sequences():
    torch.manual_seed(0)
    *inputs, direction = (_leaf(9, 2, 16) for _ in range(4))
    offsets = torch.tensor([0, 4, 9], dtype=torch.int32)

    def attend(function):
        return lambda *x: function(*x, offsets, offsets, causal=True, return_lse=True)

    found = gradients(attend(fa.attention_varlen), inputs, direction.detach(), {})
    assert_like(found, by_func(attend(fa.reference.attention_varlen), inputs, direction.detach(), {}))
