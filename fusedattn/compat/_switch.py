"""Switches that make F.scaled_dot_product_attention ours, for code that you cannot edit.

Backends of this package that need torch's own function call it inside `private.as_torch_has_it()`.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..call import private
from ._override import Override
from ._sdpa import scaled_dot_product_attention

# The functions of torch that a program may call, however it imported them.
_OPERATOR = torch.ops.aten.scaled_dot_product_attention
_TORCHS = F.scaled_dot_product_attention, _OPERATOR, _OPERATOR.default


def sdpa() -> AbstractContextManager[Any]:
    """In the `with`, F.scaled_dot_product_attention is `scaled_dot_product_attention` of this module, on any device.

    Examples:
        >>> query = key = value = torch.randn(2, 8, 128, 64, requires_grad=True)
        >>> with fusedattn.compat.torch.sdpa():
        ...     torch.nn.functional.scaled_dot_product_attention(query, key, value).sum().backward()

    It is a TorchFunctionMode, so it also answers references that were imported before,
    torch.ops.aten.scaled_dot_product_attention, and torch.nn.MultiheadAttention with need_weights=False, whose fast
    path is not taken. Gradients and autocast work; torch.compile compiles separately inside and outside.
    `fusedattn.use_backend` chooses the kernels; torch's sdpa_kernel does not. attn_mask together with is_causal raises,
    and so do nested tensors, except torch.jagged without a mask. Tensor classes keep their own __torch_function__.

    It applies to this thread (for others see `enable_sdpa`), and to a backward that starts inside. Start the backward
    of a model with checkpoints inside. Every call of a torch function takes about a microsecond longer.
    """
    return _Ours()


def enable_sdpa() -> None:
    """Make F.scaled_dot_product_attention ours for the whole program, all threads, until `disable_sdpa`.

    Examples:
        >>> fusedattn.compat.torch.enable_sdpa()
        >>> query = key = value = torch.randn(2, 8, 128, 64)
        >>> out = torch.nn.functional.scaled_dot_product_attention(query, key, value)
        >>> fusedattn.compat.torch.disable_sdpa()

    In the calling thread it does what `sdpa` does. In all other threads, and in TorchScript, it replaces the operator
    behind the function; but torch.compile, torch.vmap and a TorchDispatchMode see torch's there, and
    torch.nn.MultiheadAttention keeps its fast path (see `convert`). Call enable_sdpa() in each thread that compiles. A
    second call changes nothing.
    """
    global _everywhere
    if not any(isinstance(mode, _OursWhileEnabled) for mode in private.function_modes()):
        private.replace_function_modes([_OursWhileEnabled(), *private.function_modes()])
    if _everywhere is None:
        # An alias of keys has no kernel to get. This operator has the same kernel for "CPU" as for all devices.
        _everywhere = Override({"scaled_dot_product_attention": _answer}, "CompositeImplicitAutograd", "CPU")


def disable_sdpa() -> None:
    """Undo `enable_sdpa` in all threads. Without one it changes nothing; a `with sdpa()` stays in effect.

    Examples:
        >>> fusedattn.compat.torch.disable_sdpa()
    """
    global _everywhere
    modes = [mode for mode in private.function_modes() if not isinstance(mode, _OursWhileEnabled)]
    private.replace_function_modes(modes)
    _everywhere = None


def _ours(*args: Any, **kwargs: Any) -> Tensor:
    return scaled_dot_product_attention(*args, **kwargs)


def _without_modes(function: Any, **names: Any) -> Callable[..., Any]:
    """Return a copy of a torch function that is not handed to modes, with other values of global names.

    The calls inside the function are for the mode, but torch disables a mode until the function that it handles
    returns. There is no public way around that. If the mode is pushed again, the function asks it first and never
    reaches its own body. To replace names in torch's modules, or the operator, would change other threads and graphs of
    torch.compile. So this copies the function's code with other globals.
    """
    never = dict.fromkeys(("has_torch_function", "has_torch_function_unary"), lambda *_: False)
    space = {**function.__globals__, **never, **names}
    copy = FunctionType(function.__code__, space, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


_ATTENTION = F.multi_head_attention_forward
_OUR_ATTENTION = _without_modes(_ATTENTION, scaled_dot_product_attention=_ours)
# torch.utils.checkpoint recomputes a forward inside of a backward.
_BACKWARDS = {x: _without_modes(x) for x in (Tensor.backward, torch.autograd.backward, torch.autograd.grad)}


class _Ours(TorchFunctionMode):
    """Answers calls of scaled_dot_product_attention; torch disables it meanwhile."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _BACKWARDS:
            with self:
                return _BACKWARDS[func](*args, **kwargs)
        if (func in _TORCHS or func is _ATTENTION) and self.answers():
            if not _have_own_attention(types):
                return (_OUR_ATTENTION if func is _ATTENTION else _ours)(*args, **kwargs)
        return func(*args, **kwargs)

    def answers(self) -> bool:
        return True


class _OursWhileEnabled(_Ours):
    """The mode of enable_sdpa. disable_sdpa cannot remove it from other threads; there it then answers nothing."""

    def answers(self) -> bool:
        return _everywhere is not None


_UNCHANGED = (vars(Tensor)["__torch_function__"].__func__, private.disabled_torch_function)


def _have_own_attention(types: Iterable[Any]) -> bool:
    """Return whether a tensor class has its own __torch_function__."""
    functions = (kind.__torch_function__ for kind in types if kind.__module__ not in private.TENSORS_OF_TORCH)
    return any(getattr(function, "__func__", function) not in _UNCHANGED for function in functions)


def _answer(*args: Any, **kwargs: Any) -> Tensor | None:
    """Compute the operator behind scaled_dot_product_attention; None leaves the call to torch."""
    # A traced graph is kept, and no guard would notice that it contains our operator.
    if torch.compiler.is_compiling() or private.dispatch_modes() or private.is_as_torch_has_it():
        return None
    with private.as_torch_has_it():
        return _ours(*args, **kwargs)


_everywhere: Override | None = None
