"""The torch.library operator `tangent`, which computes the JVP of attention, and its own derivatives.

It is linear in the tangents of the inputs, so its gradient with respect to them is the backward. Its gradient with
respect to the inputs is a product with the second derivative, as is the derivative of the backward.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..call.layout import arrange, row_major
from ..call.options import INPUTS, Call
from ..naive.tangent import tangent as naive_tangent
from . import rules
from .backward import gradients
from .derived import double_backward, double_tangent, plus
from .namespace import Node, register
from .schema import KERNELS, RESULTS, TANGENT, by_kernel, fill, new_results, rounded_lengths, saved


def _new(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    _, call, (need_weights, _) = TANGENT.split(arguments)
    return new_results(call, True, need_weights)


def _by_formula(call: Call, directions: Sequence[Tensor | None], need_weights: bool) -> tuple[Tensor, Tensor, Tensor]:
    out, lse, weights = naive_tangent(call, directions, need_weights)
    return arrange(out, call.query), row_major(lse), call.query.new_empty(0) if weights is None else row_major(weights)


def _tangent(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    (*directions, out, stats), call, (need_weights, backend) = TANGENT.split(arguments)
    if backend not in KERNELS or not out.numel():
        return _by_formula(call, directions, need_weights)
    results = _new(*arguments)
    from ..launch import run
    from ..launch.forward import launch_tangent

    def launch():
        if (why := run.without_stats(call, stats, need_weights, backend)) is not None:
            raise why
        filled = *results[:2], results[2] if need_weights else None
        launch_tangent(*filled, directions, out, stats.contiguous(), rounded_lengths(call, need_weights))

    by_kernel(call, [launch], lambda: fill(results, _by_formula(call, directions, need_weights)))
    return results


class Tangent(Node):
    operator, signature, implementation, results = "tangent", TANGENT, _tangent, RESULTS

    @staticmethod
    def backward(ctx, *incoming):
        (*directions, out, stats), call, (_, backend) = TANGENT.split(saved(ctx)[0])
        incoming = [None if x is None or x.dim() == 1 else x for x in incoming]
        if all(x is None for x in incoming):
            return TANGENT.named({})
        of_tangents, of_inputs = (TANGENT.of_inputs(ctx.needs_input_grad, prefix) for prefix in ("tangent_", ""))
        grads: dict[str, Any] = {}
        if any(of_tangents):
            first = gradients(incoming, out, None, stats, call, backend, of_tangents)
            grads |= {f"tangent_{name}": x for name, x in zip(INPUTS, first, strict=True)}
        if any(of_inputs):
            second = double_backward(call, incoming, directions)[len(RESULTS) :]
            grads |= {name: x for name, x, wanted in zip(INPUTS, second, of_inputs, strict=True) if wanted}
        return TANGENT.named(grads)

    @staticmethod
    def jvp(ctx, *tangents):
        (*directions, out, stats), call, (need_weights, backend) = TANGENT.split(saved(ctx)[0])
        others, moved = (TANGENT.of_inputs(tangents, prefix) for prefix in ("tangent_", ""))
        total = [None] * len(RESULTS)
        if any(x is not None for x in others):
            total = list(Tangent.apply(*others, out, stats, *call, need_weights, backend))
        if any(x is not None for x in moved):
            curved = double_tangent(call, directions, moved, need_weights)
            total = [plus(*pair) for pair in zip(total, curved, strict=True)]
        return tuple(total) if need_weights else (*total[:2], out.new_zeros(0))


_SCHEMA = f"tangent({TANGENT.schema}) -> (Tensor tangent_out, Tensor tangent_lse, Tensor tangent_weights)"
register(_SCHEMA, _tangent, _new, rules.check_tangent, Tangent.apply)
