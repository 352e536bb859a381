"""Checks of the arguments of `attention`, shared with packed sequences, caches and direct calls of operators."""

import difflib
import functools
import numbers
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import Parameter, UninitializedBuffer, UninitializedParameter
from torch.overrides import handle_torch_function, has_torch_function

from . import private
from .options import DIMS, Arguments, Call, Plan, differentiated, in_full, seed_tensor, thread_overrides
from .private import dispatch_modes, forward_level, has_storage, holds, tracing, transforms_active

LARGEST, LARGEST_SINGLE = torch.finfo(torch.float64).max, torch.finfo(torch.float32).max
MASK = "a bool tensor, True = may attend"
FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FLOATS = "torch.float16, torch.bfloat16, torch.float32 or torch.float64"
ORDER = ": tensors in the order (B, S, H, D) need .transpose(1, 2)"
UNBOUNDED = 2**31  # sides of a window are clamped to this, above any length: larger ones overflow in kernels
_RANKS = {name: len(letters) for name, letters in DIMS.items() if letters and name in Arguments._fields}
# Types that torch.compile traces. They are in tuples, because torch 2.10 does not trace isinstance of a union.
_INTS = (int, torch.SymInt)
_NUMBERS = (*_INTS, float, torch.SymFloat)
_Function = TypeVar("_Function", bound=Callable[..., Any])


class Sizes(NamedTuple):
    """Device, dtype and rank of query, and the sizes of the scores (B, Hq, Sq, Sk)."""

    device: torch.device
    dtype: torch.dtype
    B: int
    Hq: int
    Sq: int
    Sk: int
    rank: int = 4


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
    return "a tensor" if isinstance(x, Tensor) else repr(x)  # the repr of a tensor takes many lines


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


def check_strided(**tensors: Any) -> None:
    for name, x in tensors.items():
        check_place(name, x)


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


def check_query_key_value(
    query: Any, key: Any, value: Any, key_name: str = "key", value_name: str = "value", layout: str = ""
) -> None:
    """Raise if query, key and value do not match. layout: such as "(T, H, D)"; without it the rank is 2, 3 or 4."""
    # With a layout, heads are second, and the first dimension of key may differ from that of query.
    check_place("query", query)
    dtype, device, rank = query.dtype, query.device, query.dim()
    if dtype not in FLOATING:
        fail(TypeError, "query", f"a tensor of {FLOATS}", unfit(query))
    if layout:
        check_rank("query", query, layout)
    elif rank not in (2, 3, 4):
        fail(ValueError, "query", "rank 2, 3 or 4", query.shape)
    for name, x in ((key_name, key), (value_name, value)):
        check_place(name, x, device)
        if x.dtype != dtype:
            fail(TypeError, name, f"the dtype of query, {dtype}", x.dtype)
    if not layout and rank < key.dim() == value.dim() <= 4:
        fail(ValueError, "query", f"rank {key.dim()}, as {key_name} of shape {tuple(key.shape)} has", query.shape)
    for name, x in ((key_name, key), (value_name, value)):
        if x.dim() != rank:
            fail(ValueError, name, f"rank {rank}, as query of shape {tuple(query.shape)} has", x.shape)
    sizes, key_sizes, value_sizes = query.shape, key.shape, value.shape
    if not layout and rank > 2 and not is_size(key_sizes[0], sizes[0]):
        fail(ValueError, key_name, f"a batch size of {sizes[0]}, as query has", key_sizes)
    for name, columns in (("query", sizes[-1]), (value_name, value_sizes[-1])):
        if columns == 0:
            fail(ValueError, name, "a head dimension of 1 or more", 0)
    if not is_size(key_sizes[-1], sizes[-1]):
        fail(ValueError, key_name, f"a head dimension of {sizes[-1]}, as query has", key_sizes)
    if (layout or rank == 4) and not divides(sizes[1], key_sizes[1]):
        expected = f"a number of heads that divides the {sizes[1]} heads of query"
        swapped = rank == 4 and holds(key_sizes[2] < key_sizes[1], False) and divides(sizes[2], key_sizes[2])
        fail(ValueError, key_name, expected, f"{key_sizes[1]} heads{ORDER if swapped else ''}")
    if not is_shape(value_sizes[:-1], key_sizes[:-1]):
        expected = f"the shape of {key_name}, {tuple(key_sizes)}, except for the last dimension"
        fail(ValueError, value_name, expected, value_sizes)


def _wrong_shape(name: str, x: Tensor, s: Sizes) -> str:
    """Describe a wrong shape, with advice if it suggests another argument, another rank, or (B, S, H, D) tensors."""
    shape, hints = tuple(x.shape), []
    if name == "mask":
        lengths = {"key_mask": (s.Sk, "keys"), "query_mask": (s.Sq, "queries")}
        hints = [f"pass a mask of {of} as {mask}" for mask, (n, of) in lengths.items() if shape in ((n,), (s.B, n))]
    if name in ("mask", "bias") and s.rank == 4 and x.dim() == 3:
        ways = ("heads", 1, s.B), ("batches", 0, s.Hq)
        fitting = [(of, axis) for of, axis, first in ways if broadcasts(x, (first, s.Sq, s.Sk))]
        hints = [f"call .unsqueeze({axis}) if all {of} share it" for of, axis in fitting]
    length = shape[-1] if shape and (name.endswith("_mask") or shape[-2:-1] == shape[-1:]) else None
    swapped = s.rank == 4 and length is not None and holds(length == s.Hq, False) and holds(s.Hq > s.Sk, False)
    return f"shape {shape}" + (f": {', or '.join(hints)}" if hints else ORDER if swapped else "")


def check_pairs(name: str, x: Any, s: Sizes) -> None:
    (check_bool if name == "mask" else check_floating)(name, x, s.device)
    shape = (s.B, s.Hq, s.Sq, s.Sk) if s.rank == 4 else (s.B, s.Sq, s.Sk)[3 - s.rank :]
    if x.dim() not in (2, s.rank):
        expected = "rank 2" if s.rank == 2 else f"rank 2 or {s.rank}"
    elif not broadcasts(x, shape):
        expected = f"a shape that broadcasts to that of the scores, {shape}"
    else:
        return
    fail(ValueError, name, expected, _wrong_shape(name, x, s))


def check_tokens(name: str, x: Any, s: Sizes) -> None:
    check_bool(name, x, s.device)
    size = s.Sk if name == "key_mask" else s.Sq
    if x.dim() not in (1, 2) or not is_size(x.shape[-1], size) or not broadcasts(x, (s.B, size)):
        of_batches = ", ".join(f"({batch}, {size})" for batch in dict.fromkeys((s.B, 1)))
        fail(ValueError, name, f"shape {of_batches} or ({size},)", _wrong_shape(name, x, s))


def check_words(name: str, x: Tensor, device: torch.device) -> None:
    check_dtype(name, x, torch.int64, device)
    if not x.is_contiguous():
        fail(ValueError, name, "words of a plan in contiguous memory", f"strides {x.stride()}")


def check_heads(name: str, x: Any, device: torch.device, *shapes: tuple[int, ...]) -> None:
    check_floating(name, x, device)
    check_shape(name, x, *shapes, why="one for each head of query")


def check_number(
    name: str, x: Any, expected: str, least: float = -LARGEST, most: float = LARGEST, dtype: torch.dtype | None = None,
    positive: bool = False,
) -> None:  # fmt: skip
    """Raise unless x is in least .. most, above 0 if `positive`. A dtype except float64 needs x in float32's range."""
    if not is_number(x):
        fail(TypeError, name, "a number", type_name(x))
    # Not math.isfinite: the compiler cannot trace it on a number that varies.
    number = as_python(x)
    if not least <= number <= most or (positive and number <= 0):
        fail(ValueError, name, expected, value(x))
    if dtype is not None and dtype != torch.float64 and abs(number) > LARGEST_SINGLE:
        fail(ValueError, name, "a number that float32 can hold", value(x))


def check_seed(seed: Any, device: torch.device) -> None:
    if isinstance(seed, Tensor):
        if seed.dtype != torch.int64 or irregular(seed) is not None:
            fail(TypeError, "seed", "an int or a tensor of one int64", irregular(seed) or seed.dtype)
        if seed.numel() != 1 or seed.device != device:
            got = f"shape {tuple(seed.shape)} on {seed.device}"
            fail(ValueError, "seed", f"one element, on the device of query, {device}", got)
    elif not is_int(seed):
        fail(TypeError, "seed", "an int or a tensor of one int64", type_name(seed))
    elif not -(2**63) <= seed < 2**63:
        fail(ValueError, "seed", "an int from -2**63 to 2**63 - 1", value(seed))


def _number_of(scale: Tensor) -> Any:
    """Return the number in a scale of rank 0, or any other tensor unchanged."""
    if irregular(scale) is not None or scale.dim() or scale.dtype == torch.bool or scale.is_complex():
        return scale
    if scale.requires_grad or differentiated((scale,)):
        got = "one that requires grad: to learn a scale, multiply query by it and pass scale=1.0"
        fail(TypeError, "scale", "a number or a tensor without gradient", got)
    if scale.is_meta or (not is_compiling() and private.unmapped(scale) is not scale):
        fail(TypeError, "scale", "a number or a tensor that holds one number", "a meta tensor or one that vmap maps")
    return scale.item()


def check_options(arguments: Arguments, sizes: Sizes | None = None) -> Arguments:
    """Check the options, and return the arguments with scale as a number. sizes: None for options of a module."""
    a, s = arguments, sizes
    if s is not None:
        for name in ("mask", "bias", "key_mask", "query_mask"):
            if (x := getattr(a, name)) is not None:
                (check_pairs if name in ("mask", "bias") else check_tokens)(name, x, s)
        if a.alibi_slopes is not None:
            check_heads("alibi_slopes", a.alibi_slopes, s.device, (s.Hq,), (s.B, s.Hq))
        if a.sinks is not None:
            check_heads("sinks", a.sinks, s.device, (s.Hq,))
        if a.seed is not None:
            check_seed(a.seed, s.device)
    if not isinstance(a.causal, bool):
        fail(TypeError, "causal", "a bool", value(a.causal))
    if a.window is not None:
        pair = isinstance(a.window, tuple | list) and len(a.window) == 2
        if not pair or any(side is not None and not is_int(side) for side in a.window):
            fail(TypeError, "window", "(left, right), each an int or None", value(a.window))
        if any(side is not None and side < 0 for side in a.window):
            fail(ValueError, "window", "sides of 0 or more, or None for unbounded", value(a.window))
    if not isinstance(a.align, str) or a.align not in ("bottom_right", "top_left"):
        fail(ValueError, "align", "'bottom_right' or 'top_left'", value(a.align))
    dtype = None if s is None else s.dtype
    a = a._replace(scale=_number_of(a.scale)) if isinstance(a.scale, Tensor) else a
    if a.scale is not None:
        check_number("scale", a.scale, "a finite number", dtype=dtype)
    if a.softcap is not None:
        check_number("softcap", a.softcap, "a finite number above 0", dtype=dtype, positive=True)
    check_number("dropout_p", a.dropout_p, "a number from 0 to 1", 0, 1)
    return a


def autocasting(tensor: Tensor) -> bool:
    kind = tensor.device.type
    # Meta and some other devices have no autocast. CPUs and GPUs do; asking torch takes longer than this test.
    return (kind in ("cpu", "cuda") or torch.amp.is_autocast_available(kind)) and torch.is_autocast_enabled(kind)


CAST = (torch.float16, torch.bfloat16, torch.float32)  # dtypes that autocast casts


def autocast_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype of a tensor after autocast, as in torch's SDPA; float64 stays."""
    cast = tensor.dtype in CAST and autocasting(tensor)
    return torch.get_autocast_dtype(tensor.device.type) if cast else tensor.dtype


def autocast(arguments: Arguments) -> Arguments:
    query = arguments.query
    if not isinstance(query, Tensor) or not autocasting(query):
        return arguments
    cast = [x.to(autocast_dtype(x)) if isinstance(x, Tensor) else x for x in (query, arguments.key, arguments.value)]
    return arguments._replace(query=cast[0], key=cast[1], value=cast[2])


def normalise(arguments: Arguments, **more: Any) -> Call:
    """Convert checked arguments to a Call. more: further fields of the Call."""
    a, columns = arguments, arguments.query.shape[-1]
    if a.scale is None and isinstance(columns, Tensor):  # torch.jit traces; the power of a tensor would be float32
        columns = int(columns)
    left, right = (None, None) if a.window is None else map(as_python, a.window)
    fields: dict[str, Any] = {}
    for name, rank in _RANKS.items():
        x = getattr(a, name)
        fields[name] = x if x is None or x.dim() == rank else in_full(name, x)
    # Not dict(...), which a compiler traces item by item.
    fields |= {
        "seed": seed_tensor(a.seed, a.query.device) if a.dropout_p else None,
        "left": None if left is None else min(left, UNBOUNDED),
        "right": 0 if a.causal else None if right is None else min(right, UNBOUNDED),
        # Without causal, window and slopes, align has no effect: False then saves compiling a second kernel.
        "top_left": a.align == "top_left"
        and (left is not None or right is not None or a.causal or a.alibi_slopes is not None),
        "scale": columns**-0.5 if a.scale is None else float(a.scale),
        "softcap": None if a.softcap is None else float(a.softcap),
        "dropout_p": float(a.dropout_p),
        "deterministic": thread_overrides.deterministic,
    }
    return Call(**{**fields, **more})


def checked(arguments: Arguments, named: bool = False) -> Call:
    """Apply autocast and a plan, check the arguments, and return them as a Call. named: the caller chose a backend."""
    arguments, plan = autocast(arguments), arguments.mask
    if isinstance(plan, Plan):
        for name in ("key_mask", "query_mask"):
            if getattr(arguments, name) is not None:
                fail(ValueError, name, "None, because mask is a plan", f"a mask: pass {name} to fusedattn.plan instead")
        arguments = arguments._replace(mask=None, key_mask=plan.key_mask, query_mask=plan.query_mask)
    query, key = arguments.query, arguments.key
    check_query_key_value(query, key, arguments.value)
    shape, rank = query.shape, query.dim()
    batch, heads = shape[0] if rank > 2 else 1, shape[1] if rank == 4 else 1
    sizes = Sizes(query.device, query.dtype, batch, heads, shape[-2], key.shape[-2], rank)
    return normalise(check_options(arguments, sizes), **marks_of(plan, sizes), named=named)


def marks_of(plan: Any, sizes: Sizes) -> dict[str, Any]:
    """Return a Plan's block_mask and mask_bits, {} for any other mask. Raise if the Plan does not fit the sizes."""
    if not isinstance(plan, Plan):
        return {}
    scores = sizes.B, sizes.Hq, sizes.Sq, sizes.Sk
    if not all(is_size(size, 1, whole) for size, whole in zip(plan.shape, scores, strict=True)):
        fail(ValueError, "mask", f"a plan that broadcasts to the shape of the scores, {scores}", f"one of {plan.shape}")
    if plan.block_mask is not None:
        check_place("mask", plan.block_mask, sizes.device)
    if plan.mask_bits is not None:
        check_words("mask", plan.mask_bits, sizes.device)
    return dict(block_mask=plan.block_mask, mask_bits=plan.mask_bits)
