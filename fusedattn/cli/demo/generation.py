"""What a model has to add to a prompt: drawn with dice, or the likeliest bytes, with a cache and without."""

import statistics
import time
from typing import NamedTuple

import torch
from torch import Tensor

from .model import Cache, LanguageModel
from .text import CONTEXT


class Greedy(NamedTuple):
    """tokens (B, CONTEXT + 1), the prompt and what follows; logits (B, n, 256), that the n new ones were chosen by."""

    tokens: Tensor
    logits: Tensor

    @property
    def generated(self) -> int:
        """How many tokens are new."""
        return self.logits.shape[0] * self.logits.shape[1]


@torch.no_grad()
def greedy(model: LanguageModel, prompt: Tensor, cached: bool) -> Greedy:
    """The likeliest byte, time after time, from a prompt (B, S) until the context is full.

    It ends there: positions are counted from the start of the window, so one that moves on would change every key.
    """
    cache = Cache(model, len(prompt)) if cached else None
    tokens = new = prompt
    logits = []
    while tokens.shape[1] <= CONTEXT:
        logits.append(model(tokens if cache is None else new, cache)[:, -1])
        new = logits[-1].argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, new], 1)
    return Greedy(tokens, torch.stack(logits, 1))


def speeds(model: LanguageModel, prompt: Tensor, rounds: int = 5) -> dict[str, float]:
    """Tokens a second of `greedy`, median, what reading the prompt takes included.

    Without and with a cache in turns, so that what else the machine does hits both alike.
    """
    times: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(rounds):
        for cached, taken in times.items():
            start = _now(prompt)
            found = greedy(model, prompt, cached)
            taken.append(_now(prompt) - start)
    return {
        f"{'with' if cached else 'without'} a cache": found.generated / statistics.median(taken)
        for cached, taken in times.items()
    }


def _now(x: Tensor) -> float:
    """Seconds, when all that was launched on the device of x is done."""
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    return time.perf_counter()


@torch.no_grad()
def continuation(
    model: LanguageModel, prompt: bytes, length: int, dice: torch.Generator, temperature: float = 0.6
) -> str:
    """The prompt and what the model has to add to it, byte by byte."""
    device = model.positions.weight.device
    written = list(prompt)
    for _ in range(length):
        logits = model(torch.tensor([written[-CONTEXT:]], device=device))[0, -1].float().cpu()
        written.append(int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=dice)))
    return bytes(written).decode("utf-8", errors="replace")
