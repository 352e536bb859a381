"""Operators computed by the naive path, for backends without a kernel and kernels that do not run on this machine."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..call import private
from ..call.layout import row_major
from ..call.options import INPUTS, Call, wide_dtype
from ..launch.failures import KernelUnavailable, fall_back
from ..naive import formula


def by_kernel(call: Call, launches: Sequence[Callable[[], None]], naive: Callable[[], None]) -> None:
    """Run the first launch whose kernels run here, otherwise the naive path. Warn about kernels that do not run."""
    for launch in launches:
        try:
            return launch()
        except KernelUnavailable as why:
            fall_back(why, call.named)
    naive()


def fill(targets: Sequence[Tensor], results: Sequence[Tensor | None]) -> None:
    """Copy results into targets. An empty target means that its result is not needed."""
    for target, x in zip(targets, results, strict=False):
        if x is not None and target.numel():
            target.copy_(x)


def results(call: Call, need_lse: bool, need_weights: bool, save: bool) -> tuple[Tensor, ...]:
    """Compute (output, lse, weights, stats) by the naive path. Results that are not needed are empty."""
    out, *more = formula.run_naive(call, need_lse, need_weights)
    nothing = out.new_empty(0), out.new_empty(0)
    # torch wants the same layout for a result and its tangent.
    lse, weights = (empty if x is None else row_major(x) for x, empty in zip(more, nothing, strict=True))
    return out, lse, weights, out.new_empty((*out.shape[:3], 0) if save else (0,), dtype=wide_dtype(call))


def gradients(grads: Sequence[Tensor], incoming: Sequence[Tensor | None], call: Call) -> None:
    """Compute gradients by the naive path into `grads`. An empty tensor means that its gradient is not needed."""
    wanted = {name: grad for name, grad in zip(INPUTS, grads, strict=True) if grad.numel()}
    if not wanted:
        return
    with private.autograd_inside(call.query.device), torch.enable_grad():
        leaves = {name: getattr(call, name).detach().requires_grad_() for name in wanted}
        of_lse, of_weights = (grad is not None for grad in incoming[1:])
        outcome = formula.run_naive(call._replace(**leaves), of_lse, of_weights)
        pairs = [(x, grad) for x, grad in zip(outcome, incoming, strict=True) if grad is not None]
        pairs = [(x, grad.to(x.dtype)) for x, grad in pairs if x.requires_grad]  # lse does not depend on value
        results, cotangents = zip(*pairs, strict=True) if pairs else ((), ())
        options = dict(allow_unused=True, materialize_grads=True)
        gradients = torch.autograd.grad(results, list(leaves.values()), cotangents, **options)
    for grad, x in zip(wanted.values(), gradients, strict=True):
        grad.copy_(x)
