"""Is our module faster than torch.nn.MultiheadAttention?    python -m fusedattn.bench module

Self-attention with its projections, all with one set of weights: fusedattn.MultiHeadAttention, its drop-in for torch's
(fusedattn.compat), and torch's own, in inference with its fast path as it comes and, as torch.nn:sdpa, without. forward
is in evaluation mode without gradients; forward_backward has those of the input and of every parameter. And two models
with attention inside, for the question what a CPU user gets: torch's encoder, and a small Llama.
"""

import contextlib
import copy
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


def heads(case, device):
    """Query, key and value in the layout that projections give them, uninitialised."""
    shapes = ((case.B, case.Sq, count, case.D) for count in (case.Hq, case.Hkv, case.Hkv))
    return [torch.empty(shape, dtype=getattr(torch, case.dtype), device=device).transpose(1, 2) for shape in shapes]


def _backend(case, device, **options):
    """Name the backend that takes the attention of a module or a model."""
    return fa.explain(*heads(case, device), causal=case.causal, **options).backend


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
        return f"{name}:{_backend(self.case, self.device, return_weights=self.returns_weights)}"

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


LAYERS, VOCABULARY = 2, 1000  # of a model


class Model(Workload):
    """A model in whose middle attention is. A subclass has built(name), inputs, and exact, who computes what is right.

    forward is in evaluation mode and without gradients; forward_backward has those of all parameters.
    """

    def __init__(self, case, device):
        super().__init__(case, device)
        self.truths = {}
        torch.manual_seed(cases.SEED)

    def label(self, name):
        return f"{name}:{_backend(self.case, self.device)}" if name.startswith("fusedattn") else name

    def setup(self, name):
        return self.built(name)

    def compute(self, model):
        """The output of a model."""
        return model(self.inputs)

    @contextlib.contextmanager
    def step(self, mode, model):
        model.train(mode != "forward")
        with torch.set_grad_enabled(mode != "forward"):
            if mode == "forward":
                yield lambda: self.compute(model)
            else:
                leaves = list(model.parameters())
                yield lambda: torch.autograd.grad(self.compute(model).square().mean(), leaves)

    def answer(self, mode, model):
        """{mode: the result of its step, as one tensor}"""
        with self.step(mode, model) as step:
            return {mode: _joined(step())}

    def judge(self, mode, model, result):
        if mode not in self.truths:
            exact = self.answer(mode, self.built(self.exact).double())
            self.truths[mode] = accuracy.Truth(exact, self.answer(mode, self.built(self.exact)))
        return accuracy.compare({mode: _joined(result)}, self.truths[mode])


def _joined(result):
    """The output, or the gradients one after another."""
    return torch.cat([part.flatten() for part in result]) if isinstance(result, tuple) else result


class Encoder(Model):
    """torch's encoder, without dropout, whose bits would not be the same: as it comes, or converted."""

    exact = "torch.nn"

    def __init__(self, case, device):
        super().__init__(case, device)
        width = case.Hq * case.D
        layer = torch.nn.TransformerEncoderLayer(width, case.Hq, 4 * width, dropout=0.0, batch_first=True)
        self.encoder = torch.nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.inputs = torch.randn(case.B, case.Sq, width)

    def built(self, name):
        encoder = copy.deepcopy(self.encoder)
        return fa.compat.torch.convert(encoder) if name == "fusedattn.compat" else encoder

    def compute(self, model):
        return model(self.inputs.to(next(model.parameters()).dtype))


class Llama(Model):
    """A small Llama of Transformers on a prompt, whose cache it fills."""

    exact = "eager"

    def __init__(self, case, device):
        super().__init__(case, device)
        try:
            import transformers

            fa.compat.transformers.register()
        except ImportError as error:
            raise Unsupported(f"transformers is not installed: pip install 'fusedattn[hf]' ({error})") from error
        width = case.Hq * case.D
        sizes = dict(hidden_size=width, intermediate_size=4 * width, num_hidden_layers=LAYERS, vocab_size=VOCABULARY)
        sizes |= dict(num_attention_heads=case.Hq, num_key_value_heads=case.Hkv, max_position_embeddings=case.Sq)
        self.model = transformers.LlamaModel(transformers.LlamaConfig(**sizes))
        self.inputs = torch.randint(VOCABULARY, (case.B, case.Sq))

    def built(self, name):
        model = copy.deepcopy(self.model)
        model.set_attn_implementation(name)
        return model

    def compute(self, model):
        return model(self.inputs, use_cache=not model.training).last_hidden_state


MODELS = {"encoder": Encoder, "llama": Llama}
