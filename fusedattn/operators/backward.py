"""The operator backward of torch.library, and its derivatives."""

import torch
from torch import Tensor

from ..call.form import DIFFERENTIABLE, TENSORS, Call, device_of, wide_dtype
from ..call.layout import arrange, dense, is_contiguous
from ..cpu import run as cpu
from ..launch import failures, tuned
from ..launch.failures import Unusable
from ..private import has_storage, transforms_active
from . import fallback, rules
from .derived import Formula, again, derived, plus
from .mapped import mapped
from .namespace import OPERATORS, register, register_derivative
from .schema import CALL, INPUTS, run_operator

_BEFORE = 6  # how many arguments come before the fields of the Call
_NAMES = "grad_out", "grad_lse", "grad_weights", "out", "weights", "stats", *Call._fields, "backend", "need"


def like_dense(like: Tensor, shape, dtype: torch.dtype | None = None) -> Tensor:
    """`dense`, which a contiguous tensor need not be asked for; in the dtype of `like` by default."""
    return like.new_empty(shape, dtype=dtype) if is_contiguous(like) else dense(like, shape, dtype)


def new_backward(*arguments):
    """Uninitialised gradients, each in the order of what it is the gradient of; empty where it is not needed."""
    call, need = Call(*arguments[_BEFORE:-2]), arguments[-1]
    wide = wide_dtype(call) if call.partial else None
    dtypes = wide, wide, wide, None, None, None
    triples = zip(call[:DIFFERENTIABLE], need, dtypes, strict=True)
    return tuple([like_dense(x, x.shape, dtype) if needed else call.query.new_empty(0) for x, needed, dtype in triples])


def any_failed(call):
    """Whether any kernel at all is known not to run, or to be wrong, on the device of a call."""
    return bool(failures.known_kinds or tuned.of(device_of(call.query)).wrong)


def _backward(*arguments):
    grad_out, grad_lse, grad_weights, out, weights, stats = arguments[:_BEFORE]
    call, (backend, need) = Call(*arguments[_BEFORE:-2]), arguments[-2:]
    fused = backend == "cpu" and cpu.has_gradients(call, grad_weights, need)
    if fused and (call.partial or not cpu.too_large(stats[..., 0])):
        return cpu.backward(call, (grad_out, grad_lse, grad_weights), out, stats, need)
    grads = new_backward(*arguments)
    if not out.numel():
        for grad in grads:
            grad.zero_()
        return grads
    if backend in ("cpu", "naive"):
        fallback.gradients(grads, (grad_out, grad_lse, grad_weights), call)
        return grads
    from ..launch import run as launch
    from ..launch.backward import fill

    if grad_out is None:
        grad_out = out.new_zeros(()).expand(out.shape)
    stats = stats.contiguous()  # under vmap it is expanded, if it is the same for all
    grad_lse = None if grad_lse is None else grad_lse.to(stats.dtype).contiguous()
    wanted = [grad if grad.numel() else None for grad in grads]
    try:
        names = ["forward", *["weights"] * (weights.dim() == 4)]
        if any_failed(call) and (why := launch.failed(call, names)) is not None:
            raise why  # the forward was computed by the naive path, and there are no stats
        given = grad_out, grad_lse, grad_weights, out, weights, stats, call, backend
        try:
            fill(wanted, *given)
        except Unusable as why:
            if call.named or not launch.any_on_hopper_failed(call):
                raise
            failures.take_next(why, call.named)
            fill(wanted, *given)  # the universal kernels: the one for Hopper is known to fail now
    except Unusable as why:
        fallback.backward(grads, (grad_out, grad_lse, grad_weights), call, why)
    return grads


def _arranged_backward(*arguments):
    """`_backward` as the operator promises it: in the order of dimensions that `new_backward` has."""
    grads, inputs = _backward(*arguments), arguments[_BEFORE : _BEFORE + DIFFERENTIABLE]
    triples = zip(grads, inputs, arguments[-1], strict=True)
    return tuple([arrange(grad, x, grad.dtype) if needed else grad for grad, x, needed in triples])


register(
    "backward(Tensor? grad_out, Tensor? grad_lse, Tensor? grad_weights, Tensor out, Tensor weights, Tensor stats, "
    f"{CALL}, str backend, bool[{DIFFERENTIABLE}] need) -> ({', '.join(f'Tensor grad_{name}' for name in INPUTS)})",
    _arranged_backward,
    new_backward,
    rules.check_backward,
)


def kept_stats(stats, fields, backend):
    """What a forward has kept; it is made now where a graph that was recorded without gradients saved nothing."""
    if stats.dim() == 4:
        return stats
    with torch.no_grad():
        return OPERATORS.forward(*fields, False, False, True, backend)[3]


def gradients(incoming, out, weights, stats, fields, backend, need):
    """Gradients of the first of the fields of a Call, from those of its results; None where they are not needed.

    weights: None, where the forward made none.
    """
    stats = kept_stats(stats, fields, backend)
    if weights is None and incoming[2] is not None:
        again = Formula(lambda *x: (OPERATORS.forward(*x, False, True, False, backend)[2],), Call._fields, ("weights",))
        (weights,) = derived(again, *(x.detach() if isinstance(x, Tensor) else x for x in fields))
    weights = out.new_empty(0) if weights is None else weights
    grads = backward(*incoming, out, weights, stats, *fields, backend, need)
    return [grad if needed else None for grad, needed in zip(grads, need, strict=True)]


def _keep_again(ctx, inputs, output):
    """setup_context of the backward."""
    tensors = inputs[: _BEFORE + TENSORS]
    ctx.save_for_backward(*tensors[:3], *tensors[_BEFORE:])
    ctx.save_for_forward(*tensors)
    ctx.numbers, ctx.backend, ctx.need = inputs[_BEFORE + TENSORS : -2], inputs[-2], inputs[-1]
    ctx.set_materialize_grads(False)


def _differentiate_again(ctx, *grad_grads):
    """Gradients of the inputs of the backward: the formula, differentiated twice."""
    incoming, tensors = ctx.saved_tensors[:3], ctx.saved_tensors[3:]
    # A graph makes zeros of what did not come, of what nobody needed as well.
    grad_grads = [x if needed else None for x, needed in zip(grad_grads, ctx.need, strict=True)]
    gradients = again((*tensors, *ctx.numbers), incoming, grad_grads)
    return (*gradients[:3], None, None, None, *gradients[3:], *(None,) * (len(Call._fields) - DIFFERENTIABLE + 2))


def _move_again(ctx, *tangents):
    """Tangents of the gradients: what the tangents of incoming gradients give, and the second derivative of the fields.

    That is symmetric, so it is the one that `_differentiate_again` has.
    """
    *incoming, out, weights, stats = ctx.saved_tensors[:_BEFORE]
    fields, need = (*ctx.saved_tensors[_BEFORE:], *ctx.numbers), ctx.need
    moved = tangents[_BEFORE : _BEFORE + DIFFERENTIABLE]
    total = [None] * DIFFERENTIABLE
    if any(x is not None for x in tangents[:3]):
        weights = None if weights.dim() == 1 else weights
        total = gradients(tangents[:3], out, weights, stats, fields, ctx.backend, need)
    if any(x is not None for x in moved):
        curved = again(fields, incoming, moved)[3:]
        curved = [x if needed else None for x, needed in zip(curved, need, strict=True)]
        total = [plus(*pair) for pair in zip(total, curved, strict=True)]
    made = []
    for x, field, needed in zip(total, fields, need, strict=False):
        if needed:
            made.append(arrange(torch.zeros_like(field), field) if x is None else x)
        else:
            made.append(out.new_zeros(0))
    return tuple(made)


class Backward(torch.autograd.Function):
    """The backward operator and its derivatives."""

    @staticmethod
    def forward(*arguments):
        return run_operator(OPERATORS.backward, _backward, arguments)

    setup_context = staticmethod(_keep_again)
    backward = staticmethod(_differentiate_again)
    jvp = staticmethod(_move_again)

    @staticmethod
    def vmap(info, in_dims, *arguments):
        return mapped(Backward.apply, _NAMES, INPUTS, info, in_dims, arguments)


def backward(*arguments):
    """`Backward.apply`; it raises for a second derivative that nothing would come of."""
    batched = any(x is not None and not has_storage(x) for x in arguments[:3])
    if batched and torch.is_grad_enabled() and not transforms_active():
        raise NotImplementedError("fusedattn: is_grads_batched with create_graph needs backend='naive', or torch.func")
    return Backward.apply(*arguments)


register_derivative("backward", backward)
