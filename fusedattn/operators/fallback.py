"""Computes an operator by the naive path, where its kernel does not compile or load on this machine."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..call import private
from ..call.decode import Decode
from ..call.layout import row_major
from ..call.options import INPUTS, Call, wide_dtype
from ..launch.failures import KernelUnavailable, fall_back
from ..naive import decode as cached, formula


def forward(results: Sequence[Tensor], call: Call, why: KernelUnavailable) -> None:
    """Fill (output, lse, weights, stats) of a call; empty ones are not wanted.

    No kernel of a backward can use stats: it is the naive path's as well, and they are NaN.
    """
    fall_back(why, call.named)
    out, lse, weights, stats = results
    _fill((out, lse, weights), formula.run_naive(call, bool(lse.numel()), bool(weights.numel())))
    stats.fill_(float("nan"))


def _fill(results: Sequence[Tensor], computed: Sequence[Tensor | None]) -> None:
    for target, x in zip(results, computed, strict=False):
        if x is not None and target.numel():
            target.copy_(x)


def results(call: Call, need_lse: bool, need_weights: bool, save: bool) -> tuple[Tensor, ...]:
    """Return (output, lse, weights, stats) by the naive path; empty if not needed."""
    out, *more = formula.run_naive(call, need_lse, need_weights)
    nothing = out.new_empty(0), out.new_empty(0)
    # A tangent must have the layout of what it is one of.
    lse, weights = (empty if x is None else row_major(x) for x, empty in zip(more, nothing, strict=True))
    return out, lse, weights, out.new_empty((*out.shape[:3], 0) if save else (0,), dtype=wide_dtype(call))


def backward(grads: Sequence[Tensor], incoming: Sequence[Tensor | None], call: Call, why: KernelUnavailable) -> None:
    fall_back(why, call.named)
    gradients(grads, incoming, call)


def gradients(grads: Sequence[Tensor], incoming: Sequence[Tensor | None], call: Call) -> None:
    """Fill the gradients by the naive path; empty ones are not wanted."""
    with private.autograd_inside(call.query.device), torch.enable_grad():
        wanted = {name: grad for name, grad in zip(INPUTS, grads, strict=True) if grad.numel()}
        leaves = {name: getattr(call, name).detach().requires_grad_() for name in wanted}
        of_lse, of_weights = (grad is not None for grad in incoming[1:])
        outcome = formula.run_naive(call._replace(**leaves), of_lse, of_weights)
        came = [(x, grad) for x, grad in zip(outcome, incoming, strict=True) if grad is not None]
        pairs = [(x, grad.to(x.dtype)) for x, grad in came if x.requires_grad]  # lse does not depend on value
        inputs = list(leaves.values())
        if not inputs:  # what is wanted has no elements
            return
        results, cotangents = zip(*pairs, strict=True) if pairs else ((), ())
        gradients = torch.autograd.grad(results, inputs, cotangents, allow_unused=True, materialize_grads=True)
    for grad, x in zip(wanted.values(), gradients, strict=True):
        grad.copy_(x)


def append(decode: Decode, why: KernelUnavailable) -> None:
    fall_back(why, decode.call.named)
    cached.append(decode)


def decode(results: Sequence[Tensor], decode: Decode, why: KernelUnavailable) -> None:
    """Fill (output, lse) of a call to a cache; an empty lse is not wanted."""
    fall_back(why, decode.call.named)
    out, lse = results
    _fill((out, lse), formula.run_naive(cached.dense(decode), bool(lse.numel()), False))
