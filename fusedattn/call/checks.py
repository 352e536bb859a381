"""Errors that name an argument, and checks of single arguments: types, places, dtypes, shapes, numbers."""

import difflib
import functools
import numbers
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NoReturn, TypeVar, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import Parameter, UninitializedBuffer, UninitializedParameter
from torch.overrides import handle_torch_function, has_torch_function

from . import private
from .options import Plan
from .private import dispatch_modes, forward_level, has_storage, holds, tracing, transforms_active

LARGEST, LARGEST_SINGLE = torch.finfo(torch.float64).max, torch.finfo(torch.float32).max
MASK = "a bool tensor, True = may attend"
FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FLOATS = "torch.float16, torch.bfloat16, torch.float32 or torch.float64"
# Types that torch.compile traces. They are in tuples, because torch 2.10 does not trace isinstance of a union.
_INTS = (int, torch.SymInt)
_NUMBERS = (*_INTS, float, torch.SymFloat)
_Function = TypeVar("_Function", bound=Callable[..., Any])


# torch and flash-attn raise RuntimeError or AssertionError for the same mistakes: code that catches these still works.
class ArgumentValueError(ValueError, RuntimeError, AssertionError): ...


class ArgumentTypeError(TypeError, RuntimeError, AssertionError): ...


def fail(error: type[Exception], argument: str, expected: Any, got: Any) -> NoReturn:
    error = {ValueError: ArgumentValueError, TypeError: ArgumentTypeError}.get(error, error)
    got = f"shape {tuple(got)}" if isinstance(got, torch.Size) else got
    raise error(f"{argument}: expected {expected}, got {got}")


def type_name(x: Any) -> str:
    """Return x's type for an error message, with its library if not Python or torch. A tensor gets a hint."""
    if isinstance(x, Tensor):
        return "a tensor: call .item() on it"
    library, name = type(x).__module__.partition(".")[0], type(x).__name__
    return name if library in ("builtins", "torch") else f"{library}.{name}"


def unfit(x: Any, advice: str = "call .float() on it") -> str:
    """Describe x, which has a wrong dtype or is no tensor, for an error message."""
    return f"{x.dtype}: {advice}" if isinstance(x, Tensor) else type_name(x)


def value(x: Any) -> str:
    # The repr of a tensor, or of an array, takes many lines.
    return "a tensor" if isinstance(x, Tensor) else type_name(x) if "\n" in repr(x) else repr(x)


def is_number(x: Any) -> bool:
    return (isinstance(x, _NUMBERS) or isinstance(x, numbers.Real)) and not isinstance(x, bool)


def is_int(x: Any) -> bool:
    return (isinstance(x, _INTS) or isinstance(x, numbers.Integral)) and not isinstance(x, bool)


def as_python(x: Any) -> Any:
    """Convert a NumPy scalar to a Python number, and return anything else unchanged."""
    if type(x).__module__ != "numpy" or not isinstance(x, numbers.Real):
        return x
    return int(x) if isinstance(x, numbers.Integral) else float(x)


def must_dispatch() -> bool:
    """Return whether operators must go through torch's dispatcher, where a compiler, transform or mode sees them."""
    return is_compiling() or dispatch_modes() != 0 or transforms_active() or bool(tracing()) or forward_level() >= 0


CLASSES = frozenset((Tensor, Parameter))  # exact classes: subclasses do not count


def overriding(arguments: Sequence[Any]) -> tuple[Any, ...]:
    """Return the arguments whose __torch_function__ overrides a function, with None for a mode; () without any."""
    if not has_torch_function(arguments):
        return ()
    # Torch's own classes, such as nested tensors, do not know our functions.
    overriding = None, *[x for x in arguments if type(x).__module__ not in private.TENSORS_OF_TORCH]
    # The compiler's has_torch_function also returns True while __torch_function__ is disabled.
    enabled = private.torch_function_enabled() or not is_compiling()
    # Torch 2.11 cannot compile `handle_torch_function` with arguments that lack __torch_function__, such as None.
    return tuple(x for x in overriding if has_torch_function((x,))) if enabled else ()


def overridable(function: _Function) -> _Function:
    """Let the __torch_function__ of classes and modes override a public function."""

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        if has_torch_function(args) or has_torch_function(tuple(options.values())):  # quicker than one tuple of both
            if others := overriding((*args, *options.values())):
                return handle_torch_function(call, others, *args, **options)
        return function(*args, **options)

    made: Any = call  # torch.compile counts recompilations by code object: each function needs its own
    made.__code__ = made.__code__.replace(co_name=function.__name__)
    return cast(_Function, made)


def in_memory(tensors: Iterable[Any]) -> bool:
    """Return whether kernels can read all tensors at their addresses: plain, strided, with data, not negated."""
    for x in tensors:
        if isinstance(x, Tensor) and (
            type(x) not in CLASSES
            or x.layout is not torch.strided
            or x.is_nested
            or not has_storage(x)
            or x.is_neg()
            or (x.data_ptr() == 0 and x.numel() != 0)
        ):
            return False
    return True


def plain(arguments: Iterable[Any]) -> bool:
    """Return whether an operator with these arguments may run without torch's dispatcher."""
    return not must_dispatch() and in_memory(arguments)


def check_names(function: str, options: Iterable[str], known: Collection[str]) -> None:
    for name in options:
        if name not in known:
            near = [f": did you mean {x!r}?" for x in difflib.get_close_matches(name, known, 1)]
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}{''.join(near)}")


def check_flags(**flags: Any) -> None:
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            fail(TypeError, name, "a bool", type_name(flag))


def irregular(x: Any) -> Any:
    """Describe a nested, sparse or lazy tensor for an error message; return None for anything else."""
    if not isinstance(x, Tensor):
        return None
    if x.is_nested:
        return "a nested tensor"
    if x.layout != torch.strided:
        return x.layout
    lazy = type(x) is not Tensor and isinstance(x, UninitializedParameter | UninitializedBuffer)
    return "a parameter of a lazy module that has not run yet" if lazy else None


def divides(heads: int, kv_heads: int) -> bool:
    return heads == kv_heads or (kv_heads != 0 and heads % kv_heads == 0)


def broadcasts(tensor: Tensor, shape: tuple[int, ...]) -> bool:
    """Return whether a tensor broadcasts to a shape without enlarging the shape."""
    first = len(shape) - tensor.dim()
    if first < 0:
        return False
    for size, whole in zip(tensor.shape, shape[first:], strict=True):
        if not is_size(size, 1, whole):
            return False
    return True


def is_size(size: Any, *allowed: Any) -> bool:
    """Return whether a size equals one of `allowed`. Only for checks: a size that a compiler cannot know is allowed."""
    # A size that a compiler cannot know counts as the last of `allowed`, and the compiled program asserts that.
    for one in allowed:  # a loop: a compiler traces it in a third of the steps that any() takes
        if (same := size == one) is True or holds(same, False):
            return True
    if not holds(size == allowed[-1], True):
        return False
    private.assert_at_run_time(size == allowed[-1])
    return True


def is_shape(shape: Sequence[Any], *allowed: Sequence[Any]) -> bool:
    """Return whether a shape is one of `allowed`. Allowed shapes of equal rank must differ in at most one dimension."""
    # Compare only shapes of the same rank: torch.export would turn other comparisons of sizes into guards.
    same_rank = [one for one in allowed if len(one) == len(shape)]
    if not same_rank:  # a branch, because torch 2.11 does not compile bool() of a list
        return False
    for size, *wanted in zip(shape, *same_rank, strict=True):
        if not is_size(size, *wanted):
            return False
    return True


def check_tensors(**tensors: Any) -> None:
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            fail(TypeError, name, "a tensor", type_name(tensor))


def check_place(name: str, x: Any, device: torch.device | None = None, of: str = "query") -> None:
    """Raise unless x is a strided tensor on `device` (None: on any). of: the argument that `device` is from."""
    if not isinstance(x, Tensor):
        fail(TypeError, name, "a tensor", type_name(x))
    if (got := irregular(x)) is not None:
        fail(TypeError, name, "a dense (strided) tensor", got)
    if device is not None and x.device != device:
        fail(ValueError, name, f"the device of {of}, {device}", x.device)


def check_bool(name: str, x: Any, device: torch.device | None, of: str = "query") -> None:
    if not isinstance(x, Tensor) or x.dtype != torch.bool:
        fail(TypeError, name, MASK, got_for_mask(x))
    check_place(name, x, device, of)


def got_for_mask(x: Any) -> str:
    """Describe x, a mask that is not a bool tensor, for an error message, with advice."""
    if isinstance(x, Plan):
        return "a plan: pass a bool tensor"
    if hasattr(x, "mask_mod"):
        return f"a {type_name(x)}: pass its mask_mod to fusedattn.plan"
    if callable(x):
        return "a function: pass it to fusedattn.plan"
    added = isinstance(x, Tensor) and x.dtype.is_floating_point
    return unfit(x, "pass what is added to scores as bias of attention" if added else "call .bool() on it")


def check_floating(name: str, x: Any, device: torch.device | None, of: str = "query") -> None:
    if not isinstance(x, Tensor) or x.dtype not in FLOATING:
        advice = "call .float() on it" + (", or pass what may attend as mask" if name == "bias" else "")
        fail(TypeError, name, f"a tensor of {FLOATS}", unfit(x, advice))
    check_place(name, x, device, of)


def check_dtype(name: str, x: Any, dtype: torch.dtype, device: torch.device, of: str = "query") -> None:
    if not isinstance(x, Tensor) or x.dtype != dtype:
        fail(TypeError, name, f"a tensor of {dtype}", unfit(x, f"call .to({dtype}) on it"))
    check_place(name, x, device, of)


def check_rank(name: str, x: Tensor, layout: str) -> None:
    """Raise unless a tensor has the rank of a layout such as "(B, S)"."""
    rank = layout.count(", ") + 1
    if x.dim() != rank:
        fail(ValueError, name, f"rank {rank}, {layout}", x.shape)


def check_shape(name: str, x: Tensor, *shapes: tuple[int, ...], why: str) -> None:
    """Raise unless a tensor has one of the shapes. why: text for the message, which says where the sizes come from."""
    if not is_shape(x.shape, *shapes):
        fail(ValueError, name, f"shape {' or '.join(map(str, shapes))}, {why}", x.shape)


def check_number(
    name: str, x: Any, expected: str, least: float = -LARGEST, most: float = LARGEST, dtype: torch.dtype | None = None,
    positive: bool = False,
) -> None:  # fmt: skip
    """Raise unless x is in least .. most, above 0 if `positive`. With a dtype except float64, x must fit float32."""
    if not is_number(x):
        fail(TypeError, name, "a number", type_name(x))
    # Not math.isfinite: the compiler cannot trace it on a number that varies.
    number = as_python(x)
    if not least <= number <= most or (positive and number <= 0):
        fail(ValueError, name, expected, value(x))
    if dtype is not None and dtype != torch.float64 and abs(number) > LARGEST_SINGLE:
        fail(ValueError, name, "a number that float32 can hold", value(x))


def check_sizes(least: int = 1, **sizes: Any) -> list[int]:
    """Check that sizes are ints of `least` or more, and return them as Python ints, which compilers take."""
    for name, size in sizes.items():
        if not is_int(size):
            fail(TypeError, name, "an int", type_name(size))
        if not least <= size < 2**63:
            fail(ValueError, name, f"{least} or more, and less than 2**63", size)
    return [*map(as_python, sizes.values())]
