"""Whether what was trained is right: the whole model, and the kernels alone on its activations, against float64."""

import copy
from typing import NamedTuple

import torch
from torch import Tensor

from ...api import attention
from ...testing.cases import RESULTS
from ...testing.compare import compare, with_gradients
from ...testing.tolerance import Verdict, verdict
from .generation import Greedy
from .model import LanguageModel, TorchAttention, heads

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Check(NamedTuple):
    """One result of one computation, named, and how it compares."""

    what: str
    result: str
    verdict: Verdict


def whole_model(model: LanguageModel, windows: Tensor, backend: str | None) -> list[Check]:
    """Logits and the gradients of all parameters with attention by a backend, in the model's dtype.

    Eager PyTorch is the same model with PyTorch's own attention; the oracle is the naive path, all in float64.
    """
    got = _gradients(copy.deepcopy(model).take(backend), windows)
    eager = _gradients(_with_torch(copy.deepcopy(model)), windows)
    oracle = _gradients(copy.deepcopy(model).double().take("naive"), windows)
    what = "as trained" if backend is None else f"by {backend}"
    return [Check(what, name, verdict(got[name], eager[name], oracle[name])) for name in oracle]


def _with_torch(model):
    for block in model.blocks:
        block.attention = TorchAttention(block.attention)
    return model


def _gradients(model, windows):
    """{"logits": ..., module: the gradients of its parameters, as one}.

    A bias goes with its weight: that of a key projection has gradient 0, and what is computed for it is all rounding.
    """
    model.eval()
    logits = model(windows[:, :-1])
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten(), reduction="sum")
    loss.backward()
    found = {"logits": logits}
    for name, module in model.named_modules():
        own = [parameter.grad.flatten() for parameter in module.parameters(recurse=False)]
        if own:
            found[f"d {name}"] = torch.cat(own)
    return found


def generation(model: LanguageModel, without: Greedy, cached: Greedy) -> list[Check]:
    """What was generated with a cache beside what was without: the logits of each step, and the bytes chosen.

    Logits are held to the rule, as far as both have read the same text. Rounding may choose between two bytes, which
    then have different sequels: the bytes are right if float64 cannot tell the first two of a text that differ by more
    than what the rule allows the logits of either.
    """
    first = without.tokens.shape[1] - without.logits.shape[1]
    differ = without.tokens[:, first:] != cached.tokens[:, first:]
    alike = differ.cumsum(1) - differ.long() == 0  # all bytes before this one
    exact, eager = (
        model(without.tokens[:, :-1])[:, first - 1 :].detach()
        for model in (copy.deepcopy(model).double().take("naive"), _with_torch(copy.deepcopy(model)))
    )
    logits = verdict(cached.logits[alike], eager[alike], exact[alike])
    parted = alike & differ
    one, other = (exact[parted].gather(1, each.tokens[:, first:][parted][:, None]) for each in (without, cached))
    gaps = (one - other).abs().flatten().tolist()
    gap, step = max(zip(gaps, parted.nonzero()[:, 1].tolist(), strict=True), default=(0.0, 0))
    allowed = 2 * logits.max_allowed
    why = "" if gap <= allowed else f"byte {step + 1} is another one, whose logit differs by {gap:.3g}"
    chosen = Verdict(not why, gap, allowed, gap, allowed, 0.0, why)
    return [Check("generated with a cache", name, one) for name, one in (("logits", logits), ("bytes", chosen))]


def kernels(model: LanguageModel, tokens: Tensor, backend: str) -> list[Check]:
    """Output, lse and gradients of attention by a backend, on query, key and value of each layer and in each dtype."""
    checks = []
    with torch.no_grad():
        layers = [heads(layer, x) for layer, x in model.attended(tokens)]
    for number, inputs in enumerate(layers, 1):
        dice = torch.Generator().manual_seed(number)
        for dtype in DTYPES:
            tensors = {name: x.to(dtype) for name, x in zip(("query", "key", "value"), inputs, strict=True)}
            shape = tensors["query"].shape
            tensors["out"] = torch.randn(shape, generator=dice).to(tokens.device, dtype)
            tensors["lse"] = torch.randn(shape[:3], generator=dice).to(tokens.device)
            options = dict(causal=True)
            compared = compare(with_gradients(attention, tensors, options, backend=backend), tensors, options)
            what = f"layer {number}, {str(dtype).removeprefix('torch.')}"
            checks += [Check(what, RESULTS[name], one) for name, one in compared.items()]
    return checks
