"""Medians of fused, naive and torch's own attention, side by side."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.utils.benchmark import Timer

from ... import reference
from ...api import attention


class Time(NamedTuple):
    """Milliseconds of one provider on one shape, None if it is not timed; `why` says why."""

    shape: tuple[int, ...]
    dtype: str
    provider: str
    forward: float | None
    both: float | None
    why: str = ""


def times(shape: tuple[int, ...], dtype: torch.dtype, device: str, fused_reasons: list[str]) -> list[Time]:
    """Causal attention forward, and forward and backward, on tensors (B, H, S, D) of a shape."""
    inputs = [torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3)]
    providers: dict[str, Callable] = {
        "fused": lambda *qkv: attention(*qkv, causal=True, backend="triton"),
        "naive": lambda *qkv: reference.eager(*qkv, causal=True),
        "torch SDPA": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    }
    found = []
    for name, function in providers.items():
        about = (shape, str(dtype).removeprefix("torch."), name)
        if name == "fused" and fused_reasons:
            found.append(Time(*about, None, None, "; ".join(fused_reasons)))
        else:
            found.append(Time(*about, *_medians(function, inputs)))
    return found


def _medians(function, inputs):
    gradient = torch.randn_like(function(*inputs))

    def forward():
        with torch.no_grad():
            function(*inputs)

    def both():
        torch.autograd.grad(function(*inputs), inputs, gradient)

    return [median(forward), median(both)]


def median(step: Callable[[], None]) -> float:
    """Milliseconds; on a GPU the timer waits for what was launched."""
    step()
    timer = Timer("step()", globals=dict(step=step), num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=0.4).median * 1e3
