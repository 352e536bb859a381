"""The second part: an encoder of torch.nn, converted in one line, beside what it was."""

import copy
import functools
import warnings
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...compat.torch import convert
from ...testing.tolerance import verdict
from .model import HEADS, LAYERS, WIDTH
from .timing import median
from .verify import Check

BATCH, LENGTH = 8, 128


class Step(NamedTuple):
    """Milliseconds of one step of the encoder, as torch has it and converted."""

    what: str
    before: float
    after: float


# torch's, of the path by which it packs padded batches.
warnings.filterwarnings("ignore", message="The PyTorch API of nested tensors")


def encoder() -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, LAYERS)


def batch(device: str) -> tuple[Tensor, Tensor]:
    """(x (B, S, E), padding (B, S), True = hidden): texts of a quarter of the length up to all of it."""
    lengths = torch.linspace(LENGTH // 4, LENGTH, BATCH, device=device).long()
    x = torch.randn(BATCH, LENGTH, WIDTH, device=device)
    return x, torch.arange(LENGTH, device=device) >= lengths[:, None]


def checks(model: nn.TransformerEncoder, x: Tensor, padding: Tensor) -> Iterator[Check]:
    """Outputs and gradients after the conversion, held to float64 beside those from before it."""
    before, oracle = copy.deepcopy(model), copy.deepcopy(model).double()
    after = convert(copy.deepcopy(model))
    for training in (False, True):
        what = f"an nn.TransformerEncoder, converted, {'training' if training else 'eval'}"
        got, eager, wanted = (
            _results(one.train(training), x.to(next(one.parameters()).dtype), padding)
            for one in (after, before, oracle)
        )
        for name in wanted:
            yield Check(what, name, verdict(got[name], eager[name], wanted[name]))


def _results(model, x, padding):
    """{"outputs" of real tokens, and, if it trains, the gradients of all parameters}"""
    if not model.training:
        with torch.no_grad():
            return {"outputs": model(x, src_key_padding_mask=padding)[~padding]}
    model.zero_grad()
    outputs = model(x, src_key_padding_mask=padding)[~padding]
    outputs.square().sum().backward()
    return {"outputs": outputs.detach(), "gradients": torch.cat([p.grad.flatten() for p in model.parameters()])}


def steps(model: nn.TransformerEncoder, x: Tensor, padding: Tensor) -> list[Step]:
    """Medians of inference and of training, before and after."""
    both = copy.deepcopy(model), convert(copy.deepcopy(model))

    def infer(one):
        with torch.no_grad():
            one(x, src_key_padding_mask=padding)

    def learn(one):
        one.zero_grad()
        one(x, src_key_padding_mask=padding).square().mean().backward()

    found = []
    for what, step in (("inference", infer), ("training", learn)):
        before, after = (median(functools.partial(step, one.train(what == "training"))) for one in both)
        found.append(Step(what, before, after))
    return found
