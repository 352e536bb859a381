"""Inputs, options and comparisons for tests of attention inside PyTorch."""

import functools
import importlib.util
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fusedattn as fa
from fusedattn.call import decode, rules
from fusedattn.call.options import Arguments, Call
from fusedattn.compat import _switch

from .conftest import INTERPRETED

compiled = pytest.mark.skipif(INTERPRETED, reason="`make ptx` runs it, without TRITON_INTERPRET")
interpreted = pytest.mark.skipif(
    not INTERPRETED or importlib.util.find_spec("triton") is None, reason="on the CPU kernels need TRITON_INTERPRET=1"
)
TRITON = pytest.param("triton", marks=interpreted)

BACKENDS = ("naive", "triton")
HQ, HKV, SQ, SK, D, DV = 2, 1, 9, 11, 16, 8


def draw(device, batch=2, sq=SQ, sk=SK, dtype=torch.float32, requires_grad=False):
    shapes = (batch, HQ, sq, D), (batch, HKV, sk, D), (batch, HKV, sk, DV)
    return [torch.randn(s, dtype=dtype, device=device, requires_grad=requires_grad) for s in shapes]


def alike(*shape, **more):
    return [torch.randn(shape, **more) for _ in range(3)]


def named(query, key, value, out):
    return dict(query=query, key=key, value=value, out=out)


def leaves(*tensors):
    return [x.detach().clone().requires_grad_() for x in tensors]


def fields(query, key, value, **options):
    plain = dict.fromkeys(Call._fields) | dict(top_left=False, scale=0.25, dropout_p=0.0, deterministic=False)
    return Call(**plain | dict(query=query, key=key, value=value) | options)


def call_of(query, key, value, **options):
    return rules.checked(Arguments(query, key, value, **options))


def cache_call(arguments):
    given = {name: x for name, x in arguments.items() if name in decode.CacheArguments._fields}
    options = {name: x for name, x in arguments.items() if name not in given}
    return decode.checked(decode.CacheArguments(**given), Arguments(None, None, None, **options))


def leaves_of(arguments):
    """Return an operator's arguments, where floating tensors are copies that require gradients."""
    floating = lambda x: isinstance(x, torch.Tensor) and x.is_floating_point()  # noqa: E731
    return [x.detach().clone().requires_grad_() if floating(x) else x for x in arguments]


def shake(module, spread=0.1):
    """Add noise to all parameters, because tests would not notice an unused bias that is 0."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * spread)
    return module


def by(backend):
    return fa.reference.eager if backend == "eager" else functools.partial(fa.attention, backend=backend)


def differentiated(function, inputs, incoming=None, **options):
    """Return the output of a function and the gradients of its inputs, by default from gradients of 1."""
    out = function(*inputs, **options)
    return [out, *torch.autograd.grad(out, inputs, torch.ones_like(out) if incoming is None else incoming)]


def same(got, want):
    for a, b in zip(tree_leaves(got), tree_leaves(want), strict=True):
        assert torch.equal(a, b)


class Plain(torch.Tensor):
    """Tensor subclass without methods of its own, whose tensors have addresses, as torch's own have."""


class Seen(TorchDispatchMode):
    """Keeps the names of operators that run, and of each tensor they return (operator, elements, bytes of storage)."""

    def __init__(self):
        super().__init__()
        self.names, self.made = set(), []

    def __torch_dispatch__(self, operator, types, arguments=(), options=None):
        self.names.add(str(operator))
        results = operator(*arguments, **(options or {}))
        tensors = [x for x in tree_leaves(results) if isinstance(x, torch.Tensor)]
        self.made += [(str(operator), x.numel(), x.untyped_storage().nbytes()) for x in tensors]
        return results


OPTIONS = {
    "plain": lambda sq, sk, device: {},
    "causal": lambda sq, sk, device: dict(causal=True),
    "window": lambda sq, sk, device: dict(window=(3, 1), align="top_left"),
    "masks": lambda sq, sk, device: dict(
        mask=torch.ones(sq, sk, dtype=torch.bool, device=device).tril(4),
        key_mask=torch.arange(sk, device=device)[None] < sk - 2,
        query_mask=torch.arange(sq, device=device) > 0,
    ),
    "scale": lambda sq, sk, device: dict(scale=-0.3),
    "dropout": lambda sq, sk, device: dict(dropout_p=0.4, seed=torch.tensor([7], device=device)),
    "added": lambda sq, sk, device: dict(
        bias=torch.randn(HQ, 1, sk, device=device)[None].requires_grad_(),
        alibi_slopes=torch.rand(HQ, device=device, requires_grad=True),
        sinks=torch.randn(HQ, device=device, requires_grad=True),
        softcap=3.0,
    ),
}


def learned(options):
    return [x for x in options.values() if isinstance(x, torch.Tensor) and x.requires_grad]


def loss(backend):
    def compute(query, key, value):
        out, lse = by(backend)(query, key, value, causal=True, return_lse=True)
        return out.square().sum() + lse.nan_to_num(0, 0, 0).square().sum()

    return compute


def provider_on_cpu(get_kernel):
    """Register the provider's operators for CPU tensors, for which torch has none, until `.remove()` is called."""
    with mock.patch.object(torch.library, "get_kernel", get_kernel):
        return _switch.Override(_switch.REPLACED, "CPU")
