"""Switches that make F.scaled_dot_product_attention run this package, for code that you cannot edit."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..call import private
from ._provider import Override
from ._sdpa import scaled_dot_product_attention

# Each object by which a program can call torch's function.
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

    It applies to this thread (for others see `enable_sdpa`). With activation checkpointing, start the backward inside.
    Every call of a torch function takes about a microsecond longer.
    """
    return _Ours()


def enable_sdpa() -> None:
    """Make F.scaled_dot_product_attention run this package in all threads of the program, until `disable_sdpa`.

    Examples:
        >>> fusedattn.compat.torch.enable_sdpa()
        >>> query = key = value = torch.randn(2, 8, 128, 64)
        >>> out = torch.nn.functional.scaled_dot_product_attention(query, key, value)
        >>> fusedattn.compat.torch.disable_sdpa()

    In the calling thread it does what `sdpa` does. In all other threads, and in TorchScript, it replaces the operator
    behind the function. There, torch.compile, torch.vmap and a TorchDispatchMode still see torch's, and
    torch.nn.MultiheadAttention keeps its fast path (see `convert`). Call enable_sdpa() in each thread that compiles. A
    second call changes nothing.
    """
    global _everywhere
    modes = private.function_modes()
    if not any(isinstance(mode, _OursWhileEnabled) for mode in modes):
        private.replace_function_modes([_OursWhileEnabled(), *modes])
    if _everywhere is None:
        # CompositeImplicitAutograd is an alias and has no kernel. The operator has the same kernel for every device.
        _everywhere = Override({"scaled_dot_product_attention": _answer}, "CompositeImplicitAutograd", "CPU")


def disable_sdpa() -> None:
    """Undo `enable_sdpa` in all threads. A `with sdpa()` stays in effect.

    Examples:
        >>> fusedattn.compat.torch.disable_sdpa()
    """
    global _everywhere
    private.replace_function_modes([x for x in private.function_modes() if not isinstance(x, _OursWhileEnabled)])
    _everywhere = None


def _ours(*args: Any, **kwargs: Any) -> Tensor:
    return scaled_dot_product_attention(*args, **kwargs)


def _without_modes(function: Any, **names: Any) -> Callable[..., Any]:
    """Return a copy of a torch function that no TorchFunctionMode handles. names: global names to replace.

    Torch disables a mode until the function that it handles returns, but the mode must handle the calls inside that
    function. There is no public way to do that: if the mode is pushed again, the function hands itself to the mode and
    never runs its own body. Replacing names in torch's modules, or the operator, would change other threads and graphs
    of torch.compile. So this copies the function's code with other globals.
    """
    never = dict.fromkeys(("has_torch_function", "has_torch_function_unary"), lambda *_: False)
    space = {**function.__globals__, **never, **names}
    copy = FunctionType(function.__code__, space, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


_ATTENTION = F.multi_head_attention_forward
_OUR_ATTENTION = _without_modes(_ATTENTION, scaled_dot_product_attention=_ours)
# A backward recomputes the forwards of torch.utils.checkpoint, so the mode stays active in it.
_BACKWARDS = {x: _without_modes(x) for x in (Tensor.backward, torch.autograd.backward, torch.autograd.grad)}


class _Ours(TorchFunctionMode):
    """Mode in which `scaled_dot_product_attention` of this package replaces torch's."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _BACKWARDS:
            with self:
                return _BACKWARDS[func](*args, **kwargs)
        if (func in _TORCHS or func is _ATTENTION) and not _have_own_attention(types):
            # disable_sdpa cannot remove a mode from other threads; there the mode must leave calls to torch.
            if not isinstance(self, _OursWhileEnabled) or _everywhere is not None:
                return (_OUR_ATTENTION if func is _ATTENTION else _ours)(*args, **kwargs)
        return func(*args, **kwargs)


class _OursWhileEnabled(_Ours):
    """The mode of `enable_sdpa`; after `disable_sdpa` it does nothing."""


_UNCHANGED = (vars(Tensor)["__torch_function__"].__func__, private.disabled_torch_function)


def _have_own_attention(types: Iterable[Any]) -> bool:
    functions = (kind.__torch_function__ for kind in types if kind.__module__ not in private.TENSORS_OF_TORCH)
    return any(getattr(function, "__func__", function) not in _UNCHANGED for function in functions)


def _answer(*args: Any, **kwargs: Any) -> Tensor | None:
    """Compute the operator behind scaled_dot_product_attention; None leaves the call to torch."""
    # A traced graph is kept after disable_sdpa: no guard would notice that it contains this operator.
    if torch.compiler.is_compiling() or private.dispatch_modes() or private.is_as_torch_has_it():
        return None
    with private.as_torch_has_it():
        return _ours(*args, **kwargs)


_everywhere: Override | None = None
