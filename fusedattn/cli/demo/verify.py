"""Whether the demo's results are right: of the trained model, the kernels alone, a cache, a converted encoder."""

import copy
import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ... import reference
from ...api import attention
from ...bench import timing
from ...compat.torch import convert
from ...testing.cases import RESULTS
from ...testing.compare import compare, with_gradients
from ...testing.tolerance import Verdict, verdict, verdicts
from .model import HEADS, LAYERS, WIDTH, LanguageModel

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
EAGER = (functools.partial(reference.eager, causal=True),) * LAYERS
EXACT = (functools.partial(reference.attention, causal=True),) * LAYERS  # of a model in float64


def whole_model(model: LanguageModel, windows: Tensor, backend: str | None) -> dict[str, Verdict]:
    """Verdicts of the logits and of all gradients; a backend takes the place of the model's attention."""
    ours = None if backend is None else functools.partial(attention, causal=True, backend=backend)
    exact = _learned(copy.deepcopy(model).double(), windows, EXACT)
    return verdicts(_learned(model, windows, (ours,) * LAYERS), _learned(model, windows, EAGER), exact)


def _learned(model, windows, attends):
    """{"logits": ..., "d MODULE": the gradients of its parameters, as one}.

    A bias goes with its weight: that of a key projection has gradient 0, and what is computed for it is all rounding.
    """
    model.zero_grad()
    logits = model(windows[:, :-1], attends)
    F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten(), reduction="sum").backward()
    modules = {f"d {name}": list(module.parameters(recurse=False)) for name, module in model.named_modules()}
    gradients = {
        name: torch.cat([one.grad.flatten() for one in learned]) for name, learned in modules.items() if learned
    }
    return {"logits": logits} | gradients


def kernels(model: LanguageModel, tokens: Tensor, backend: str) -> dict[str, dict[str, Verdict]]:
    """{layer and dtype: verdicts} of attention alone, by a backend, of the query, key and value of each layer."""
    judged: dict[str, dict[str, Verdict]] = {}

    def attend(*inputs):
        layer, options = 1 + len(judged) // len(DTYPES), dict(causal=True)
        for dtype in DTYPES:
            tensors = dict(zip(("query", "key", "value"), (x.to(dtype) for x in inputs), strict=True))
            tensors |= dict(out=torch.randn_like(tensors["query"]), lse=torch.randn_like(inputs[0][..., 0]))
            results = compare(with_gradients(attention, tensors, options, backend=backend), tensors, options)
            named = {RESULTS[name]: one for name, one in results.items()}
            judged[f"layer {layer}, {str(dtype).removeprefix('torch.')}"] = named
        return attention(*inputs, causal=True)

    model(tokens, (attend,) * LAYERS)
    return judged


def generation(model: LanguageModel, old: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor]) -> dict[str, Verdict]:
    """Verdicts of the logits, and of the bytes chosen by them, of `write` with a cache (new) beside without one (old).

    Logits are compared as far as both read the same text. Rounding may choose between two bytes, whose sequels differ:
    the first two bytes that differ may, in float64, be as far apart as the rule allows the logits of either.
    """
    count = old[1].shape[1]
    was, now = (tokens[:, -count:, None] for tokens, _ in (old, new))
    differ = (was != now).squeeze(2)
    same_text = differ.cumsum(1) - differ.long() == 0  # all bytes before this one are the same
    eager = model(old[0][:, :-1], EAGER)[:, -count:]
    exact = copy.deepcopy(model).double()(old[0][:, :-1], EXACT)[:, -count:]
    logits = verdict(new[1][same_text], eager[same_text], exact[same_text])
    gaps = (exact.gather(2, was) - exact.gather(2, now)).abs().squeeze(2) * same_text
    gap, step, allowed = gaps.max().item(), int(gaps.amax(0).argmax()), 2 * logits.max_allowed
    why = "" if gap <= allowed else f"byte {step + 1} is another one, whose logit differs by {gap:.3g}"
    return dict(logits=logits, bytes=Verdict(not why, gap, allowed, gap, allowed, 0.0, why))


def conversion(device: str) -> tuple[dict[str, dict[str, Verdict]], list[dict]]:
    """({mode: verdicts} of an encoder, converted, beside what it was; milliseconds of a step before and after)."""
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True)
    before = nn.TransformerEncoder(layer, LAYERS).to(device)
    after, exact = convert(copy.deepcopy(before)), copy.deepcopy(before).double()
    x = torch.randn(8, 128, WIDTH, device=device)
    judged, times = {}, []
    for training, mode in ((False, "eval"), (True, "training")):
        steps = [functools.partial(_encode, one.train(training), x) for one in (after, before, exact)]
        judged[f"an nn.TransformerEncoder, converted, {mode}"] = verdicts(*(step() for step in steps))
        ms_after, ms_before = (timing.measure(step, device, 400.0).p50 for step in steps[:2])
        times.append(dict(what="training" if training else "inference", before=ms_before, after=ms_after))
    return judged, times


def _encode(model, x):
    """{"outputs" (B, S, E)}, in training with "gradients": those of all parameters, as one."""
    with torch.set_grad_enabled(model.training):
        outputs = model(x.to(next(model.parameters()).dtype))
    if not model.training:
        return dict(outputs=outputs)
    gradients = torch.autograd.grad(outputs.square().sum(), list(model.parameters()))
    return dict(outputs=outputs, gradients=torch.cat([one.flatten() for one in gradients]))
