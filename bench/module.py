"""Is our module faster than torch.nn.MultiheadAttention?    python -m fusedattn.bench module

Self-attention with its projections, all with one set of weights: fusedattn.MultiHeadAttention, its drop-in for torch's
(fusedattn.compat), and torch's own, in inference with its fast path as it comes and, as torch.nn:sdpa, without. forward
is in evaluation mode without gradients; forward_backward has those of the input and of every parameter.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

import fusedattn as fa
from fusedattn.testing.compare import in_float64

from . import accuracy, attention, cases, cost, timing

MODES = ("forward", "forward_backward")
RESULTS = ("out", "weights")
GRADIENTS = ("x", "in_weight", "in_bias", "out_weight", "out_bias")


class Layer(NamedTuple):
    """attend(x) -> (output, weights or None); parameters: for all of GRADIENTS but x its parts in our order."""

    module: torch.nn.Module
    attend: Callable
    parameters: tuple[list, ...]


def draw(case, device):
    """{"x" (B, S, E), "out", the gradient of the output, and the parameters: random}"""
    width, generator = case.Hq * case.D, torch.Generator(device).manual_seed(cases.SEED)
    shapes = dict(x=(case.B, case.Sq, width), out=(case.B, case.Sq, width))
    shapes |= dict(in_weight=(3 * width, width), in_bias=(3 * width,), out_weight=(width, width), out_bias=(width,))
    scales, dtype = dict(in_weight=width**-0.5, out_weight=width**-0.5), getattr(torch, case.dtype)
    return {
        name: (scales.get(name, 1.0) * torch.randn(shape, device=device, generator=generator)).to(dtype)
        for name, shape in shapes.items()
    }


def torch_layer(case, drawn, kind=torch.nn.MultiheadAttention, fast=True):
    x = drawn["x"]
    layer = kind(x.shape[2], case.Hq, batch_first=True, device=x.device, dtype=x.dtype)
    parameters = [[layer.in_proj_weight], [layer.in_proj_bias], [layer.out_proj.weight], [layer.out_proj.bias]]
    options = dict(need_weights="weights" in case.words, average_attn_weights=False)
    if case.causal:
        hidden = torch.ones(case.Sq, case.Sq, dtype=torch.bool, device=x.device).triu(1)
        options |= dict(attn_mask=hidden, is_causal=True)

    def attend(x):
        before = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(before and fast)
        try:
            return layer(x, x, x, **options)
        finally:
            torch.backends.mha.set_fastpath_enabled(before)

    return _filled(layer, attend, parameters, drawn)


def our_layer(case, drawn):
    x = drawn["x"]
    layer = fa.MultiHeadAttention(x.shape[2], case.Hq, causal=case.causal, device=x.device, dtype=x.dtype)
    inner, out = (layer.q_proj, layer.k_proj, layer.v_proj), layer.out_proj
    parameters = [[proj.weight for proj in inner], [proj.bias for proj in inner], [out.weight], [out.bias]]
    return _filled(layer, lambda x: layer(x, need_weights="weights" in case.words), parameters, drawn)


@torch.no_grad()
def _filled(layer, attend, parameters, drawn):
    """The Layer, with drawn numbers in its parameters."""
    for parts, name in zip(parameters, GRADIENTS[1:], strict=True):
        for part, values in zip(parts, drawn[name].chunk(len(parts)), strict=True):
            part.copy_(values)
    return Layer(layer, attend, tuple(parameters))


def layers(case, drawn):
    """{provider: setup}"""
    heads = drawn["x"].new_empty(()).expand(case.B, case.Hq, case.Sq, case.D)
    backend = fa.explain(heads, heads, heads, causal=case.causal, return_weights="weights" in case.words).backend
    return {
        f"fusedattn:{backend}": lambda: our_layer(case, drawn),
        f"fusedattn.compat:{backend}": lambda: torch_layer(case, drawn, fa.compat.torch.MultiheadAttention),
        "torch.nn": lambda: torch_layer(case, drawn),
        "torch.nn:sdpa": lambda: torch_layer(case, drawn, fast=False),
    }


def count(modes):
    """How many rows `measure_all` yields."""
    return 4 * len(modes) - modes.count("forward_backward")


def step(mode, layer, drawn):
    """The function that is timed: it returns output and weights, or the gradients of x and of each parameter."""
    layer.module.train(mode != "forward")
    if mode == "forward":
        return torch.no_grad()(lambda: layer.attend(drawn["x"]))
    leaves = [drawn["x"].detach().requires_grad_(), *(part for parts in layer.parameters for part in parts)]
    return lambda: torch.autograd.grad(layer.attend(leaves[0])[0], leaves, drawn["out"])


def formula(case, drawn, function):
    """{name of RESULTS or GRADIENTS: tensor}, by a function of the reference."""
    x, *weights = leaves = [drawn[name].detach().requires_grad_() for name in GRADIENTS]
    projected = F.linear(x, *weights[:2]).unflatten(-1, (3, case.Hq, case.D)).permute(2, 0, 3, 1, 4)
    results = function(*projected, causal=case.causal, return_weights="weights" in case.words)
    out, *shares = results if isinstance(results, tuple) else (results,)
    out = F.linear(out.transpose(1, 2).flatten(2), *weights[2:])
    gradients = dict(zip(GRADIENTS, torch.autograd.grad(out, leaves, drawn["out"]), strict=True))
    return gradients | {name: tensor.detach() for name, tensor in zip(RESULTS, (out, *shares), strict=False)}


def truth(case, drawn):
    """The Truth of a layer, by the reference in float64 and by eager PyTorch."""
    exact = formula(case, in_float64(drawn), fa.reference.attention)
    return accuracy.Truth(exact, formula(case, drawn, fa.reference.eager))


def judge(mode, layer, result, truth):
    """As `accuracy.judge`, of the result of a step."""
    if mode == "forward":
        results = {name: tensor for name, tensor in zip(RESULTS, result, strict=True) if tensor is not None}
    else:
        left, counts = iter(result), (1, *map(len, layer.parameters))
        results = {
            name: torch.cat([next(left) for _ in range(count)]) for name, count in zip(GRADIENTS, counts, strict=True)
        }
    return accuracy.compare(results, truth)


def measure_all(machine, case, modes, device, budget_ms):
    """Yield (row, what is wrong or "") of each provider and mode of a case."""
    drawn = draw(case, device)
    right, options = truth(case, drawn), f"module {case.options}".strip()

    def measure(setup, mode):
        layer = setup()
        work = cost.module_flops(case, mode), cost.module_moved(case, mode)
        return attention.columns(
            step(mode, layer, drawn),
            lambda result: judge(mode, layer, result, right),
            case.dtype,
            device,
            budget_ms,
            timing.measure,
            work,
        )

    for provider, setup in layers(case, drawn).items():
        for mode in modes:
            if mode == "forward" or provider != "torch.nn:sdpa":  # where there are gradients there is no fast path
                yield attention.row_of(
                    machine, case, mode, provider, lambda setup=setup, mode=mode: measure(setup, mode), options
                )
