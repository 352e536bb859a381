"""Gradients of the kernels against finite differences, in float64 in the interpreter, for each option."""

import pytest
import torch

import fusedattn as fa

from . import cases

SMALL = dict(Sq=5, Sk=6, D=3, Dv=2)
OPTIONS = {name: fields for name, fields in cases.FEATURES.items() if not fields.keys() & SMALL.keys()}


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_against_finite_differences(name, device):
    if device != "cpu":
        pytest.skip("float64 is for the interpreter")
    case = cases.Case(name)._replace(**SMALL, dtype=torch.float64)._replace(**OPTIONS[name])
    if case.window is not None:  # narrow enough to hide something of so few keys
        case = case._replace(window=tuple(None if side is None else side % 3 for side in case.window))
    tensors, options = case.draw()
    for hidden in ("key", "value", "query"):  # finite differences of what is NaN are NaN
        tensors[hidden] = tensors[hidden].nan_to_num(0.0, 0.0, 0.0)
    inputs = [tensors[x].detach().clone().requires_grad_() for x in ("query", "key", "value")]

    def compute(*inputs):
        out, lse = fa.attention(*inputs, return_lse=True, backend="triton", **options)
        return out, lse.masked_fill(lse.isinf(), 0.0)

    assert torch.autograd.gradcheck(compute, inputs, fast_mode=True)
