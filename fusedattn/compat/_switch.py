"""Switches that make F.scaled_dot_product_attention ours, for code that calls it and cannot be edited.

A backend of this package that computes by torch's calls it inside `private.as_torch_has_it()`, where it stays so.
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

# The functions of torch that a program may call. F.scaled_dot_product_attention is the first, however it was imported.
_OPERATOR = torch.ops.aten.scaled_dot_product_attention
_TORCHS = F.scaled_dot_product_attention, _OPERATOR, _OPERATOR.default


def sdpa() -> AbstractContextManager[Any]:
    """In the `with`, F.scaled_dot_product_attention is `scaled_dot_product_attention` of this module, on any device.

    Examples:
        >>> query = key = value = torch.randn(2, 8, 128, 64, requires_grad=True)
        >>> with fusedattn.compat.torch.sdpa():
        ...     torch.nn.functional.scaled_dot_product_attention(query, key, value).sum().backward()

    For code that cannot be edited. It is a TorchFunctionMode, so it also answers references that were imported before,
    torch.ops.aten.scaled_dot_product_attention, and torch.nn.MultiheadAttention with need_weights=False, whose fast
    path is not taken. Gradients and autocast work; torch.compile compiles inside and outside apart.
    `fusedattn.use_backend` chooses the kernels; torch's sdpa_kernel does not. attn_mask beside is_causal raises, and so
    do nested tensors but those of torch.jagged without a mask. A tensor class with a __torch_function__ answers itself.

    It holds for this thread (for others see `enable_sdpa`), and for a backward that is started inside, as that of a
    model with checkpoints must be. Every call of a function of torch's takes about a microsecond longer.
    """
    return _Ours()


def enable_sdpa() -> None:
    """Make F.scaled_dot_product_attention ours for the whole program, all threads, until `disable_sdpa`.

    Examples:
        >>> fusedattn.compat.torch.enable_sdpa()
        >>> query = key = value = torch.randn(2, 8, 128, 64)
        >>> out = torch.nn.functional.scaled_dot_product_attention(query, key, value)
        >>> fusedattn.compat.torch.disable_sdpa()

    The thread that calls this has what `sdpa` has. In all other threads, and in TorchScript, the operator behind the
    function is ours; but torch.compile, torch.vmap and a TorchDispatchMode see torch's there, and
    torch.nn.MultiheadAttention keeps its fast path (see `convert`). A thread that compiles calls enable_sdpa() itself.
    A second call changes nothing.
    """
    global _everywhere
    if not any(isinstance(mode, _OursWhileEnabled) for mode in private.function_modes()):
        private.replace_function_modes([_OursWhileEnabled(), *private.function_modes()])
    if _everywhere is None:
        # For an alias of keys there is no kernel to get; that of "CPU" is the kernel of all devices.
        _everywhere = Override({"scaled_dot_product_attention": _answer}, "CompositeImplicitAutograd", "CPU")


def disable_sdpa() -> None:
    """Undo `enable_sdpa`, in all threads. Without one it changes nothing; a `with sdpa()` stays what it is.

    Examples:
        >>> fusedattn.compat.torch.disable_sdpa()
    """
    global _everywhere
    modes = [mode for mode in private.function_modes() if not isinstance(mode, _OursWhileEnabled)]
    private.replace_function_modes(modes)
    _everywhere = None


def _ours(*args: Any, **kwargs: Any) -> Tensor:
    return scaled_dot_product_attention(*args, **kwargs)


def _asking_nobody(function: Any, **names: Any) -> Callable[..., Any]:
    """Return a function of torch's that does not hand its call to a mode, with other values of global names.

    torch would disable the mode for as long as the function runs, and the calls within are for the mode.
    """
    never = dict.fromkeys(("has_torch_function", "has_torch_function_unary"), lambda *_: False)
    space = {**function.__globals__, **never, **names}
    copy = FunctionType(function.__code__, space, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


_ATTENTION = F.multi_head_attention_forward
_OUR_ATTENTION = _asking_nobody(_ATTENTION, scaled_dot_product_attention=_ours)
# In a backward torch.utils.checkpoint computes a forward again.
_BACKWARDS = {x: _asking_nobody(x) for x in (Tensor.backward, torch.autograd.backward, torch.autograd.grad)}


class _Ours(TorchFunctionMode):
    """Answers calls of scaled_dot_product_attention; torch disables it while it does."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _BACKWARDS:
            with self:
                return _BACKWARDS[func](*args, **kwargs)
        if (func in _TORCHS or func is _ATTENTION) and self.answers():
            if not _answer_themselves(types):
                return (_OUR_ATTENTION if func is _ATTENTION else _ours)(*args, **kwargs)
        return func(*args, **kwargs)

    def answers(self) -> bool:
        return True


class _OursWhileEnabled(_Ours):
    """The mode of enable_sdpa. disable_sdpa cannot remove it from another thread: there it then answers nothing."""

    def answers(self) -> bool:
        return _everywhere is not None


_UNCHANGED = (vars(Tensor)["__torch_function__"].__func__, private.disabled_torch_function)


def _answer_themselves(types: Iterable[Any]) -> bool:
    """Return whether one of the classes of a call's tensors has its own attention."""
    functions = (kind.__torch_function__ for kind in types if kind.__module__ not in private.TENSORS_OF_TORCH)
    return any(getattr(function, "__func__", function) not in _UNCHANGED for function in functions)


def _answer(*args: Any, **kwargs: Any) -> Tensor | None:
    """Compute the operator behind scaled_dot_product_attention; None leaves the call to torch."""
    # A graph that is traced is kept, and no guard says that it has our operator.
    if torch.compiler.is_compiling() or private.dispatch_modes() or private.is_as_torch_has_it():
        return None
    with private.as_torch_has_it():
        return _ours(*args, **kwargs)


_everywhere: Override | None = None
