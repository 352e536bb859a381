"""Reads the code of a module: whether it calls transformers' attention interface, or computes attention itself."""

import contextlib
import functools
import re
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

from torch.autograd import Function
from torch.nn import Module
from transformers import AttentionInterface, PreTrainedModel

from ._hf_names import REFUSED

# Names in code that computes attention by itself. A softmax for something else costs a warning at most.
ATTENDS = re.compile(
    r"(?i:softmax)(?!_(in|scale|dtype))|logsumexp|scaled_dot_product|sdpa_attention|flex_attention$|flash_attention_forward"
    r"|flash_attn_(varlen_)?func|multi_head_attention_forward|^MultiheadAttention$"
)
ALWAYS = frozenset(REFUSED) - {"head_mask"}  # what is hardly ever None where it is handed on


class Kind(NamedTuple):
    """Whether a module calls the interface, attends (computes attention itself), and is masked (takes a mask).

    refused: the keywords that it hands the interface unless it is told "eager" or "sdpa", and that we refuse.
    """

    calls: bool = False
    attends: bool = False
    masked: bool = False
    refused: frozenset[str] = frozenset()

    def also(self, other: "Kind") -> "Kind":
        """What either does."""
        calls, attends, masked = (a or b for a, b in zip(self[:3], other[:3], strict=True))
        return Kind(calls, attends, masked, self.refused | other.refused)


INSTEAD = Kind(attends=True, masked=True)  # of code in place of attention that is not seen to call the interface


def kind(module: Module) -> Kind:
    """What `module.forward` does, with the methods and functions that it reaches; not its submodules."""
    cls: type = type(module)
    if issubclass(cls, PreTrainedModel):
        return Kind()  # models hold attention, and use softmax for a loss
    of_class = _kind(cls, getattr(cls, "forward", None))
    if not any(callable(member) and hasattr(cls, name) for name, member in vars(module).items()):
        return of_class
    reached = list(_reached(cls, module))
    read = _read(reached)
    if {function for function, _, _ in reached}.intersection(_methods(cls, None, "forward")):
        return of_class.also(read)  # a hook, say, around what the class does
    return INSTEAD if not read.calls and (of_class.calls or of_class.attends or named(cls)) else read


def named(cls: type) -> bool:
    """Whether the name of a class that is not torch's says that it is attention."""
    return "Attention" in cls.__name__ and cls.__module__.partition(".")[0] != "torch"


@functools.cache
def _kind(cls: type, forward: Callable[..., Any] | None) -> Kind:
    """The Kind of all modules of a class, where `forward` is cls.forward: a class is read again if that is replaced."""
    if _foreign(cls.__module__):
        return Kind()  # the code that uses torch's modules names them
    read = _read(_reached(cls, None))
    if read.calls or read.attends:
        return read
    above = (_kind(base, getattr(base, "forward", None)) for base in cls.__mro__[1:])
    return INSTEAD if any(base.calls or base.attends for base in above) else read


def _read(reached: Iterable[tuple[FunctionType, bool, bool]]) -> Kind:
    calls = masked = attends = falls_back = False
    refused: set[str] = set()
    for function, method, fallback in reached:
        code = function.__code__
        used = _names(code)
        asks = any(isinstance(function.__globals__.get(name), AttentionInterface) for name in used)
        calls |= asks and "_attn_implementation" in used
        if asks:  # the names of a call's keywords are a tuple
            refused.update(*(ALWAYS.intersection(each) for each in code.co_consts if isinstance(each, tuple)))
        if any(ATTENDS.search(name) for name in used):
            attends, falls_back = attends or not fallback, falls_back or fallback
        if method and function.__name__ != "__init__":
            takes = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            masked |= any("mask" in name for name in takes) or "attention_mask" in code.co_consts
    return Kind(calls, attends or falls_back and not calls, masked, frozenset(refused))


def _reached(cls: type, module: Module | None) -> Iterator[tuple[FunctionType, bool, bool]]:
    """(function, whether it is a method, whether the interface gets it for "eager"), from `forward` on."""
    starts = ("forward",) if module is not None and "forward" in vars(module) else ("__init__", "forward")
    todo = [(function, True, False) for name in starts for function in _methods(cls, module, name)]
    seen = set()
    while todo:
        step = function, method, fallback = todo.pop()
        if step in seen:
            continue
        seen.add(step)
        todo += [(kept, method, fallback) for kept in _kept(function, module)]
        if _foreign(function.__globals__.get("__name__") or ""):
            continue
        yield step
        for name in _names(function.__code__):
            todo += [(other, True, fallback) for other in _methods(cls, module, name)]
            value = function.__globals__.get(name)
            if isinstance(value, type) and issubclass(value, Function):
                value = value.forward
            if isinstance(value, FunctionType):
                todo.append((value, False, fallback or "eager" in value.__name__))


def _methods(cls: type, module: Module | None, name: str) -> Iterator[FunctionType]:
    """The method of this name, and where it calls `super`, those above it."""
    if module is not None and callable(override := vars(module).get(name)):
        yield from _functions(override, module)
        return
    for above in cls.__mro__:
        attribute = vars(above).get(name)
        if attribute is None or _foreign(above.__module__):
            continue
        functions = list(_functions(attribute, module))
        yield from functions
        if functions and not any("super" in function.__code__.co_names for function in functions):
            return


def _functions(attribute: Any, module: Module | None) -> Iterator[FunctionType]:
    """The functions in Python of a method, a property, a partial or another wrapper."""
    parts: tuple[Any, ...] = ()
    if isinstance(attribute, FunctionType):
        yield attribute
    elif isinstance(attribute, MethodType | classmethod | staticmethod):
        owner = getattr(attribute, "__self__", None)  # another module calls what its own config names
        parts = () if isinstance(owner, Module) and owner is not module else (attribute.__func__,)
    elif isinstance(attribute, property):
        parts = (attribute.fget,)
    elif isinstance(attribute, functools.partial):
        parts = (attribute.func, *attribute.args, *attribute.keywords.values())
    elif "__wrapped__" in getattr(attribute, "__dict__", {}):
        parts = (attribute.__wrapped__,)
    for part in parts:
        yield from _functions(part, module)


def _kept(function: FunctionType, module: Module | None) -> Iterator[FunctionType]:
    """The functions in the closure and the defaults of another, such as a decorator's."""
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # empty as yet
            yield from _functions(cell.cell_contents, module)
    for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield from _functions(default, module)


def _foreign(module: str) -> bool:
    """Whether a module of Python is of torch, or of transformers and not of a model."""
    return module.startswith(("torch.", "transformers.")) and not module.startswith("transformers.models.")


def _names(code: CodeType) -> set[str]:
    """The names that code refers to, functions within it included."""
    return set(code.co_names).union(*(_names(inner) for inner in code.co_consts if isinstance(inner, CodeType)))
