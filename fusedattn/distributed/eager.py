"""What surrounds code that talks to other processes: no autocast; gradients in the dtypes of inputs."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ..call.form import autocasting


def without_autocast(function: Callable) -> Callable:
    """A function of a Whole and more, with autocast off: what it should cast has been cast."""

    @functools.wraps(function)
    def run(whole: Any, *rest: Any) -> Any:
        query = whole.call.query
        if not autocasting(query):
            return function(whole, *rest)
        with torch.autocast(query.device.type, enabled=False):
            return function(whole, *rest)

    return run


def as_inputs(grads: Iterable[Tensor | None], inputs: Iterable[Tensor | None]) -> list[Tensor | None]:
    """Gradients in the dtypes of what they are the gradients of; None stays."""
    pairs = zip(grads, inputs, strict=True)
    return [None if grad is None or x is None else grad.to(x.dtype) for grad, x in pairs]
