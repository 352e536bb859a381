"""The operators forward and block_mask of torch.library, and the derivatives of the forward.

Operators are opaque to the compiler: a schema, an implementation for CUDA and for CPU (Triton's interpreter), and a
fake that makes tensors of the same shapes, dtypes and strides. Autograd sits above them, in a Function.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..call.layout import dense, own_storage
from ..call.options import INPUTS, WHOLE, Call, Lengths, hiding, inputs as inputs_of, lengths_of, wide_dtype
from ..call.private import constant, forward_level, is_exporting, transforms_active
from ..call.rules import fail
from ..cpu import run as cpu
from ..launch.failures import KernelUnavailable, fall_back
from ..naive import formula
from . import fallback, rules
from .backward import any_failed, gradients, saved_stats
from .namespace import OPERATORS, register, register_derivative
from .schema import FORWARD, RESULTS, apply, run_operator, save as save_arguments, saved, stats_columns
from .tangent import Tangent
from .vmap_rule import vmap_rule

_RESULTS = *RESULTS, "stats"
_KERNELS = "hopper", "triton"


def _new(call, need_lse, need_weights, save, backend):
    """Return uninitialised (out, lse, weights, stats); all but out are empty unless needed."""
    query, rows, width = call.query, call.query.shape[:3], call.value.shape[3]
    wide = wide_dtype(call)
    lse = query.new_empty(rows if need_lse else (0,), dtype=wide)
    columns = call.key.shape[2] if call.cu_seqlens_q is None else call.max_seqlen_k
    weights = query.new_empty((*rows, columns) if need_weights else (0,))
    out = dense(query, (*rows, width), wide if call.partial else None)
    columns = stats_columns(out.dtype, width, backend)
    save = save or (need_weights and backend in _KERNELS)  # kernels compute weights from stats
    return out, lse, weights, lse.new_empty((*rows, columns) if save else (0,))


def new_forward(*arguments):
    _, call, more = FORWARD.split(arguments)
    return _new(call, *more)


def _forward(*arguments):
    _, call, (need_lse, need_weights, save, backend) = FORWARD.split(arguments)
    if backend in ("cpu", "naive"):
        forward_of = cpu.forward if backend == "cpu" else fallback.results
        results = forward_of(call, need_lse, need_weights, save)
        return tuple(map(own_storage, results)) if save else results  # there may be tangents
    out, *rest = results = _new(call, need_lse, need_weights, save, backend)
    if out.numel():
        # The first call imports Triton, nothing before it does.
        from ..launch import forward, run

        filled = [x if x.numel() else None for x in rest]
        # A graph does not know whether there are keys.
        special = backend == "hopper" and run.has_hopper(out) and call.key.shape[2] > 0
        for on_hopper in (True, False) if special else (False,):
            try:
                forward.launch_forward(out, *filled, call, on_hopper)
                break
            except KernelUnavailable as why:
                fall_back(why, call.named)
                if not on_hopper:
                    fallback.fill(results, formula.run_naive(call, need_lse, need_weights))
                    results[3].fill_(float("nan"))  # the backward is the naive path's, which reads no stats
    return results


def _decompose(*arguments):
    _, call, (*needs, _) = FORWARD.split(arguments)
    if call.partial:
        fail(ValueError, "partial", "False: parts cannot be exported", True)
    return fallback.results(call, *needs)


def _of_masks(function, mask, key_mask, query_mask, bias, *lengths):
    from ..launch import blocks

    packed = None if lengths[0] is None else Lengths(*lengths)
    return getattr(blocks, function)(mask, key_mask, query_mask, bias, packed, blocks.block_mask_size())


_FORWARD = f"forward({FORWARD.schema}) -> (Tensor out, Tensor lse, Tensor weights, Tensor stats)"
register(_FORWARD, _forward, new_forward, rules.check_forward, _decompose)
register(
    "block_mask(Tensor? mask, Tensor? key_mask, Tensor? query_mask, Tensor? bias, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k, SymInt rows, SymInt keys, SymInt? max_seqlen_q, SymInt? max_seqlen_k) -> Tensor",
    lambda *arguments: _of_masks("block_mask", *arguments),
    lambda *arguments: _of_masks("new_block_mask", *arguments)[0],
    rules.check_block_mask,
)


class _Attention(torch.autograd.Function):
    """The forward operator with its derivatives, for eager code and torch.func."""

    @staticmethod
    def forward(*arguments):
        return run_operator(OPERATORS.forward, _forward, arguments)

    @staticmethod
    def setup_context(ctx, inputs, output):
        out, lse, weights, stats = output
        # As `replay` saves them: a checkpoint may compute the call again by a replay.
        save_arguments(ctx, inputs, out, None if weights.dim() == 1 else weights, stats)
        ctx.has_lse, ctx.has_weights = lse.dim() > 1, weights.dim() > 1
        ctx.mark_non_differentiable(stats)

    @staticmethod
    def backward(ctx, grad_out, grad_lse, grad_weights, _):
        # A graph passes zeros for absent gradients, also for those of absent results.
        grad_lse, grad_weights = (None if x is None or x.dim() == 1 else x for x in (grad_lse, grad_weights))
        incoming = grad_out, grad_lse, grad_weights
        if all(grad is None for grad in incoming):
            return FORWARD.named({})
        arguments, (out, weights, stats) = saved(ctx)
        _, call, (*_, backend) = FORWARD.split(arguments)
        needed = dict(zip(FORWARD.names, ctx.needs_input_grad, strict=True))
        grads = gradients(incoming, out, weights, stats, call, backend, [needed[name] for name in INPUTS])
        return FORWARD.named(dict(zip(INPUTS, grads, strict=True)))

    @staticmethod
    def jvp(ctx, *tangents):
        arguments, (out, _, stats) = saved(ctx)
        _, call, (*_, backend) = FORWARD.split(arguments)
        moved = dict(zip(FORWARD.names, tangents, strict=True))
        directions, stats = [moved[name] for name in INPUTS], saved_stats(stats, call, backend)
        out, lse, weights = Tangent.apply(*directions, out, stats, *call, ctx.has_weights, backend)
        # torch takes no None: an absent result has an empty tangent.
        return out, lse if ctx.has_lse else lse.new_zeros(0), weights if ctx.has_weights else out.new_zeros(0), None

    @staticmethod
    def vmap(info, in_dims, *arguments):
        return vmap_rule(_Attention.apply, FORWARD.names, _RESULTS, info, in_dims, arguments)


# For compiled and exported graphs, and for callers of operators by name.
register_derivative("forward", _Attention.apply)


def _transformed(*arguments):
    """Call `_Attention.apply`; the compiler treats this as one node."""
    return _Attention.apply(*arguments)


@constant
def allow_in_graph() -> None:
    """Register `_transformed` with the compiler. Called while compiling: at import it would import the compiler."""
    torch.compiler.allow_in_graph(_transformed)


def _attend(
    call: Call, need_lse: bool, need_weights: bool, backend: str
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return (output, lse or None, weights or None) of a checked call."""
    save = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in inputs_of(call))
    # Neither of these shows in requires_grad.
    transformed = transforms_active() or forward_level() >= 0
    if torch.compiler.is_compiling() and transformed:
        allow_in_graph()
        out, lse, weights, _ = _transformed(*call, need_lse, need_weights, True, backend)
    elif torch.compiler.is_compiling():
        out, lse, weights, _ = OPERATORS.forward(*call, need_lse, need_weights, save, backend)
    elif save or transformed:
        # One block mask for forward and backward. Graphs and vmap make it inside of each: they do not know its size.
        masked = backend in _KERNELS and not transformed and any(x is not None for x in hiding(call))
        if masked and call.block_mask is None:
            call = call._replace(block_mask=block_mask_or_none(hiding(call), lengths_of(call)))
        out, lse, weights, _ = apply(_Attention, (*call, need_lse, need_weights, True, backend))
    else:
        arguments = *call, need_lse, need_weights, False, backend
        out, lse, weights, _ = run_operator(OPERATORS.forward, _forward, arguments)
    return out, lse if need_lse else None, weights if need_weights else None


def run_triton(call: Call, need_lse: bool, need_weights: bool):
    return _attend(call, need_lse, need_weights, "triton")


def run_hopper(call: Call, need_lse: bool, need_weights: bool):
    return _attend(call, need_lse, need_weights, "hopper")


def run_naive(call: Call, need_lse: bool, need_weights: bool):
    """Run the formula, which autograd sees through. In some cases it is one operator instead.

    Under vmap, for dropout that has the bits of the kernels, and for mapped offsets. For the gradient of a tangent
    outside of torch.func: torch 2.13 overwrites what its own softmax has saved for it. In a graph for a CPU with
    dropout, which compiles twice as fast. In a graph that does not know the longest sequence.
    """
    transformed = transforms_active()
    if torch.compiler.is_compiling():
        # A compiler does not know the longest sequence: the operator finds it at run time.
        unknown = call.cu_seqlens_q is not None and (call.max_seqlen_q is None or call.max_seqlen_k is None)
        dropped = call.seed is not None and call.query.device.type == "cpu" and not is_exporting()
        if unknown or (dropped and not transformed and forward_level() < 0):
            return _attend(call, need_lse, need_weights, "naive")
    hidden = transformed and not call.seed is call.cu_seqlens_q is None
    if hidden or (forward_level() >= 0 and not transformed and torch.is_grad_enabled()):
        return _attend(call, need_lse, need_weights, "naive")
    return formula.run_naive(call, need_lse, need_weights)


def run_cpu(call: Call, need_lse: bool, need_weights: bool):
    return _attend(call, need_lse, need_weights, "cpu")


def block_mask_or_none(masks: Sequence[Tensor | None], lengths: Lengths | None = None) -> Tensor | None:
    """Return the block mask of (mask, key_mask, query_mask, bias) of a Call; None if its kernel does not run here."""
    mask, key_mask, query_mask, bias = masks
    bias = None if bias is None else bias.detach()
    try:
        return OPERATORS.block_mask(mask, key_mask, query_mask, bias, *(WHOLE if lengths is None else lengths))
    except KernelUnavailable:
        return None


def failed(call: Call, need_weights: bool, on_hopper: bool) -> list[str]:
    """Return why a kernel of a call is known to fail on this machine; empty if none is."""
    if torch.compiler.is_compiling() or not any_failed(call):
        return []
    from ..launch import run
    from ..launch.backward import passes

    need = [isinstance(x, Tensor) and x.requires_grad for x in inputs_of(call)]
    backend = "hopper" if on_hopper else "triton"
    backward = passes(call, need, backend) if torch.is_grad_enabled() and any(need) else ()
    names = ["hopper" if on_hopper else "forward", *(["weights"] if need_weights else []), *backward]
    return [str(why)] if (why := run.failed(call, names)) is not None else []


def _explained(call):
    """Return which gradients `explain` describes: those of query, key, value and learned options."""
    pairs = zip(INPUTS, inputs_of(call), strict=True)
    return [name in ("query", "key", "value") or (x is not None and x.requires_grad) for name, x in pairs]


def tiles_for(call: Call, need_weights: bool, on_hopper: bool) -> dict:
    """Return {kernel: Tile, Pipeline or Backward} of a call and its backward."""
    from ..launch import run
    from ..launch.backward import passes

    backward = passes(call, _explained(call), "hopper" if on_hopper else "triton")
    return run.tiles(call, need_weights, on_hopper, backward)


def backward_reasons(call: Call, on_hopper: bool) -> list[str]:
    """Return why a Hopper GPU does not run the backward by its own kernel."""
    from ..launch.backward import reasons_not_on_hopper

    return reasons_not_on_hopper(call, _explained(call), "hopper" if on_hopper else "triton")
