"""The operators forward, backward and block_mask of torch.library, and their derivatives.

Operators are opaque to the compiler: a schema, an implementation for CUDA and for CPU (Triton's interpreter), and a
fake one that makes tensors of the same shapes, dtypes and strides. Autograd sits above them, in a Function.
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from ..call.form import DIFFERENTIABLE, TENSORS, WHOLE, Call, Lengths, wide_dtype
from ..call.layout import arrange, dense
from ..call.rules import fail
from ..cpu import run as cpu
from ..launch import failures, tuned
from ..launch.failures import Unusable, take_next
from ..naive import formula
from ..private import constant, forward_level, has_storage, transforms_active
from . import fallback, rules
from .mapped import mapped
from .namespace import OPERATORS, register, register_derivative
from .schema import CALL, INPUTS, run_operator, stats_columns
from .tangent import Tangent, plus

_RESULTS = "out", "lse", "weights", "stats"
_AFTER = 4  # how many arguments of forward come after the fields of the Call; of backward 2
_MASKS = 4  # how many arguments of block_mask come before the lengths
_BEFORE = 6  # how many arguments of backward come before them
_OF_FORWARD = *Call._fields, "need_lse", "need_weights", "save", "backend"
_OF_BACKWARD = "grad_out", "grad_lse", "grad_weights", "out", "weights", "stats", *Call._fields, "backend", "need"


def _dense(like: Tensor, shape, dtype: torch.dtype | None = None) -> Tensor:
    """`dense`, which a contiguous tensor need not be asked for; in the dtype of `like` by default."""
    return like.new_empty(shape, dtype=dtype) if like.is_contiguous() else dense(like, shape, dtype)


def _new(call, need_lse, need_weights, save, backend):
    """Uninitialised (out, lse, weights, stats).

    lse (B, Hq, Sq) and weights (B, Hq, Sq, Sk) are empty unless needed; stats (B, Hq, Sq, columns of `stats_columns`),
    what recomputes weights and the mean of their gradients, if nothing will.
    """
    query, rows, width = call.query, call.query.shape[:3], call.value.shape[3]
    wide = wide_dtype(call)
    lse = query.new_empty(rows if need_lse else (0,), dtype=wide)
    columns = call.key.shape[2] if call.cu_seqlens_q is None else call.max_seqlen_k
    weights = query.new_empty((*rows, columns) if need_weights else (0,))
    out = _dense(query, (*rows, width), wide if call.partial else None)
    kept = stats_columns(out.dtype, width, backend)
    save = save or (need_weights and backend in ("hopper", "triton"))  # kernels make weights of stats
    return out, lse, weights, lse.new_empty((*rows, kept) if save else (0,))


def new_forward(*arguments):
    """`_new` of the arguments of the forward."""
    return _new(Call(*arguments[:-_AFTER]), *arguments[-_AFTER:])


def new_backward(*arguments):
    """Uninitialised gradients, each in the order of what it is the gradient of; empty where it is not needed."""
    call, need = Call(*arguments[_BEFORE:-2]), arguments[-1]
    wide = wide_dtype(call) if call.partial else None
    dtypes = wide, wide, wide, None, None, None
    triples = zip(call[:DIFFERENTIABLE], need, dtypes, strict=True)
    return tuple([_dense(x, x.shape, dtype) if needed else call.query.new_empty(0) for x, needed, dtype in triples])


def _forward(*arguments):
    call, backend = Call(*arguments[:-_AFTER]), arguments[-1]
    if backend == "cpu":
        return cpu.forward(call, *arguments[-_AFTER:-1])
    if backend == "naive":
        return fallback.results(call, *arguments[-_AFTER:-1])
    out, *rest = results = _new(call, *arguments[-_AFTER:])
    if out.numel():
        # The first call imports Triton, nothing before it does.
        from ..launch import forward, run as launch

        filled = [x if x.numel() else None for x in rest]
        for on_hopper in (True, False) if backend == "hopper" and launch.has_hopper(out) else (False,):
            try:
                forward.forward(out, *filled, call, on_hopper)
                break
            except Unusable as why:
                if on_hopper:
                    take_next(why, call.named)
                else:
                    fallback.forward(results, call, why)
    return results


def _backward(*arguments):
    grad_out, grad_lse, grad_weights, out, weights, stats = arguments[:_BEFORE]
    call, (backend, need) = Call(*arguments[_BEFORE:-2]), arguments[-2:]
    if backend == "cpu":
        return cpu.backward(call, (grad_out, grad_lse, grad_weights), out, stats, need)
    grads = new_backward(*arguments)
    if not out.numel():
        for grad in grads:
            grad.zero_()
        return grads
    if backend == "naive":
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
        if _any_failed(call) and (why := launch.failed(call, names)) is not None:
            raise why  # the forward was computed by the naive path, and there are no stats
        fill(wanted, grad_out, grad_lse, grad_weights, out, weights, stats, call)
    except Unusable as why:
        fallback.backward(grads, (grad_out, grad_lse, grad_weights), call, why)
    return grads


def _arranged_backward(*arguments):
    """`_backward` as the operator promises it: in the order of dimensions that `new_backward` has."""
    grads, inputs = _backward(*arguments), arguments[_BEFORE : _BEFORE + DIFFERENTIABLE]
    triples = zip(grads, inputs, arguments[-1], strict=True)
    return tuple([arrange(grad, x, grad.dtype) if needed else grad for grad, x, needed in triples])


def _of_masks(function, arguments):
    """A function of launch.blocks, of the arguments of `block_mask`."""
    from ..launch import blocks

    masks, lengths = arguments[:_MASKS], Lengths(*arguments[_MASKS:])
    size = blocks.block_mask_size(next(mask.device for mask in masks if mask is not None))
    return getattr(blocks, function)(*masks, None if lengths.cu_seqlens_q is None else lengths, size)


register(
    f"forward({CALL}, bool need_lse, bool need_weights, bool save, str backend) "
    "-> (Tensor out, Tensor lse, Tensor weights, Tensor stats)",
    _forward,
    new_forward,
    rules.check_forward,
)
register(
    "backward(Tensor? grad_out, Tensor? grad_lse, Tensor? grad_weights, Tensor out, Tensor weights, Tensor stats, "
    f"{CALL}, str backend, bool[{DIFFERENTIABLE}] need) -> ({', '.join(f'Tensor grad_{name}' for name in INPUTS)})",
    _arranged_backward,
    new_backward,
    functools.partial(rules.check_backward, stats_columns),
)
register(
    "block_mask(Tensor? mask, Tensor? key_mask, Tensor? query_mask, Tensor? bias, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k, SymInt rows, SymInt keys, SymInt? max_seqlen_q, SymInt? max_seqlen_k) -> Tensor",
    lambda *arguments: _of_masks("block_mask", arguments),
    lambda *arguments: _of_masks("new_block_mask", arguments)[0],
    rules.check_block_mask,
)


def facts(tensors) -> list:
    """(shape, dtype) of each tensor, or None."""
    return [None if x is None else (x.shape, x.dtype) for x in tensors]


def check_saved(before: list, after: list) -> None:
    """Raise for saved tensors that came back from hooks with other `facts`: kernels would read outside of them."""
    for saved, came in zip(before, after, strict=True):
        if saved != came:
            expected = f"a tensor of {saved[1]} and shape {tuple(saved[0])} back, as it was saved"
            fail(ValueError, "saved_tensors_hooks", expected, f"{came[1]} and shape {tuple(came[0])}")


def _keep(ctx, inputs, output):
    """setup_context of the forward: what its derivatives need."""
    fields = inputs[:-_AFTER]
    out, lse, weights, stats = output
    # As `replay` keeps them: what is computed again for a checkpoint may take the other way.
    saved = *fields[:TENSORS], out, None if weights.dim() == 1 else weights, stats
    ctx.save_for_backward(*saved)
    ctx.save_for_forward(*saved)
    ctx.facts = facts(saved)
    ctx.numbers, ctx.backend = fields[TENSORS:], inputs[-1]
    ctx.of_results = lse.dim() > 1, weights.dim() > 1
    ctx.mark_non_differentiable(stats)
    ctx.set_materialize_grads(False)


def _stats(stats, fields, backend):
    """What a forward has kept; it is made now where a graph that was recorded without gradients saved nothing."""
    if stats.dim() == 4:
        return stats
    with torch.no_grad():
        return OPERATORS.forward(*fields, False, False, True, backend)[3]


def gradients(incoming, out, weights, stats, fields, backend, need):
    """Gradients of the first of the fields of a Call, from those of its results; None where they are not needed.

    weights: None, where the forward made none.
    """
    stats = _stats(stats, fields, backend)
    if weights is None and incoming[2] is not None:
        weights = OPERATORS.forward(*fields, False, True, False, backend)[2].detach()
    weights = out.new_empty(0) if weights is None else weights
    grads = backward(*incoming, out, weights, stats, *fields, backend, need)
    return [grad if needed else None for grad, needed in zip(grads, need, strict=True)]


def _differentiate(ctx, grad_out, grad_lse, grad_weights):
    """Gradients of the inputs of the forward."""
    # A graph makes zeros of what did not come, of what there was none as well.
    grad_lse, grad_weights = (None if x is None or x.dim() == 1 else x for x in (grad_lse, grad_weights))
    incoming = grad_out, grad_lse, grad_weights
    rest = (None,) * (len(Call._fields) - DIFFERENTIABLE + _AFTER)
    if all(grad is None for grad in incoming):
        return (None,) * DIFFERENTIABLE + rest
    *fields, out, weights, stats = saved = ctx.saved_tensors
    check_saved(ctx.facts, facts(saved))
    need = list(ctx.needs_input_grad[:DIFFERENTIABLE])
    return (*gradients(incoming, out, weights, stats, (*fields, *ctx.numbers), ctx.backend, need), *rest)


def _move(ctx, *tangents):
    """Tangents of the results of the forward."""
    *fields, out, _, stats = ctx.saved_tensors
    fields, (has_lse, has_weights) = (*fields, *ctx.numbers), ctx.of_results
    given, stats = tangents[:DIFFERENTIABLE], _stats(stats, fields, ctx.backend)
    out, lse, weights = Tangent.apply(*given, out, stats, *fields, has_weights, ctx.backend)
    # Of what was not needed a tangent as empty as that; torch takes no None.
    return out, lse if has_lse else lse.new_zeros(0), weights if has_weights else out.new_zeros(0), None


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
    gradients = formula.second_derivative(Call(*tensors, *ctx.numbers), incoming, grad_grads)
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
        curved = formula.second_derivative(Call(*fields), incoming, moved)[3:]
        curved = [x if needed else None for x, needed in zip(curved, need, strict=True)]
        total = [plus(*pair) for pair in zip(total, curved, strict=True)]
    made = []
    for x, field, needed in zip(total, fields, need, strict=False):
        if not needed:
            made.append(out.new_zeros(0))
        else:  # torch wants it to lie as the gradient does
            made.append(torch.zeros_like(field) if x is None else arrange(x, field))
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
        return mapped(Backward.apply, _OF_BACKWARD, INPUTS, info, in_dims, arguments)


def backward(*arguments):
    """`Backward.apply`; it raises for a second derivative that nothing would come of."""
    batched = any(x is not None and not has_storage(x) for x in arguments[:3])
    if batched and torch.is_grad_enabled() and not transforms_active():
        raise NotImplementedError("fusedattn: is_grads_batched with create_graph needs backend='naive', or torch.func")
    return Backward.apply(*arguments)


class _Attention(torch.autograd.Function):
    """The forward operator and its derivatives, as eager code and torch.func take them."""

    @staticmethod
    def forward(*arguments):
        return run_operator(OPERATORS.forward, _forward, arguments)

    setup_context = staticmethod(_keep)
    jvp = staticmethod(_move)

    @staticmethod
    def backward(ctx, *incoming):
        return _differentiate(ctx, *incoming[:3])

    @staticmethod
    def vmap(info, in_dims, *arguments):
        return mapped(_Attention.apply, _OF_FORWARD, _RESULTS, info, in_dims, arguments)


# For graphs that are compiled or exported, and for who calls operators by name.
register_derivative("forward", _Attention.apply)
register_derivative("backward", backward)


def _transformed(*arguments):
    """`_Attention.apply`, which a compiler that meets it inside a transform runs, and does not look into."""
    return _Attention.apply(*arguments)


@constant
def allow_in_graph() -> None:
    """Tell the compiler so; it calls this as it compiles, so that nobody has to import it before."""
    torch.compiler.allow_in_graph(_transformed)


def _attend(
    call: Call, need_lse: bool, need_weights: bool, backend: str
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(output, lse or None, weights or None) of a checked call."""
    save = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in call[:DIFFERENTIABLE])
    # Neither of these shows in requires_grad.
    transformed = transforms_active() or forward_level() >= 0
    if torch.compiler.is_compiling() and transformed:
        allow_in_graph()
        out, lse, weights, _ = _transformed(*call, need_lse, need_weights, True, backend)
    elif torch.compiler.is_compiling():
        out, lse, weights, _ = OPERATORS.forward(*call, need_lse, need_weights, save, backend)
    elif save or transformed:
        # Once for forward and backward. A graph would have to know how many blocks there are, vmap how to fold them.
        masked = not call.mask is call.key_mask is call.query_mask is call.bias is None
        if masked and backend in ("hopper", "triton") and not transformed:
            call = _with_block_mask(call)
        out, lse, weights, _ = _Attention.apply(*call, need_lse, need_weights, True, backend)
    else:
        arguments = *call, need_lse, need_weights, False, backend
        out, lse, weights, _ = run_operator(OPERATORS.forward, _forward, arguments)
    return out, lse if need_lse else None, weights if need_weights else None


def run(call: Call, need_lse: bool, need_weights: bool):
    """The backend "triton"."""
    return _attend(call, need_lse, need_weights, "triton")


def run_on_hopper(call: Call, need_lse: bool, need_weights: bool):
    """The backend "hopper"."""
    return _attend(call, need_lse, need_weights, "hopper")


def run_naively(call: Call, need_lse: bool, need_weights: bool):
    """The backend "naive". Derivatives see through it, with two exceptions.

    Under vmap dropout has the bits that kernels have, and lengths of sequences may be mapped. And a gradient of a
    tangent outside of torch.func is ours, for torch 2.13 writes over what its own softmax has kept for it.
    """
    hidden = transforms_active() and not call.seed is call.cu_seqlens_q is None
    if hidden or (forward_level() >= 0 and not transforms_active() and torch.is_grad_enabled()):
        return _attend(call, need_lse, need_weights, "naive")
    return formula.run(call, need_lse, need_weights)


def run_on_cpu(call: Call, need_lse: bool, need_weights: bool):
    """The backend "cpu"."""
    return _attend(call, need_lse, need_weights, "cpu")


def block_mask(
    mask: Tensor | None,
    key_mask: Tensor | None,
    query_mask: Tensor | None,
    bias: Tensor | None = None,
    lengths: Lengths | None = None,
) -> Tensor:
    """The block mask of these masks, in the form that a Call has them; a bias of -inf hides as well."""
    bias = None if bias is None else bias.detach()
    return OPERATORS.block_mask(mask, key_mask, query_mask, bias, *(WHOLE if lengths is None else lengths))


def block_mask_or_none(masks: Sequence[Tensor | None], lengths: Lengths | None = None) -> Tensor | None:
    """`block_mask`; None where its kernel does not compile or load on this machine, which a call will say."""
    try:
        mask, key_mask, query_mask, bias = masks
        return block_mask(mask, key_mask, query_mask, bias, lengths)
    except Unusable:
        return None


def _with_block_mask(call: Call) -> Call:
    """A call with the block mask of its masks."""
    if call.block_mask is not None or all(x is None for x in call.hiding):
        return call
    return call._replace(block_mask=block_mask_or_none(call.hiding, call.lengths))


def _any_failed(call):
    """Whether any kernel at all is known not to run, or to be wrong, on the device of a call."""
    return bool(failures.known_kinds or tuned.of(call.query.device).wrong)


def failed(call: Call, need_weights: bool, on_hopper: bool) -> list[str]:
    """Why a call cannot take kernels that it would launch: those that do not load on this machine, or are wrong."""
    if torch.compiler.is_compiling() or not _any_failed(call):
        return []
    from ..launch import run as launch
    from ..launch.backward import passes

    need = [isinstance(x, Tensor) and x.requires_grad for x in call[:DIFFERENTIABLE]]
    backward = passes(call, need) if torch.is_grad_enabled() and any(need) else ()
    names = ["hopper" if on_hopper else "forward", *(["weights"] if need_weights else []), *backward]
    return [str(why)] if (why := launch.failed(call, names)) is not None else []


def tiles(call: Call, need_weights: bool, on_hopper: bool) -> dict:
    """{kernel: Tile or Pipeline} of what a call would launch, its backward to query, key, value and what is learned."""
    from ..launch import run as launch
    from ..launch.backward import passes

    learned = call.bias, call.alibi_slopes, call.sinks
    need = True, True, True, *(x is not None and x.requires_grad for x in learned)
    return launch.tiles(call, need_weights, on_hopper, passes(call, need))
