"""The torch.library operator `backward`, which computes the gradients of attention, and its own derivatives."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..call.checks import plain
from ..call.layout import arrange, dense
from ..call.options import ATTENDED, INPUTS, Call, inputs as inputs_of, wide_dtype
from ..call.private import autograd_inside
from ..cpu import run as cpu
from ..naive import formula
from . import partial, repeats, rules
from .derived import Derived, Formula, double_backward, plus, recorded_batches
from .namespace import OPERATORS, Node, register
from .schema import BACKWARD, FORWARD, KERNELS, RESULTS, by_kernel, fill, rounded_lengths, saved


def new_backward(*arguments):
    """Return uninitialised gradients: dense, each in its input's order of dimensions; empty if not needed."""
    call, need = Call(*arguments[BACKWARD.first : BACKWARD.last]), arguments[-1]
    grads = []
    for name, x, needed in zip(INPUTS, inputs_of(call), need, strict=True):
        wide = wide_dtype(call.query.dtype) if call.partial and name in ATTENDED else None
        grads.append(dense(x, x.shape, wide) if needed else call.query.new_empty(0))
    return tuple(grads)


def _naive_gradients(grads: Sequence[Tensor], incoming: Sequence[Tensor | None], call: Call) -> None:
    """Compute gradients by the naive path into `grads`. An empty tensor means that its gradient is not needed."""
    if not (wanted := {name: grad for name, grad in zip(INPUTS, grads, strict=True) if grad.numel()}):
        return
    with autograd_inside(call.query.device), torch.enable_grad():
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


def readable(grad_out, call, backend):
    """Return grad_out, copied if Hopper's kernels cannot read it. A sum's gradient has strides of 0."""
    if grad_out is None or grad_out.element_size() != 2 or (call.named and backend == "triton"):
        return grad_out
    from ..launch import hopper, run

    return hopper.readable(grad_out) if run.capability(run.device_of(grad_out)) == 90 else grad_out


def kind_of(incoming, out, weights, stats, call, backend, need):
    """Return (kind, call, further tensors) of a backward, as `repeats.repeat` takes them."""
    weights = weights if weights is None or weights.dim() == 4 else None
    kind = "backward", backend, tuple(need), torch.are_deterministic_algorithms_enabled()
    return kind, call, (*incoming, out, weights, stats)


def _repeated(incoming, out, weights, stats, call, backend, need):
    """Return gradients from repeated launches; None without a record or grad_out, or if torch must sum a gradient."""
    learned = any(needed and name not in ATTENDED for name, needed in zip(INPUTS, need, strict=True))
    if learned or incoming[0] is None:
        return None

    def launch(recorder, call, *more):
        from ..launch.backward import launch_backward

        made = [recorder.make(x) if x.numel() else None for x in new_backward(*more, *call, backend, need)]
        launch_backward(made, *more, call, backend)
        return made

    return repeats.repeat(*kind_of(incoming, out, weights, stats, call, backend, need), launch)


def _compute(incoming, out, weights, stats, call, backend, need):
    """Return the gradients of INPUTS, None or empty if not needed."""
    grad_out, grad_lse, grad_weights = incoming
    if backend == "cpu" and out.numel() and (found := cpu.backward(call, incoming, out, weights, stats, need)):
        return found
    if backend not in KERNELS or not out.numel():
        grads = new_backward(*incoming, out, weights, stats, *call, backend, need)
        _naive_gradients(grads, incoming, call)
        return grads
    from ..launch import run

    grad_out, stats = readable(grad_out, call, backend), stats.contiguous()  # vmap may have expanded stats
    grad_lse = None if grad_lse is None else grad_lse.to(stats.dtype).contiguous()
    why, bare = run.without_stats(call, stats, weights.dim() == 4, backend), rounded_lengths(call, weights.dim() == 4)
    came = grad_out, grad_lse, grad_weights
    if why is None and (found := _repeated(came, out, weights, stats, bare, backend, need)) is not None:
        return found
    from ..launch.backward import launch_backward, reasons_not_on_hopper

    grads = new_backward(*incoming, out, weights, stats, *call, backend, need)
    grad_out = readable(call.query.new_zeros(()).expand(out.shape), call, backend) if grad_out is None else grad_out

    def naive():
        if partial.is_part(call, grad_weights is not None):
            fill(grads, partial.naive_backward(call, backend, grad_out, grad_lse, out, stats, need))
        else:
            _naive_gradients(grads, incoming, call)

    def launch():
        if why is not None:
            raise why
        wanted = [grad if grad.numel() else None for grad in grads]
        launch_backward(wanted, grad_out, grad_lse, grad_weights, out, weights, stats, bare, backend)

    # If a Hopper kernel fails in the first launch, the second runs the Triton kernels for any GPU.
    on_hopper = run.capability(call.query.device) == 90 and not reasons_not_on_hopper(call, need, backend)
    by_kernel(call, [launch] * (2 if on_hopper else 1), naive)
    return grads


def _backward(*arguments):
    """Compute the gradients in the layout of the operator's fake, `new_backward`."""
    (*incoming, out, weights, stats), call, (backend, need) = BACKWARD.split(arguments)
    triples = zip(_compute(incoming, out, weights, stats, call, backend, need), inputs_of(call), need, strict=True)
    return tuple([arrange(grad, x, grad.dtype) if needed else out.new_empty(0) for grad, x, needed in triples])


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
        (weights,) = Derived.apply(Formula(weights_of, Call._fields, ("weights",)), *fields)
    grads = backward(*incoming, out, out.new_empty(0) if weights is None else weights, stats, *call, backend, need)
    return [grad if needed else None for grad, needed in zip(grads, need, strict=True)]


def differentiate(ctx, incoming, need):
    """Return the gradients of INPUTS for an autograd node of `forward`, from the tensors that it saved."""
    # A result that was not needed has one dimension. A compiled graph passes zeros as its gradient.
    grad_out, grad_lse, grad_weights = [None if x is None or x.dim() == 1 else x for x in incoming]
    if grad_out is grad_lse is grad_weights is None:
        return [None] * len(INPUTS)
    arguments, (out, weights, stats) = saved(ctx)
    call, backend = Call(*arguments[: FORWARD.last]), arguments[-1]
    return gradients((grad_out, grad_lse, grad_weights), out, weights, stats, call, backend, [*need])


class Backward(Node):
    operator, signature, implementation, results = "backward", BACKWARD, _backward, INPUTS

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
        made = zip(total, inputs_of(call), need, strict=True)
        total = [(torch.zeros_like(of) if x is None else x, of) if needed else None for x, of, needed in made]
        return tuple([out.new_zeros(0) if pair is None else arrange(*pair) for pair in total])


def backward(*arguments):
    """Compute the gradients as one autograd node."""
    (*incoming, out, weights, stats), call, (backend, need) = BACKWARD.split(arguments)
    if not torch.is_grad_enabled() and plain(arguments):
        return _compute(incoming, out, weights, stats, call, backend, need)
    if recorded_batches(incoming):  # torch calls the operator for each gradient
        return OPERATORS.backward(*arguments)
    return Backward.apply(*incoming, out, weights, cpu.with_all_columns(stats, out), *call, backend, need)


_SCHEMA = f"backward({BACKWARD.schema}) -> ({', '.join(f'Tensor grad_{name}' for name in INPUTS)})"
register(_SCHEMA, _backward, new_backward, rules.check_backward, backward)
