"""Trains the model and records its loss per byte, in training and on held-out text."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .model import LanguageModel
from .text import Text

BATCH, RATE = 12, 1.5e-3


class Point(NamedTuple):
    """Losses at a step, in nats a byte: train is the mean since the point before."""

    step: int
    train: float
    held_out: float


def bits(nats: float) -> float:
    return nats / math.log(2)


def byte_frequencies(text: Text) -> float:
    """The loss, in nats, of a model that knows how often each byte occurs and nothing else: their entropy."""
    return torch.special.entr(torch.tensor(list(text.content)).bincount() / len(text.content)).sum().item()


def optimizer_of(model: LanguageModel) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.1)


def step(model: LanguageModel, optimizer: torch.optim.Optimizer, windows: Tensor) -> Tensor:
    """The loss of windows (B, S + 1), before a step that lowers it."""
    loss = model.train().loss(windows)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def train(model: LanguageModel, text: Text, steps: int, seed: int, advance: Callable) -> list[Point]:
    """The losses before training, at about 30 of its steps, and after it; advance(note) is called after each step."""
    device, dice = model.positions.weight.device, torch.Generator().manual_seed(seed)
    optimizer = optimizer_of(model)

    @torch.no_grad()
    def held_out():
        return model.eval().loss(text.held_out.to(device)).item()

    before, losses = held_out(), []
    points = [Point(0, before, before)]
    for number in range(1, steps + 1):
        batch = text.windows[text.starts[torch.randint(len(text.starts), (BATCH,), generator=dice)]]
        losses.append(step(model, optimizer, batch.to(device)))
        if number % max(1, steps // 30) == 0 or number == steps:
            points.append(Point(number, torch.stack(losses).mean().item(), held_out()))
            losses = []
        advance(f"{bits(points[-1].train):.2f} bits a byte, held out {bits(points[-1].held_out):.2f}")
    return points
