"""What the code of a module's class does about attention: call transformers' interface, or compute it by itself."""

import functools
import inspect
import re
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch.autograd import Function
from transformers import AttentionInterface, PreTrainedModel

# What code refers to that computes attention by itself. It may have a softmax for something else: that costs a little.
ATTENDS = re.compile(
    r"(?i:softmax)(?!_(in|scale|dtype))|logsumexp|scaled_dot_product|sdpa_attention|flex_attention$|flash_attention_forward"
    r"|flash_attn_(varlen_)?func|multi_head_attention_forward|^MultiheadAttention$"
)


class Kind(NamedTuple):
    """calls: it asks the interface for what its config names. attends: by itself. masked: it takes a mask."""

    calls: bool = False
    attends: bool = False
    masked: bool = False


def kind(cls: type) -> Kind:
    """What `cls.forward` does, with the methods and functions that it reaches; not its submodules."""
    if cls.__module__.partition(".")[0] == "torch" or issubclass(cls, PreTrainedModel):
        return Kind()  # who uses torch's modules names them; models hold attention, and use softmax for a loss
    return _read(cls, getattr(cls, "forward", None))


def named(cls: type) -> bool:
    """Whether a class that nothing else is known of says that it is attention."""
    return "Attention" in cls.__name__ and cls.__module__.partition(".")[0] != "torch"


@functools.cache
def _read(cls: type, forward: Callable[..., Any] | None) -> Kind:
    """`forward` is cls.forward: who replaces it has another class."""
    calls = masked = own = fallen = False
    for function, method, fallback in _reached(cls):
        code = function.__code__
        used = {name for inner in _within(code) for name in inner.co_names}
        asks = any(isinstance(function.__globals__.get(name), AttentionInterface) for name in used)
        calls |= asks and "_attn_implementation" in used
        if any(ATTENDS.search(name) for name in used):
            own, fallen = own or not fallback, fallen or fallback
        if method and function.__name__ != "__init__":
            takes = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            masked |= any("mask" in name for name in takes) or "attention_mask" in code.co_consts
    return Kind(calls, own or fallen and not calls, masked)


def _reached(cls: type) -> Iterator[tuple[types.FunctionType, bool, bool]]:
    """(function, whether it is a method, whether it is what the interface is handed for "eager"), from `forward` on."""
    todo = [(function, True, False) for name in ("__init__", "forward") for function in _methods(cls, name)]
    seen = set()
    while todo:
        step = function, method, fallback = todo.pop()
        if step in seen or _foreign(function.__module__):
            continue
        seen.add(step)
        yield step
        for name in {name for code in _within(function.__code__) for name in code.co_names}:
            todo += [(found, True, fallback) for found in _methods(cls, name)]
            found = function.__globals__.get(name)
            if isinstance(found, type) and issubclass(found, Function):
                found = found.forward
            if isinstance(found, types.FunctionType):
                todo.append((inspect.unwrap(found), False, fallback or "eager" in found.__name__))


def _methods(cls: type, name: str) -> Iterator[types.FunctionType]:
    """The method of a class that has this name, and where it calls `super`, those above it."""
    for above in cls.__mro__:
        found = vars(above).get(name)
        if found is None or _foreign(above.__module__):
            continue
        found = getattr(found, "fget", None) or getattr(found, "__func__", found)
        found = inspect.unwrap(found) if callable(found) else found
        if isinstance(found, types.FunctionType):
            yield found
            if "super" in found.__code__.co_names:
                continue
        return


def _foreign(module: str) -> bool:
    """Whether a module of Python is torch's, or transformers' and not a model's."""
    return module.startswith(("torch.", "transformers.")) and not module.startswith("transformers.models.")


def _within(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _within(constant)
