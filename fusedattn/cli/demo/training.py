"""Training: the losses fall."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from .model import LanguageModel
from .text import Text

BATCH, RATE = 12, 4e-3


class Point(NamedTuple):
    """Losses in nats a byte: train is the mean since the point before."""

    step: int
    train: float
    held_out: float


def bits(nats: float) -> float:
    return nats / math.log(2)


def byte_frequencies(text: Text) -> float:
    """What a byte costs, in nats, if one knows how often each occurs and nothing else: their entropy."""
    share = torch.tensor(list(text.content)).bincount() / len(text.content)
    return torch.special.entr(share).sum().item()


@torch.no_grad()
def held_out(model: LanguageModel, text: Text, device: str) -> float:
    was_training = model.training
    loss = model.eval().loss(text.held_out.to(device)).item()
    model.train(was_training)
    return loss


def train(model: LanguageModel, text: Text, steps: int, device: str, seed: int, advance: Callable) -> list[Point]:
    """Train a model; advance(note) is called at each step."""
    dice = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.1)
    warm = max(1, steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm, 0.5 + 0.5 * math.cos(math.pi * step / steps))
    )
    every = max(1, steps // 30)
    points, losses = [Point(0, held_out(model, text, device), held_out(model, text, device))], []
    model.train()
    for step in range(1, steps + 1):
        loss = model.loss(text.windows(BATCH, dice).to(device))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
        if step % every == 0 or step == steps:
            mean = torch.stack(losses).mean().item()
            points.append(Point(step, mean, held_out(model, text, device)))
            losses = []
        now = points[-1]
        advance(f"loss {now.train:.2f}, {bits(now.train):.2f} bits a byte; held out {bits(now.held_out):.2f}")
    model.eval()
    return points
