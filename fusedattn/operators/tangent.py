"""The operator tangent of torch.library: the derivative of the forward in one direction, and its own derivatives.

It is linear in the tangents of the inputs. So its gradient with regard to these is the backward; and with regard to the
inputs it is what the derivative of the backward is: both are products with the same second derivative.
"""

from typing import Any

import torch
from torch import Tensor

from ..call.form import DIFFERENTIABLE, TENSORS, Call, wide_dtype
from ..call.layout import arrange, dense, row_major
from ..cpu import few, flash
from ..launch.failures import Unusable, take_next
from ..naive import tangent as naive
from . import rules
from .backward import gradients
from .derived import again, moved_again, plus
from .mapped import mapped
from .namespace import OPERATORS, register, register_derivative
from .schema import CALL, INPUTS, RESULTS, run_operator

_BEFORE = DIFFERENTIABLE + 2  # how many arguments come before the fields of the Call
_AFTER = 2  # and after them
_NAMES = *(f"tangent_{name}" for name in INPUTS), "out", "stats", *Call._fields, "need_weights", "backend"


def _new(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Uninitialised tangents of output, in its order and dtype, lse and weights, which are empty unless needed."""
    call, need_weights = Call(*arguments[_BEFORE:-_AFTER]), arguments[-_AFTER]
    query, rows = call.query, call.query.shape[:3]
    columns: Any = call.key.shape[2] if call.cu_seqlens_q is None else call.max_seqlen_k
    out = dense(query, (*rows, call.value.shape[3]))
    lse = query.new_empty(rows, dtype=wide_dtype(call))
    return out, lse, query.new_empty((*rows, columns) if need_weights else (0,))


def _by_formula(
    call: Call, given: tuple, need_weights: bool, known: naive.Known = naive.NOTHING
) -> tuple[Tensor, Tensor, Tensor]:
    """The tangents by the naive path."""
    out, lse, weights = naive.tangent(call, given, need_weights, known)
    return out, row_major(lse), call.query.new_empty(0) if weights is None else row_major(weights)


def _tangent(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    given, (out, stats) = arguments[:DIFFERENTIABLE], arguments[DIFFERENTIABLE:_BEFORE]
    call, need_weights, backend = Call(*arguments[_BEFORE:-_AFTER]), *arguments[-_AFTER:]
    if backend in ("cpu", "naive"):
        # The kernel's lse of few keys is too coarse for a tangent.
        is_known = backend == "cpu" and not few.is_few(call)
        known = naive.Known(stats[..., 0], flash.offset(call), out) if is_known else naive.NOTHING
        return _by_formula(call, given, need_weights, known)
    results = _new(*arguments)
    if not out.numel():
        for x in results:
            x.zero_()
        return results
    from ..launch import run as launch
    from ..launch.tangent import fill

    try:
        if (why := launch.failed(call, ["forward"])) is not None:
            raise why  # the forward was computed by the naive path, and there are no stats
        tangent_out, tangent_lse, tangent_weights = results
        fill(tangent_out, tangent_lse, tangent_weights if need_weights else None, given, out, stats.contiguous(), call)
    except Unusable as why:
        take_next(why, call.named)
        for target, x in zip(results, _by_formula(call, given, need_weights), strict=True):
            target.copy_(x)
    return results


def _arranged(*arguments: Any) -> tuple[Tensor, ...]:
    """Results as `_new` has them."""
    out, *rest = _tangent(*arguments)
    return arrange(out, arguments[_BEFORE]), *rest


register(
    f"tangent({', '.join(f'Tensor? tangent_{name}' for name in INPUTS)}, Tensor out, Tensor stats, "
    f"{CALL}, bool need_weights, str backend) -> (Tensor tangent_out, Tensor tangent_lse, Tensor tangent_weights)",
    _arranged,
    _new,
    rules.check_tangent,
)


def _kept(ctx):
    """(tangents, out, stats, the fields of the Call, need_weights, backend) of a Tangent."""
    tensors, numbers = ctx.saved_tensors, ctx.numbers
    given, (out, stats), fields = tensors[:DIFFERENTIABLE], tensors[DIFFERENTIABLE:_BEFORE], tensors[_BEFORE:]
    return given, out, stats, (*fields, *numbers[:-_AFTER]), *numbers[-_AFTER:]


class Tangent(torch.autograd.Function):
    """The tangent operator and its derivatives."""

    @staticmethod
    def forward(*arguments):
        return run_operator(OPERATORS.tangent, _tangent, arguments)

    @staticmethod
    def setup_context(ctx, inputs, output):
        tensors = inputs[: _BEFORE + TENSORS]
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.numbers = inputs[_BEFORE + TENSORS :]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, *incoming):
        given, out, stats, fields, need_weights, backend = _kept(ctx)
        incoming = [None if x is None or x.dim() == 1 else x for x in incoming]
        rest = (None,) * (len(Call._fields) - DIFFERENTIABLE + _AFTER)
        if all(x is None for x in incoming):
            return (None,) * (_BEFORE + DIFFERENTIABLE) + rest
        of_tangents, of_inputs = ctx.needs_input_grad[:DIFFERENTIABLE], ctx.needs_input_grad[_BEFORE:]
        first = [None] * DIFFERENTIABLE
        if any(of_tangents):
            first = gradients(incoming, out, None, stats, fields, backend, list(of_tangents))
        second = [None] * DIFFERENTIABLE
        if any(of_inputs[:DIFFERENTIABLE]):
            second = again(fields, incoming, given)[3:]
        second = [x if needed else None for x, needed in zip(second, of_inputs, strict=False)]
        return (*first, None, None, *second, *rest)

    @staticmethod
    def jvp(ctx, *tangents):
        given, out, stats, fields, need_weights, backend = _kept(ctx)
        others, moved = tangents[:DIFFERENTIABLE], tangents[_BEFORE : _BEFORE + DIFFERENTIABLE]
        total = [None] * len(RESULTS)
        if any(x is not None for x in others):
            total = list(Tangent.apply(*others, out, stats, *fields, need_weights, backend))
        if any(x is not None for x in moved):
            curved = moved_again(fields, given, moved, need_weights)
            total = [plus(*pair) for pair in zip(total, curved, strict=True)]
        return tuple(total) if need_weights else (*total[:2], out.new_zeros(0))

    @staticmethod
    def vmap(info, in_dims, *arguments):
        return mapped(Tangent.apply, _NAMES, RESULTS, info, in_dims, arguments)


register_derivative("tangent", Tangent.apply)
