"""Is our module faster than torch.nn.MultiheadAttention?    python -m fusedattn.bench module

Self-attention with its projections, all with one set of weights: fusedattn.MultiHeadAttention, its drop-in for torch's
(fusedattn.compat), and torch's own, in inference with its fast path as it comes and, as torch.nn:sdpa, without. forward
is in evaluation mode without gradients; forward_backward has those of the input and of every parameter.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

import fusedattn as fa
from fusedattn.testing.compare import in_float64

from . import accuracy, cases, cost
from .attention import Workload
from .calls import Unsupported

MODES = ("forward", "forward_backward")
PROVIDERS = ("fusedattn", "fusedattn.compat", "torch.nn", "torch.nn:sdpa")
RESULTS = ("out", "weights")
GRADIENTS = ("x", "in_weight", "in_bias", "out_weight", "out_bias")


def concerns(name, mode):
    """Whether a provider is measured in a mode: where there are gradients torch's module has no fast path."""
    return mode == "forward" or name != "torch.nn:sdpa"


class Layer(NamedTuple):
    """attend(x) -> (output, weights or None); parameters: for all of GRADIENTS but x its parts in our order."""

    module: torch.nn.Module
    attend: Callable
    parameters: tuple[list, ...]


class Module(Workload):
    """A module of attention: x (B, S, E), the gradient of its output, and its parameters, at random."""

    def __init__(self, case, device):
        super().__init__(case, device)
        width, generator = case.Hq * case.D, torch.Generator(device).manual_seed(cases.SEED)
        shapes = dict(x=(case.B, case.Sq, width), out=(case.B, case.Sq, width))
        shapes |= dict(in_weight=(3 * width, width), in_bias=(3 * width,), out_weight=(width, width), out_bias=(width,))
        scales, dtype = dict(in_weight=width**-0.5, out_weight=width**-0.5), getattr(torch, case.dtype)
        self.returns_weights = "weights" in case.words
        self.drawn = {
            name: (scales.get(name, 1.0) * torch.randn(shape, device=device, generator=generator)).to(dtype)
            for name, shape in shapes.items()
        }

    def label(self, name):
        if not name.startswith("fusedattn"):
            return name
        case, options = self.case, dict(causal=self.case.causal, return_weights=self.returns_weights)
        heads = self.drawn["x"].new_empty(()).expand(case.B, case.Hq, case.Sq, case.D)
        return f"{name}:{fa.explain(heads, heads, heads, **options).backend}"

    def setup(self, name):
        """The Layer of one of PROVIDERS, with the drawn numbers in its parameters."""
        if name not in PROVIDERS:
            raise Unsupported(f"it is no module, as {', '.join(PROVIDERS)} are")
        x, length, where = (
            self.drawn["x"],
            self.case.Sq,
            dict(device=self.drawn["x"].device, dtype=self.drawn["x"].dtype),
        )
        options = dict(need_weights=self.returns_weights)
        if name == "fusedattn":
            layer = fa.MultiHeadAttention(x.shape[2], self.case.Hq, causal=self.case.causal, **where)
            inner, out = (layer.q_proj, layer.k_proj, layer.v_proj), layer.out_proj
            parameters = [proj.weight for proj in inner], [proj.bias for proj in inner], [out.weight], [out.bias]
            return self.filled(Layer(layer, functools.partial(layer, **options), parameters))
        kind = fa.compat.torch.MultiheadAttention if name == "fusedattn.compat" else torch.nn.MultiheadAttention
        layer = kind(x.shape[2], self.case.Hq, batch_first=True, **where)
        parameters = [layer.in_proj_weight], [layer.in_proj_bias], [layer.out_proj.weight], [layer.out_proj.bias]
        if self.case.causal:
            hidden = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
            options |= dict(attn_mask=hidden, is_causal=True)

        def attend(x):
            before = torch.backends.mha.get_fastpath_enabled()
            torch.backends.mha.set_fastpath_enabled(before and name != "torch.nn:sdpa")
            try:
                return layer(x, x, x, average_attn_weights=False, **options)
            finally:
                torch.backends.mha.set_fastpath_enabled(before)

        return self.filled(Layer(layer, attend, parameters))

    @torch.no_grad()
    def filled(self, layer):
        for parts, name in zip(layer.parameters, GRADIENTS[1:], strict=True):
            for part, values in zip(parts, self.drawn[name].chunk(len(parts)), strict=True):
                part.copy_(values)
        return layer

    def work(self, mode):
        """That of attention and of four projections; all tensors once, or with their gradients three times."""
        case, times = self.case, 1 if mode == "forward" else 3
        flops = cost.flops(case, mode) + times * 8 * case.B * case.Sq * (case.Hq * case.D) ** 2
        return flops, times * sum(tensor.nbytes for tensor in self.drawn.values()) + cost.weights(case)

    @contextlib.contextmanager
    def step(self, mode, layer):
        """A function of nothing: it returns output and weights, or the gradients of x and of each parameter."""
        layer.module.train(mode != "forward")
        with torch.set_grad_enabled(mode != "forward"):
            leaves = [
                self.drawn["x"].detach().requires_grad_(),
                *(part for parts in layer.parameters for part in parts),
            ]
            if mode == "forward":
                yield lambda: layer.attend(self.drawn["x"])
            else:
                yield lambda: torch.autograd.grad(layer.attend(leaves[0])[0], leaves, self.drawn["out"])

    @functools.cached_property
    def truth(self):
        exact = self.formula(in_float64(self.drawn), fa.reference.attention)
        return accuracy.Truth(exact, self.formula(self.drawn, fa.reference.eager))

    @torch.enable_grad()
    def formula(self, drawn, function):
        """{name of RESULTS or GRADIENTS: tensor}, by a function of the reference."""
        x, *weights = leaves = [drawn[name].detach().requires_grad_() for name in GRADIENTS]
        projected = F.linear(x, *weights[:2]).unflatten(-1, (3, self.case.Hq, self.case.D)).permute(2, 0, 3, 1, 4)
        results = function(*projected, causal=self.case.causal, return_weights=self.returns_weights)
        out, *shares = results if isinstance(results, tuple) else (results,)
        out = F.linear(out.transpose(1, 2).flatten(2), *weights[2:])
        gradients = dict(zip(GRADIENTS, torch.autograd.grad(out, leaves, drawn["out"]), strict=True))
        return gradients | {name: tensor.detach() for name, tensor in zip(RESULTS, (out, *shares), strict=False)}

    def judge(self, mode, layer, result):
        if mode == "forward":
            results = {name: tensor for name, tensor in zip(RESULTS, result, strict=True) if tensor is not None}
        else:
            parts = iter(result)
            counts = dict(zip(GRADIENTS, (1, *map(len, layer.parameters)), strict=True))
            results = {name: torch.cat([next(parts) for _ in range(count)]) for name, count in counts.items()}
        return accuracy.compare(results, self.truth)
