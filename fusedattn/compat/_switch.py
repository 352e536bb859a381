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

from ..private import (
    TENSORS_OF_TORCH,
    DeviceContext,
    as_torch_has_it,
    disabled_torch_function,
    dispatch_modes,
    function_modes,
    is_as_torch_has_it,
    replace_function_modes,
)
from ._override import Override
from ._sdpa import scaled_dot_product_attention

# What a program may hold of it. F.scaled_dot_product_attention is the first, whenever and however it was imported.
_TORCHS = (
    F.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention.default,
)


def sdpa() -> AbstractContextManager[Any]:
    """In the `with`, F.scaled_dot_product_attention is `scaled_dot_product_attention` of this module, on any device.

        >>> with fusedattn.compat.torch.sdpa():
        ...     model(inputs).sum().backward()

    For code that cannot be edited: timm, diffusers, torchvision, transformers' "sdpa". It is a TorchFunctionMode, so it
    answers references taken before, torch.ops.aten.scaled_dot_product_attention, and torch.nn.MultiheadAttention with
    need_weights=False, whose fast path steps aside. Gradients, autocast and torch.compile included: what is compiled
    inside is compiled again outside. `fusedattn.use_backend` chooses the kernels; torch's sdpa_kernel does not.

    What ours refuses raises: attn_mask beside is_causal, nested tensors but those of torch.jagged without a mask. A
    tensor of a class with a __torch_function__ of its own is answered by its class.

    It holds for the calls of this thread, and for what their backward computes if it is started inside: keep the
    backward of a model with checkpoints inside too. Other threads: `enable_sdpa`. It costs about a microsecond for
    every call of a function of torch's.
    """
    return _Ours()


def enable_sdpa() -> None:
    """Make F.scaled_dot_product_attention ours for the whole program, all threads, until `disable_sdpa`.

    What is said of `sdpa` holds in the thread that calls this. In other threads, whether they have started or not, and
    in TorchScript, the operator behind it is ours, also for references taken before; but there, what torch.compile,
    torch.vmap or a TorchDispatchMode sees of it stays torch's, and so does the fast path of torch.nn.MultiheadAttention
    (`convert` reaches that). A thread that compiles calls enable_sdpa() itself. A second call changes nothing.
    """
    global _everywhere
    if not any(isinstance(mode, _OursWhileEnabled) for mode in function_modes()):
        _replace_modes([_OursWhileEnabled(), *function_modes()])
    if _everywhere is None:
        # For an alias of keys there is no kernel to get; what "CPU" has is that of all devices.
        operators = {"scaled_dot_product_attention": _answer}
        _everywhere = Override(operators, "CompositeImplicitAutograd", "CPU")


def disable_sdpa() -> None:
    """Undo `enable_sdpa`, in all threads. Without one it changes nothing; a `with sdpa()` stays what it is."""
    global _everywhere
    _replace_modes([mode for mode in function_modes() if not isinstance(mode, _OursWhileEnabled)])
    if _everywhere is not None:
        _everywhere.remove()
        _everywhere = None


def _ours(*args: Any, **kwargs: Any) -> Tensor:
    return scaled_dot_product_attention(*args, **kwargs)


def _asking_nobody(function: Any, **names: Any) -> Callable[..., Any]:
    """A function of torch's without the question whether a mode wants it, and with other values of global names.

    It runs what the mode wants to see, and asked, torch would set the mode aside for as long as it runs.
    """
    never = dict.fromkeys(("has_torch_function", "has_torch_function_unary"), lambda *_: False)
    space = {**function.__globals__, **never, **names}
    copy = FunctionType(function.__code__, space, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


_ATTENTION = F.multi_head_attention_forward
_OUR_ATTENTION = _asking_nobody(_ATTENTION, scaled_dot_product_attention=_ours)
# They run what torch.utils.checkpoint computes again.
_BACKWARDS = {x: _asking_nobody(x) for x in (Tensor.backward, torch.autograd.backward, torch.autograd.grad)}


class _Ours(TorchFunctionMode):
    """Answers calls of scaled_dot_product_attention; torch sets it aside while it does."""

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
    """The mode of enable_sdpa. A thread cannot take it from another one, where it then answers nothing."""

    def answers(self) -> bool:
        return _everywhere is not None


_UNCHANGED = (vars(Tensor)["__torch_function__"].__func__, disabled_torch_function)


def _answer_themselves(types: Iterable[Any]) -> bool:
    """Whether one of the classes of a call's tensors says itself what attention is."""
    for kind in types:
        function = kind.__torch_function__
        if getattr(function, "__func__", function) not in _UNCHANGED and kind.__module__ not in TENSORS_OF_TORCH:
            return True
    return False


def _replace_modes(modes: list[Any]) -> None:
    """Make these the modes of this thread, the first being asked last."""
    # What torch.set_default_device puts there must come first: it asserts so.
    replace_function_modes(sorted(modes, key=lambda mode: not isinstance(mode, DeviceContext)))


def _answer(*args: Any, **kwargs: Any) -> Tensor | None:
    """What the operator behind scaled_dot_product_attention does while it is ours; None leaves it to torch."""
    # What is traced is kept, where no guard tells that it was ours.
    if torch.compiler.is_compiling() or dispatch_modes() or is_as_torch_has_it():
        return None
    with as_torch_has_it():
        return _ours(*args, **kwargs)


_everywhere: Override | None = None
