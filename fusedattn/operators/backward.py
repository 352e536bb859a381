"""The torch.library operator `backward`, which computes the gradients of attention, and its own derivatives."""

import torch
from torch import Tensor

from ..call.layout import arrange, dense
from ..call.options import INPUTS, Call, device_of, inputs as inputs_of, plain, wide_dtype
from ..call.private import has_storage, transforms_active
from ..cpu import run as cpu
from ..launch import failures, tuned
from . import fallback, rules
from .derived import Formula, derived, double_backward, plus
from .namespace import OPERATORS, register
from .schema import BACKWARD, RESULTS, run_operator, save, saved
from .vmap_rule import vmap_rule


def new_backward(*arguments):
    """Return uninitialised gradients, each with the strides of its input; empty if not needed."""
    _, call, (_, need) = BACKWARD.split(arguments)
    grads = []
    for name, x, needed in zip(INPUTS, inputs_of(call), need, strict=True):
        wide = wide_dtype(call) if call.partial and name in ("query", "key", "value") else None
        grads.append(dense(x, x.shape, wide) if needed else call.query.new_empty(0))
    return tuple(grads)


def any_failed(call):
    """Return whether any kernel is known to fail, or to give wrong results, on the device of a call."""
    return bool(failures.failed_kernels) or any(x.wrong for x in tuned.of(device_of(call.query)).values())


def _backward(*arguments):
    (*incoming, out, weights, stats), call, (backend, need) = BACKWARD.split(arguments)
    grad_out, grad_lse, grad_weights = incoming
    fused = backend == "cpu" and out.numel() and not cpu.lacks_gradients(call, grad_weights, need)
    reads_lse = fused and not call.partial and cpu.reads_lse(call, grad_weights)
    if fused and not (reads_lse and cpu.too_large(stats[..., 0], call)):
        return cpu.backward(call, incoming, out, weights, stats, need)
    grads = new_backward(*arguments)
    if not out.numel():
        for grad in grads:
            grad.zero_()
        return grads
    if backend in ("cpu", "naive"):
        fallback.gradients(grads, incoming, call)
        return grads
    from ..launch import run
    from ..launch.backward import launch_backward, reasons_not_on_hopper

    if grad_out is None:
        grad_out = out.new_zeros(()).expand(out.shape)
    stats = stats.contiguous()  # vmap may have expanded it
    grad_lse = None if grad_lse is None else grad_lse.to(stats.dtype).contiguous()

    def launch():
        names = ["forward", *["weights"] * (weights.dim() == 4)]
        if any_failed(call) and (why := run.failed(call, names)) is not None:
            raise why  # the forward was computed by the naive path, and there are no stats
        wanted = [grad if grad.numel() else None for grad in grads]
        launch_backward(wanted, grad_out, grad_lse, grad_weights, out, weights, stats, call, backend)

    # If a Hopper kernel fails in the first launch, the second runs the Triton kernels for any GPU.
    on_hopper = run.has_hopper(call.query) and not reasons_not_on_hopper(call, need, backend)
    fallback.by_kernel(call, [launch] * (2 if on_hopper else 1), lambda: fallback.gradients(grads, incoming, call))
    return grads


def _arranged_backward(*arguments):
    """Compute `_backward`, and give each gradient the strides of its input, as the operator's fake does."""
    _, call, (_, need) = BACKWARD.split(arguments)
    triples = zip(_backward(*arguments), inputs_of(call), need, strict=True)
    return tuple([arrange(grad, x, grad.dtype) if needed else grad for grad, x, needed in triples])


def saved_stats(stats, call, backend):
    """Return the saved stats; compute them if the forward saved none."""
    if stats.dim() == 4:
        return stats
    with torch.no_grad():
        return OPERATORS.forward(*call, False, False, True, backend)[3]


def gradients(incoming, out, weights, stats, call, backend, need):
    """Return the gradients of INPUTS, None if not needed. weights: None if the forward returned none."""
    stats = saved_stats(stats, call, backend)
    if weights is None and incoming[2] is not None:

        def weights_of(*fields):
            return OPERATORS.forward(*fields, False, True, False, backend)[2:3]

        fields = [x.detach() if isinstance(x, Tensor) else x for x in call]
        (weights,) = derived(Formula(weights_of, Call._fields, ("weights",)), *fields)
    weights = out.new_empty(0) if weights is None else weights
    grads = backward(*incoming, out, weights, stats, *call, backend, need)
    return [grad if needed else None for grad, needed in zip(grads, need, strict=True)]


class Backward(torch.autograd.Function):
    """The backward operator with its derivatives."""

    @staticmethod
    def forward(*arguments):
        return run_operator(OPERATORS.backward, _backward, arguments)

    @staticmethod
    def setup_context(ctx, inputs, output):
        save(ctx, inputs)

    @staticmethod
    def backward(ctx, *grad_grads):
        incoming, call, (_, need) = BACKWARD.split(saved(ctx)[0])
        # A compiled graph passes zeros for missing grad_grads, also if the gradient itself was not needed.
        grad_grads = [x if needed else None for x, needed in zip(grad_grads, need, strict=True)]
        grads = double_backward(call, incoming[: len(RESULTS)], grad_grads)
        return BACKWARD.named(dict(zip((*BACKWARD.names[: len(RESULTS)], *INPUTS), grads, strict=True)))

    @staticmethod
    def jvp(ctx, *tangents):
        # The Hessian is symmetric, so `double_backward` also gives its product with tangents of the inputs.
        (*incoming, out, weights, stats), call, (backend, need) = BACKWARD.split(saved(ctx)[0])
        moved = BACKWARD.of_inputs(tangents)
        total = [None] * len(INPUTS)
        if any(x is not None for x in tangents[: len(RESULTS)]):
            weights = None if weights.dim() == 1 else weights
            total = gradients(tangents[: len(RESULTS)], out, weights, stats, call, backend, need)
        if any(x is not None for x in moved):
            curved = double_backward(call, incoming, moved)[len(RESULTS) :]
            total = [plus(*pair) if needed else None for *pair, needed in zip(total, curved, need, strict=True)]
        total = [x if needed else out.new_zeros(0) for x, needed in zip(total, need, strict=True)]
        pairs = zip(total, inputs_of(call), strict=True)
        return tuple([arrange(torch.zeros_like(field), field) if x is None else x for x, field in pairs])

    @staticmethod
    def vmap(info, in_dims, *arguments):
        return vmap_rule(Backward.apply, BACKWARD.names, INPUTS, info, in_dims, arguments)


def backward(*arguments):
    """Compute the gradients as one autograd node. Raise if a derivative of the gradients would be lost."""
    if not torch.is_grad_enabled() and plain(arguments):
        return _backward(*arguments)
    batched = any(x is not None and not has_storage(x) for x in arguments[:3])
    if batched and torch.is_grad_enabled() and not transforms_active():
        raise NotImplementedError("fusedattn: is_grads_batched with create_graph needs backend='naive', or torch.func")
    return Backward.apply(*arguments)


_SCHEMA = f"backward({BACKWARD.schema}) -> ({', '.join(f'Tensor grad_{name}' for name in INPUTS)})"
register(_SCHEMA, _arranged_backward, new_backward, rules.check_backward, backward)
