"""The kernels as operators of torch (torch.ops.fusedattn), and their derivative.

Operators are opaque to the compiler: a schema, an implementation for CUDA and for CPU (Triton's interpreter), and a
fake one that makes tensors of the same shapes, dtypes and strides. Autograd sits above them, in a Function.
"""

import torch
from torch import Tensor

from .call import Call
from .layout import dense

_PAIRS = (
    "Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? key_mask, Tensor? query_mask, "
    "SymInt? left, SymInt? right, bool top_left, float scale"
)
_LIBRARY = torch.library.Library("fusedattn", "FRAGMENT")  # at module level: operators live as long as it does
_LIBRARY.define(f"forward({_PAIRS}, bool save) -> (Tensor out, Tensor lse, Tensor stats)")
_LIBRARY.define(
    f"backward(Tensor? grad_out, Tensor? grad_lse, Tensor out, Tensor stats, {_PAIRS}, bool[3] need)"
    " -> (Tensor grad_query, Tensor grad_key, Tensor grad_value)"
)
_TENSORS = 6  # how many of _PAIRS come before the numbers


def _statistics(query: Tensor) -> torch.dtype:
    return torch.promote_types(query.dtype, torch.float32)


def _new_forward(query, key, value, mask, key_mask, query_mask, left, right, top_left, scale, save):
    """Uninitialised (out, lse, stats): stats (B, Hq, Sq, 2) is for the backward alone, and empty unless it is saved."""
    rows = query.shape[:3]
    lse = query.new_empty(rows, dtype=_statistics(query))
    return dense(query, (*rows, value.shape[3])), lse, lse.new_empty((*rows, 2) if save else (0,))


def _new_backward(grad_out, grad_lse, out, stats, query, key, value, *rest):
    """Uninitialised gradients, each in the order of what it is the gradient of; empty where it is not needed.

    One kernel makes those of key and value, so if either is needed, both are there.
    """
    need_query, need_key, need_value = rest[-1]
    needs = (need_query, need_key or need_value, need_key or need_value)
    return tuple(
        dense(x, x.shape) if need else x.new_empty(0) for x, need in zip((query, key, value), needs, strict=True)
    )


def _forward(*arguments):
    out, lse, stats = _new_forward(*arguments)
    key, save = arguments[1], arguments[-1]
    if lse.numel() == 0 or key.shape[2] == 0:  # no row, or nothing that a row could see
        out.zero_(), lse.fill_(float("-inf")), stats.fill_(float("inf"))
        return out, lse, stats
    from . import launch  # the first call imports Triton, nothing before it does

    launch.forward(out, lse, stats if save else None, *arguments[:-1])
    return out, lse, stats


def _backward(grad_out, grad_lse, out, stats, *pairs_and_need):
    grads = _new_backward(grad_out, grad_lse, out, stats, *pairs_and_need)
    query, key = pairs_and_need[:2]
    if query.numel() == 0 or key.numel() == 0:
        for grad in grads:
            grad.zero_()
        return grads
    from . import launch

    if grad_out is None:
        grad_out = out.new_zeros(()).expand(out.shape)
    grad_lse = None if grad_lse is None else grad_lse.to(stats.dtype).contiguous()
    wanted = [grad if grad.numel() else None for grad in grads]
    launch.backward(wanted, grad_out, grad_lse, out, stats, *pairs_and_need[:-1])
    return grads


for _key in ("CUDA", "CPU"):
    _LIBRARY.impl("forward", _forward, _key)
    _LIBRARY.impl("backward", _backward, _key)
torch.library.register_fake("fusedattn::forward", _new_forward, lib=_LIBRARY)
torch.library.register_fake("fusedattn::backward", _new_backward, lib=_LIBRARY)


def _folded(size, in_dims, arguments, batch):
    """Arguments of a vmap over `size` calls with that dimension folded into the batch, of `batch` elements a call."""

    def fold(x, dim):
        if not isinstance(x, Tensor):
            return x
        x = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
        # A mask may be broadcast over the batch; one that differs between calls no longer can be.
        return x.expand(size, batch, *x.shape[2:]).flatten(0, 1)

    return [fold(x, dim) for x, dim in zip(arguments, in_dims, strict=True)]


def _unfolded(size, results):
    results = tuple(x.reshape(size, x.shape[0] // max(size, 1), *x.shape[1:]) for x in results)
    return results, (0,) * len(results)


def _batch(x, dim):
    """The batch size of a tensor that vmap maps over `dim`, or over nothing."""
    return x.shape[0] if dim is None else x.movedim(dim, 0).shape[1]


def _no_second_derivative(ctx, *grads):
    raise RuntimeError(
        "fusedattn: second derivatives of the fused kernels are not implemented; backend='naive' has them"
    )


def _keep(ctx, inputs, output):
    """setup_context of the forward: what its derivative needs."""
    *pairs, _ = inputs
    out, lse, stats = output
    ctx.save_for_backward(out, stats, *pairs[:_TENSORS])
    ctx.numbers = pairs[_TENSORS:]
    ctx.mark_non_differentiable(stats)
    ctx.set_materialize_grads(False)


def _differentiate(run, ctx, grad_out, grad_lse):
    """Gradients of the inputs of the forward, from `run`, which is the backward operator in one form or another."""
    if grad_out is None and grad_lse is None:
        return (None,) * 11
    need = list(ctx.needs_input_grad[:3])
    grads = run(grad_out, grad_lse, *ctx.saved_tensors, *ctx.numbers, need)
    return (*(grad if needed else None for grad, needed in zip(grads, need, strict=True)), *(None,) * 8)


# Of the operators themselves, for graphs that are compiled or exported, and for who calls them by name.
torch.library.register_autograd(
    "fusedattn::forward",
    lambda ctx, grad_out, grad_lse, _: _differentiate(torch.ops.fusedattn.backward, ctx, grad_out, grad_lse),
    setup_context=_keep,
    lib=_LIBRARY,
)
torch.library.register_autograd("fusedattn::backward", _no_second_derivative, lib=_LIBRARY)


class _Backward(torch.autograd.Function):
    """The backward operator; it exists so that a second derivative, and nothing else, raises under torch.func too."""

    @staticmethod
    def forward(*arguments):
        return torch.ops.fusedattn.backward(*arguments)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    backward = staticmethod(_no_second_derivative)

    @staticmethod
    def vmap(info, in_dims, *arguments):
        batch = _batch(arguments[2], in_dims[2])
        return _unfolded(info.batch_size, _Backward.apply(*_folded(info.batch_size, in_dims, arguments, batch)))


class _Attention(torch.autograd.Function):
    """The forward operator and its derivative, as eager code takes them: in half the time, and under torch.func too."""

    @staticmethod
    def forward(*arguments):
        return torch.ops.fusedattn.forward(*arguments)

    setup_context = staticmethod(_keep)

    @staticmethod
    def backward(ctx, grad_out, grad_lse, _):
        return _differentiate(_Backward.apply, ctx, grad_out, grad_lse)

    @staticmethod
    def vmap(info, in_dims, *arguments):
        batch = _batch(arguments[0], in_dims[0])
        return _unfolded(info.batch_size, _Attention.apply(*_folded(info.batch_size, in_dims, arguments, batch)))


def run(call: Call) -> tuple[Tensor, Tensor]:
    """(out, lse) of a checked call: the backend "triton"."""
    save = torch.is_grad_enabled() and any(x.requires_grad for x in (call.query, call.key, call.value))
    # Neither of these shows in requires_grad.
    transformed = torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0
    pairs = (
        *(call.query, call.key, call.value, call.mask, call.key_mask, call.query_mask),
        *(call.left, call.right, call.top_left, call.scale),
    )
    if torch.compiler.is_compiling():
        if transformed:
            raise NotImplementedError("fusedattn: torch.func inside torch.compile needs backend='naive'")
        out, lse, _ = torch.ops.fusedattn.forward(*pairs, save)
    elif save or transformed:
        out, lse, _ = _Attention.apply(*pairs, True)
    else:
        out, lse, _ = torch.ops.fusedattn.forward(*pairs, False)
    return out, lse


def tiles(call: Call) -> dict:
    """{kernel: Tile} of what a call would launch."""
    from . import launch

    return {kernel: launch.candidates(kernel, call.query, call.value)[0] for kernel in launch.KERNELS}
