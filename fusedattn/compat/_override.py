"""Replaces operators of torch temporarily, in all threads."""

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch


class Override:
    """Replaces operators of aten for a dispatch key, until remove() or until this object is deleted.

    Args:
        operators: {name: function}. If a function returns None, torch's kernel runs.
        kernel_key: the dispatch key of torch's kernel, if not `key`.
    """

    def __init__(self, operators: Mapping[str, Callable[..., Any]], key: str, kernel_key: str | None = None):
        self.library: torch.library.Library | None = torch.library.Library("aten", "IMPL")
        for name, run in operators.items():
            run = functools.partial(_call, run, torch.library.get_kernel(f"aten::{name}", kernel_key or key))
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel", UserWarning)
                self.library.impl(name, run, key, with_keyset=True)

    def remove(self) -> None:
        self.library = None


def _call(run: Callable[..., Any], original: Any, keyset: Any, *args: Any, **kwargs: Any) -> Any:
    results = run(*args, **kwargs)
    return original.call_boxed(keyset, *args, **kwargs) if results is None else results
