"""The operators forward, backward and block_mask of torch.library, and their derivatives.

Operators are opaque to the compiler: a schema, an implementation for CUDA and for CPU (Triton's interpreter), and a
fake one that makes tensors of the same shapes, dtypes and strides. Autograd sits above them, in a Function.
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from ..call.form import DIFFERENTIABLE, TENSORS, WHOLE, Call, Lengths, plain, wide_dtype
from ..call.layout import arrange, dense
from ..call.rules import fail
from ..cpu import run as cpu
from ..launch import failures, tuned
from ..launch.failures import Unusable, take_next
from ..naive import formula
from ..private import below_autograd, forward_level, has_storage, transforms_active
from . import fallback, rules
from .namespace import OPERATORS, register, register_derivative

_CALL = (  # the fields of a Call, in their order
    "Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor? alibi_slopes, Tensor? sinks, "
    "Tensor? mask, Tensor? key_mask, Tensor? query_mask, Tensor? seed, Tensor? block_mask, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
    "SymInt? left, SymInt? right, bool top_left, float scale, float? softcap, float dropout_p, "
    "SymInt? max_seqlen_q, SymInt? max_seqlen_k, bool deterministic, bool named, SymInt[]? origin, bool partial"
)
_INPUTS = Call._fields[:DIFFERENTIABLE]
_AFTER = 4  # how many arguments of forward come after the fields of the Call; of backward 2
_MASKS = 4  # how many arguments of block_mask come before the lengths
_BEFORE = 6  # how many arguments of backward come before them


def run_operator(operator, implementation, arguments):
    """What an operator computes: by the dispatcher, if something must see the operator, otherwise at once.

    The dispatcher also materialises tensors that are not what lies in memory. What comes this way has been checked.
    """
    if plain(arguments):
        return implementation(*arguments)
    with below_autograd():
        return operator(*arguments)


def stats_columns(dtype: torch.dtype, width: int, backend: str = "triton") -> int:
    """How many numbers a row has in the stats that a forward keeps for its backward, as `kernels` and `cpu` have them.

    Kernels: two of the softmax, and of 16-bit outputs, so many columns wide, what rounding took, a byte an element.
    """
    if backend == "cpu":
        return cpu.stats_columns(dtype, width)
    return 2 + (-(-width // 4) if dtype.itemsize == 2 else 0)


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
    save = save or (need_weights and backend != "cpu")  # kernels make weights of stats
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
    f"forward({_CALL}, bool need_lse, bool need_weights, bool save, str backend) "
    "-> (Tensor out, Tensor lse, Tensor weights, Tensor stats)",
    _forward,
    new_forward,
    rules.check_forward,
)
register(
    "backward(Tensor? grad_out, Tensor? grad_lse, Tensor? grad_weights, Tensor out, Tensor weights, Tensor stats, "
    f"{_CALL}, str backend, bool[{DIFFERENTIABLE}] need) -> ({', '.join(f'Tensor grad_{name}' for name in _INPUTS)})",
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
    """setup_context of the forward: what its derivative needs."""
    fields = inputs[:-_AFTER]
    out, _, weights, stats = output
    # As `replay` keeps them: what is computed again for a checkpoint may take the other way.
    saved = *fields[:TENSORS], out, None if weights.dim() == 1 else weights, stats
    ctx.save_for_backward(*saved)
    ctx.facts = facts(saved)
    ctx.numbers, ctx.backend = fields[TENSORS:], inputs[-1]
    ctx.mark_non_differentiable(stats)
    ctx.set_materialize_grads(False)


def _differentiate(ctx, grad_out, grad_lse, grad_weights):
    """Gradients of the inputs of the forward."""
    # A graph makes zeros of what did not come, of what there was none as well.
    grad_lse, grad_weights = (None if x is None or x.dim() == 1 else x for x in (grad_lse, grad_weights))
    incoming = grad_out, grad_lse, grad_weights
    rest = (None,) * (len(Call._fields) - DIFFERENTIABLE + _AFTER)
    if all(grad is None for grad in incoming):
        return (None,) * DIFFERENTIABLE + rest
    need = list(ctx.needs_input_grad[:DIFFERENTIABLE])
    *fields, out, weights, stats = saved = ctx.saved_tensors
    check_saved(ctx.facts, facts(saved))
    weights = out.new_empty(0) if weights is None else weights
    if stats.dim() == 1:  # a graph that was recorded without gradients saves nothing
        with torch.no_grad():
            *_, stats = OPERATORS.forward(*fields, *ctx.numbers, False, False, True, ctx.backend)
    grads = backward(*incoming, out, weights, stats, *fields, *ctx.numbers, ctx.backend, need)
    return (*(grad if needed else None for grad, needed in zip(grads, need, strict=True)), *rest)


def _keep_again(ctx, inputs, output):
    """setup_context of the backward."""
    ctx.save_for_backward(*inputs[:3], *inputs[_BEFORE : _BEFORE + TENSORS])
    ctx.numbers, ctx.need = inputs[_BEFORE + TENSORS : -2], inputs[-1]
    ctx.set_materialize_grads(False)


def _differentiate_again(ctx, *grad_grads):
    """Gradients of the inputs of the backward: the formula, differentiated twice."""
    incoming, tensors = ctx.saved_tensors[:3], ctx.saved_tensors[3:]
    # A graph makes zeros of what did not come, of what nobody needed as well.
    grad_grads = [x if needed else None for x, needed in zip(grad_grads, ctx.need, strict=True)]
    gradients = formula.second_derivative(Call(*tensors, *ctx.numbers), incoming, grad_grads)
    return (*gradients[:3], None, None, None, *gradients[3:], *(None,) * (len(Call._fields) - DIFFERENTIABLE + 2))


def _folded(size, dims, arguments, batch, first=0):
    """Arguments of a vmap over `size` calls with that dimension folded into the batch, of `batch` elements a call.

    first: where the fields of the Call begin.
    """
    if arguments[first + Call._fields.index("cu_seqlens_q")] is not None:
        raise NotImplementedError("cu_seqlens_q: packed sequences under torch.vmap need backend='naive'")
    seed = first + Call._fields.index("seed")
    if arguments[seed] is not None:
        raise NotImplementedError("dropout_p: expected 0 under torch.vmap of the fused kernels; backend='naive' has it")

    def fold(x, dim):
        if not isinstance(x, Tensor):
            return x
        x = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
        if x.dim() == 2:
            return x[0]  # lse, weights or stats that nobody asked for
        # What is broadcast over the batch may differ between calls, and then no longer can be.
        return x.expand(size, batch, *x.shape[2:]).flatten(0, 1)

    return [fold(x, dim) for x, dim in zip(arguments, dims, strict=True)]


def _unfolded(size, x):
    return x.reshape(size, x.shape[0] // max(size, 1), *x.shape[1:])


def _sizes(x, dim):
    """The shape in each call of a tensor that vmap maps over `dim`, or over nothing."""
    return x.shape if dim is None else x.movedim(dim, 0).shape[1:]


class Backward(torch.autograd.Function):
    """The backward operator and its derivative."""

    @staticmethod
    def forward(*arguments):
        return run_operator(OPERATORS.backward, _backward, arguments)

    setup_context = staticmethod(_keep_again)
    backward = staticmethod(_differentiate_again)

    @staticmethod
    def vmap(info, in_dims, *arguments):
        size, query = info.batch_size, _BEFORE
        batch = _sizes(arguments[query], in_dims[query])[0]
        grads = Backward.apply(*_folded(size, in_dims, arguments, batch, first=_BEFORE))
        gradients = []
        for grad, x, dim in zip(grads, arguments[query:], in_dims[query:], strict=False):
            grad = _unfolded(size, grad)
            if grad.numel() and _sizes(x, dim)[0] == 1:
                grad = grad.sum(1, keepdim=True)
            gradients.append(grad)
        return tuple(gradients), (0,) * len(gradients)


def backward(*arguments):
    """`Backward.apply`; it raises for a second derivative that nothing would come of."""
    batched = any(x is not None and not has_storage(x) for x in arguments[:3])
    if batched and torch.is_grad_enabled() and not transforms_active():
        raise NotImplementedError("fusedattn: is_grads_batched with create_graph needs backend='naive', or torch.func")
    return Backward.apply(*arguments)


class _Attention(torch.autograd.Function):
    """The forward operator and its derivative, as eager code and torch.func take them."""

    @staticmethod
    def forward(*arguments):
        return run_operator(OPERATORS.forward, _forward, arguments)

    setup_context = staticmethod(_keep)

    @staticmethod
    def backward(ctx, *incoming):
        return _differentiate(ctx, *incoming[:3])

    @staticmethod
    def vmap(info, in_dims, *arguments):
        batch = _sizes(arguments[0], in_dims[0])[0]
        results = _Attention.apply(*_folded(info.batch_size, in_dims, arguments, batch))
        return tuple(_unfolded(info.batch_size, x) for x in results), (0,) * len(results)


# For graphs that are compiled or exported, and for who calls operators by name.
register_derivative("forward", _Attention.apply)
register_derivative("backward", backward)


def _attend(
    call: Call, need_lse: bool, need_weights: bool, backend: str
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(output, lse or None, weights or None) of a checked call."""
    save = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in call[:DIFFERENTIABLE])
    # Neither of these shows in requires_grad.
    transformed = transforms_active() or forward_level() >= 0
    if torch.compiler.is_compiling():
        if transformed:
            raise NotImplementedError("fusedattn: torch.func inside torch.compile needs backend='naive'")
        out, lse, weights, _ = OPERATORS.forward(*call, need_lse, need_weights, save, backend)
    elif save or transformed:
        # Once for forward and backward. A graph would have to know how many blocks there are, vmap how to fold them.
        if backend != "cpu" and not (transformed or call.mask is call.key_mask is call.query_mask is call.bias is None):
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
