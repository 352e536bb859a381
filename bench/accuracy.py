"""Whether what was timed is right: one head of the result against float64, beside the error of eager PyTorch there.

One kv head and the query heads that read it, of the last batch, is cheap at any length, and a wrong stride shows there
most. The rule is the one of the tests.
"""

import functools
from typing import NamedTuple

import torch

import fusedattn as fa
from fusedattn.tolerance import verdicts

GRADIENTS = ("query", "key", "value")


class Truth(NamedTuple):
    """The slice of a case as it should be, and as eager PyTorch computes it: {"out" or a gradient: tensor}."""

    oracle: dict
    eager: dict


def _slices(case, tensors):
    """Of (query, key, value, output) or of their gradients: the last kv head of the last batch, and who reads it."""
    heads = (case.Hq // case.Hkv, 1, 1, case.Hq // case.Hkv)
    return [tensor[-1:, -count:] for tensor, count in zip(tensors, heads, strict=False)]


def _with_gradients(attention, inputs, grad_out):
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    out = attention(*leaves)
    grads = torch.autograd.grad(out, leaves, grad_out)
    return {"out": out.detach()} | dict(zip(GRADIENTS, grads, strict=True))


def truth(case, tensors):
    """The Truth of a case: float64 through the blocks of the naive path, so that a long one fits."""
    *inputs, grad_out = _slices(case, tensors)
    attention, eager = (
        functools.partial(function, causal=case.causal) for function in (fa.reference.attention, fa.reference.eager)
    )
    return Truth(
        oracle=_with_gradients(attention, [tensor.double() for tensor in inputs], grad_out.double()),
        eager=_with_gradients(eager, inputs, grad_out),
    )


def judge(case, mode, result, truth):
    """(error, eager PyTorch's error, what is wrong or "") of what a step returned; of gradients, of the worst one."""
    if mode == "forward":
        (out,) = _slices(case, [result])
        got = {"out": out}
    else:
        got = dict(zip(GRADIENTS, _slices(case, result), strict=True))
    found = verdicts(got, truth.eager, {name: truth.oracle[name] for name in got})
    worst = max(found.values(), key=lambda one: (not one.ok, one.max_error / one.max_allowed))
    why = "; ".join(f"{name}: {one.why}" for name, one in found.items() if not one.ok)
    return worst.max_error, worst.max_eager, why
