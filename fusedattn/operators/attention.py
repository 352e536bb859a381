"""The torch.library operator `forward`, which computes attention, with its derivatives.

A compiler sees only an operator's schema and its fake, which makes tensors of the right shapes, dtypes and strides.
The implementation serves CUDA and CPU tensors. A torch.autograd.Function, which calls the operator, adds derivatives.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from ..call.checks import fail, plain
from ..call.layout import in_order, order, own_storage, row_major
from ..call.options import INPUTS, Call, inputs as inputs_of, wide_dtype
from ..call.private import constant, forward_level, is_exporting, saved_tensors_hooks, transforms_active
from ..cpu import run as cpu
from ..launch.failures import KernelUnavailable
from ..naive import formula
from . import partial, repeats, rules, schema
from .backward import differentiate, saved_stats
from .namespace import OPERATORS, Node, register
from .schema import FORWARD, KERNELS, RESULTS, by_kernel, fill, new_results, run_operator, saved, stats_columns
from .tangent import Tangent


def new_forward(*arguments):
    """Return uninitialised (out, lse, weights, stats); all but out are empty unless needed."""
    call, (need_lse, need_weights, save, backend) = Call(*arguments[: FORWARD.last]), arguments[FORWARD.last :]
    out, lse, weights = new_results(call, need_lse, need_weights)
    columns = stats_columns(out.dtype, out.shape[3], backend)
    save = save or (need_weights and backend in KERNELS)  # kernels compute weights from stats
    return out, lse, weights, lse.new_empty((*out.shape[:3], columns) if save else (0,))


def _naive(call: Call, need_lse: bool, need_weights: bool, save: bool) -> tuple[Tensor | None, ...]:
    out, lse, weights = formula.run_naive(call, need_lse, need_weights)
    stats = out.new_empty((*out.shape[:3], 0), dtype=wide_dtype(call.query.dtype)) if save else None
    return out, lse, weights, stats


def _filled(call: Call, out: Tensor, lse: Tensor | None, weights: Tensor | None, stats: Tensor | None) -> tuple:
    """Return the results of a forward, with empty tensors for None. All but the output become row-major."""
    query, wide = call.query, wide_dtype(call.query.dtype)
    pairs = (lse, wide), (weights, query.dtype), (stats, wide)
    return out, *[query.new_empty(0, dtype=dtype) if x is None else row_major(x) for x, dtype in pairs]


def _compute(call, options, chosen=True):
    """Compute (output, lse, weights, stats). Results that are not needed are None or empty."""
    *needs, backend = options
    if backend in ("cpu", "naive"):
        return (cpu.forward if backend == "cpu" else _naive)(call, *needs)
    out, *rest = results = new_forward(*call, *options)
    if out.numel():
        from ..launch import forward, run  # they import Triton

        filled = [x if x.numel() else None for x in rest]
        kinds = (True, False) if run.on_hopper(call, backend, chosen) else (False,)
        bare = schema.rounded_lengths(call, needs[1])
        launches = [functools.partial(forward.launch_forward, out, *filled, bare, on_hopper) for on_hopper in kinds]

        def naive():
            if partial.is_part(call, needs[1]):
                fill(results, partial.naive_forward(call, backend))
                return
            fill(results, formula.run_naive(call, *needs[:2]))
            results[3].fill_(float("nan"))  # derivatives will be naive too (`run.without_stats`), and read no stats

        by_kernel(call, launches, naive)
    return results


def record(options, marks, recorder, call, chosen=True):
    """Launch a forward in a Recorder. Return results, block mask and mask bits. marks: compute the last two here."""
    from ..launch import blocks, forward, run

    call = blocks.marked(call) if marks else call
    results = [recorder.make(x) if x.numel() else None for x in new_forward(*call, *options)]
    forward.launch_forward(*results, call, run.on_hopper(call, options[-1], chosen))
    return [*results, call.block_mask, call.mask_bits]


def _repeat(call, options, chosen=True):
    """Return what `_compute` returns. Repeat the launches of an earlier call of the same kind, if they are recorded."""
    found = None
    if options[-1] in KERNELS:
        launch = functools.partial(record, options, False, chosen=chosen)
        found = repeats.repeat(("forward", options), schema.rounded_lengths(call, options[1]), (), launch)
    return _compute(call, options, chosen) if found is None else found[: len(RESULTS) + 1]


def _forward(*arguments):
    _, call, options = FORWARD.split(arguments)
    *results, stats = _repeat(call, options, chosen=False)
    if options[-1] == "cpu" and stats is not None:  # a copy, because it may be a view
        stats = cpu.with_all_columns(stats, results[0]).clone(memory_format=torch.contiguous_format)
    results = _filled(call, *results, stats)
    return tuple(map(own_storage, results)) if options[2] else results  # forward mode requires own storages


def _decompose(*arguments):
    _, call, (*needs, _) = FORWARD.split(arguments)
    if call.partial:
        fail(ValueError, "partial", "False: parts cannot be exported", True)
    return _filled(call, *_naive(call, *needs))


class _Attention(Node):
    """The forward operator with its derivatives, for eager code and torch.func."""

    operator, signature, implementation, results = "forward", FORWARD, _forward, (*RESULTS, "stats")

    @staticmethod
    def setup_context(ctx, inputs, output):
        out, lse, weights, stats = output
        # Save what a replay (dispatch/replay.py) saves: a checkpoint may recompute this call by a replay.
        schema.save(ctx, inputs, out, None if weights.dim() == 1 else weights, stats)
        ctx.has_lse, ctx.has_weights = lse.dim() > 1, weights.dim() > 1
        ctx.mark_non_differentiable(stats)

    @staticmethod
    def backward(ctx, *incoming):
        grads = differentiate(ctx, incoming[: len(RESULTS)], ctx.needs_input_grad[: len(INPUTS)])
        return FORWARD.named(dict(zip(INPUTS, grads, strict=True)))

    @staticmethod
    def jvp(ctx, *tangents):
        arguments, (out, _, stats) = saved(ctx)
        _, call, (*_, backend) = FORWARD.split(arguments)
        directions, stats = FORWARD.of_inputs(tangents), saved_stats(stats, call, backend)
        tangent, lse, weights = Tangent.apply(*directions, out, stats, *call, ctx.has_weights, backend)
        out = in_order(tangent, order(out))  # torch requires the output's strides; its older vmap changes them
        # torch takes no None: a result that was not needed has an empty tangent.
        return out, lse if ctx.has_lse else lse.new_zeros(0), weights if ctx.has_weights else out.new_zeros(0), None


class _Direct(torch.autograd.Function):
    """Autograd node of a call that is `plain`: its forward skips torch's dispatcher. It tracks `inputs`."""

    @staticmethod
    def forward(ctx, compute, call, options, *inputs):
        out, lse, weights, stats = compute(call, options)
        if saved_tensors_hooks(False) is not None:  # a checkpoint may recompute this call by the operator
            stats = cpu.with_all_columns(stats, out)
        schema.save(ctx, (*call, *options), out, weights if options[1] else None, stats)
        return out, lse, weights

    @staticmethod
    def backward(ctx, *incoming):
        return None, None, None, *differentiate(ctx, incoming, ctx.needs_input_grad[3:])


_direct = super(torch.autograd.Function, _Direct).apply  # the C++ `apply`: Python's takes 70 us to find wrappers
_FORWARD = f"forward({FORWARD.schema}) -> (Tensor out, Tensor lse, Tensor weights, Tensor stats)"
register(_FORWARD, _forward, new_forward, rules.check_forward, _Attention.apply, _decompose)


def _transformed(*arguments):
    """Call `_Attention.apply`; the compiler treats this as one node."""
    return _Attention.apply(*arguments)


@constant
def allow_in_graph() -> None:
    """Register `_transformed` with the compiler. Call this while compiling: at import it would load the compiler."""
    torch.compiler.allow_in_graph(_transformed)


def _attend(call: Call, need_lse: bool, need_weights: bool, learned: bool = False, *, backend: str):
    """Return (output, lse or None, weights or None) of a checked call.

    learned: the call is `plain`, and dispatch/replay.py counts its kind, so its launches are not repeated here.
    """
    direct, compiling = learned or plain(call), torch.compiler.is_compiling()
    inputs = inputs_of(call)
    save = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    # A transform or forward mode may take a derivative although no tensor requires a gradient.
    transformed = not direct and (transforms_active() or forward_level() >= 0)
    # Forward and backward share a block mask. In graphs and under vmap its size is unknown, so each makes its own.
    if backend in KERNELS and save and direct:
        call = _marked(call)
    options: Any = need_lse, need_weights, save or transformed, backend
    if direct:
        compute = _compute if learned else _repeat
        results = _direct(compute, call, options, *inputs) if save else compute(call, options)
    elif compiling and not transformed:
        results = OPERATORS.forward(*call, *options)
    elif compiling:
        allow_in_graph()
        results = _transformed(*call, *options)
    elif save or transformed:
        results = _Attention.apply(*call, *options)
    else:
        results = run_operator(OPERATORS.forward, _forward, *call, *options)
    return results[0], results[1] if need_lse else None, results[2] if need_weights else None


run_triton, run_hopper, run_cpu = (functools.partial(_attend, backend=name) for name in ("triton", "hopper", "cpu"))


def run_naive(call: Call, need_lse: bool, need_weights: bool, learned: bool = False):
    """Compute attention by PyTorch operations, which autograd records, or in four cases by our custom operator."""
    transformed, compiling, packed = transforms_active(), torch.compiler.is_compiling(), call.cu_seqlens_q is not None
    # The operator finds the longest sequence at run time, which a compiler cannot.
    unknown = compiling and packed and (call.max_seqlen_q is None or call.max_seqlen_k is None)
    # torch.vmap would number the batches and heads for dropout wrongly, and cannot read mapped offsets.
    mapped = transformed and (call.seed is not None or packed)
    # In the gradient of a tangent, torch 2.13 overwrites a tensor that its softmax saved.
    reversed_tangent = forward_level() >= 0 and not transformed and torch.is_grad_enabled()
    # A graph for a CPU compiles twice as fast with dropout in the operator.
    dropped = compiling and call.seed is not None and call.query.device.type == "cpu" and not is_exporting()
    dropped = dropped and not transformed and forward_level() < 0
    if unknown or mapped or reversed_tangent or dropped:
        return _attend(call, need_lse, need_weights, learned, backend="naive")
    return formula.run_naive(call, need_lse, need_weights)


@torch.no_grad()
def _marked(call: Call) -> Call:
    """Return a call with a block mask of its masks; unchanged without masks, or if the kernel does not run here."""
    from ..launch import blocks

    try:
        return blocks.marked(call)
    except KernelUnavailable:
        return call
