"""Implements __torch_function__: tensor subclasses, modes and torch.fx see a public function as one call."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from torch.compiler import is_compiling
from torch.overrides import handle_torch_function, has_torch_function

from .private import TENSORS_OF_TORCH, torch_function_enabled

_Function = TypeVar("_Function", bound=Callable[..., Any])


def overridable(function: _Function) -> _Function:
    """Wrap a public function so that modes and tensor subclasses can override it by __torch_function__."""

    @functools.wraps(function)
    def public(*args: Any, **kwargs: Any) -> Any:
        if has_torch_function(args) or has_torch_function(tuple(kwargs.values())):
            # Torch's own classes, such as nested tensors, do not know this function. None stands for all modes.
            overriding = None, *[x for x in (*args, *kwargs.values()) if type(x).__module__ not in TENSORS_OF_TORCH]
            # The compiler's has_torch_function also returns True while __torch_function__ is disabled.
            if (torch_function_enabled() or not is_compiling()) and has_torch_function(overriding):
                return handle_torch_function(public, overriding, *args, **kwargs)
        return function(*args, **kwargs)

    made: Any = public
    # torch.compile limits the recompilations of a code object. If all public functions shared one, `attention` with 8
    # lengths would leave none to `merge` (tests/test_torch_function.py).
    made.__code__ = made.__code__.replace(co_name=function.__name__)
    return made  # type: ignore[no-any-return]
