"""Is our module faster than torch.nn.MultiheadAttention?    python -m fusedattn.bench.module

Self-attention with its projections, all with one set of weights: fusedattn.MultiHeadAttention, its drop-in for torch's
(fusedattn.compat), and torch's own, in inference with its fast path as it comes and, as torch.nn:sdpa, without. forward
is in evaluation mode without gradients; forward_backward has those of the input and of every parameter.
"""

import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

import fusedattn as fa
from fusedattn.testing.compare import in_float64
from fusedattn.testing.tolerance import verdicts

from . import accuracy, attention, cases, command, cost, rows, table, timing

MODES = ("forward", "forward_backward")
RESULTS = ("out", "weights")
GRADIENTS = ("x", "in_weight", "in_bias", "out_weight", "out_bias")


class Layer(NamedTuple):
    """attend(x) -> (output, weights or None); parameters: for all of GRADIENTS but x the parts that ours are in."""

    module: torch.nn.Module
    attend: Callable
    parameters: tuple[list, ...]


def draw(case, device):
    """{"x" (B, S, E), "out", the gradient of the output, and the parameters: random}"""
    width, generator = case.Hq * case.D, torch.Generator(device).manual_seed(cases.SEED)
    shapes = dict(x=(case.B, case.Sq, width), out=(case.B, case.Sq, width))
    shapes |= dict(in_weight=(3 * width, width), in_bias=(3 * width,), out_weight=(width, width), out_bias=(width,))
    scales = dict(in_weight=width**-0.5, out_weight=width**-0.5)
    return {
        name: (scales.get(name, 1.0) * torch.randn(shape, device=device, generator=generator)).to(
            getattr(torch, case.dtype)
        )
        for name, shape in shapes.items()
    }


def torch_layer(case, drawn, kind=torch.nn.MultiheadAttention, fast=True):
    x, width = drawn["x"], case.Hq * case.D
    layer = kind(width, case.Hq, batch_first=True, device=x.device, dtype=x.dtype)
    owned = layer.in_proj_weight, layer.in_proj_bias, layer.out_proj.weight, layer.out_proj.bias
    _fill(owned, [drawn[name] for name in GRADIENTS[1:]])
    words = dict(need_weights="weights" in case.words, average_attn_weights=False)
    if case.causal:
        hidden = torch.ones(case.Sq, case.Sq, dtype=torch.bool, device=x.device).triu(1)
        words |= dict(attn_mask=hidden, is_causal=True)

    def attend(x):
        return layer(x, x, x, **words)

    def slow(x):
        before = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            return attend(x)
        finally:
            torch.backends.mha.set_fastpath_enabled(before)

    return Layer(layer, attend if fast else slow, tuple([each] for each in owned))


def our_layer(case, drawn):
    x, width = drawn["x"], case.Hq * case.D
    layer = fa.MultiHeadAttention(width, case.Hq, causal=case.causal, device=x.device, dtype=x.dtype)
    inner = layer.q_proj, layer.k_proj, layer.v_proj
    owned = (
        [each.weight for each in inner],
        [each.bias for each in inner],
        [layer.out_proj.weight],
        [layer.out_proj.bias],
    )
    for parts, name in zip(owned, GRADIENTS[1:], strict=True):
        _fill(parts, drawn[name].chunk(len(parts)))
    return Layer(layer, lambda x: layer(x, need_weights="weights" in case.words), owned)


@torch.no_grad()
def _fill(parameters, values):
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)


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
    """How many rows `measured` makes of a case."""
    return 4 * len(modes) - modes.count("forward_backward")


def step(mode, layer, drawn):
    """What is timed: a closure that returns output and weights, or the gradients of x and of each parameter."""
    layer.module.train(mode != "forward")
    if mode == "forward":

        def forward():
            with torch.no_grad():
                return layer.attend(drawn["x"])

        return forward
    leaves = [drawn["x"].detach().requires_grad_(), *(part for parts in layer.parameters for part in parts)]
    return lambda: torch.autograd.grad(layer.attend(leaves[0])[0], leaves, drawn["out"])


def formula(case, drawn, function):
    """{of RESULTS and GRADIENTS: tensor}, by a function of the reference."""
    x, *weights = leaves = [drawn[name].detach().requires_grad_() for name in GRADIENTS]
    projected = F.linear(x, *weights[:2]).unflatten(-1, (3, case.Hq, case.D)).permute(2, 0, 3, 1, 4)
    results = function(*projected, causal=case.causal, return_weights="weights" in case.words)
    out, *shares = results if isinstance(results, tuple) else (results,)
    out = F.linear(out.transpose(1, 2).flatten(2), *weights[2:])
    found = dict(zip(GRADIENTS, torch.autograd.grad(out, leaves, drawn["out"]), strict=True))
    return found | {name: each.detach() for name, each in zip(RESULTS, (out, *shares), strict=False)}


def truth(case, drawn):
    """What a layer should give, and what eager PyTorch gives in its dtype."""
    exact = formula(case, in_float64(drawn), fa.reference.attention)
    return accuracy.Truth(exact, formula(case, drawn, fa.reference.eager))


def judge(mode, layer, result, truth):
    """As `accuracy.judge`."""
    if mode == "forward":
        got = {name: each for name, each in zip(RESULTS, result, strict=True) if each is not None}
    else:
        left, counts = iter(result), (1, *map(len, layer.parameters))
        got = {
            name: torch.cat([next(left) for _ in range(count)]) for name, count in zip(GRADIENTS, counts, strict=True)
        }
    return accuracy.worst(verdicts(got, truth.eager, {name: truth.oracle[name] for name in got}))


def measured(case, modes, device, machine, budget_ms=100.0):
    """(row, what is wrong with its result or "") of each provider and mode, one by one."""
    drawn = draw(case, device)
    right = truth(case, drawn)
    for provider, setup in layers(case, drawn).items():
        for mode in modes:
            if mode == "forward_backward" and provider == "torch.nn:sdpa":
                continue  # where there are gradients there is no fast path
            flops = cost.flops(case, mode) + cost.projections(case, mode)
            try:
                layer = setup()
                found, said = attention.columns(
                    step(mode, layer, drawn),
                    lambda result, mode=mode, layer=layer: judge(mode, layer, result, right),
                    case.dtype,
                    device,
                    budget_ms,
                    timing.measure,
                )
                found["tflops"] = flops / found["ms_p50"] / 1e9
                found["gbps"] = cost.moved_by_module(case, mode) / found["ms_p50"] / 1e6
            except Exception as error:  # a row like any other
                found, said = dict(status=attention.status(error)), ""
            yield rows.row(machine, mode, provider, case, options=f"module {case.options}".strip(), **found), said


def time_all(chosen, device, writer, machine, budget_ms=100.0):
    """Measure, a row each."""
    for case in chosen:
        for row, said in measured(case, MODES, device, machine, budget_ms):
            writer.write(row)
            if said:
                print(f"{case.name} {row.provider} {row.mode}: {said}", file=sys.stderr)


def main(arguments=None):
    options = command.parser(__doc__).parse_args(arguments)
    writer, machine = rows.Writer(options.csv), rows.machine(options.device, options.commit)
    name = "module" if torch.device(options.device).type == "cuda" else "tiny-module"
    time_all(cases.TABLES[name], options.device, writer, machine, options.repeat_ms)
    print(table.text(writer.rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
