"""Checks the arguments of `attention`: a Rule for each mistake. Packed and cached calls share its rules."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ..private import unmapped
from .form import Arguments, Call, Plan, autocast, differentiated, normalise
from .layout import broadcasts, divides, irregular, is_shape, is_size
from .numbers import as_python, is_int, is_number

LARGEST, LARGEST_SINGLE = torch.finfo(torch.float64).max, torch.finfo(torch.float32).max
ALIGNMENTS = ("bottom_right", "top_left")
FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Sizes(NamedTuple):
    """The sizes that the shapes of options follow from: those of the scores, and the query that they belong to.

    rank is that of query, scores the shape (B, Hq, Sq, Sk) without the dimensions that query has not.
    """

    device: torch.device
    dtype: torch.dtype
    rank: int
    B: int
    Hq: int
    Sq: int
    Sk: int
    scores: tuple[int, ...]


class Rule(NamedTuple):
    """One mistake. wrong(argument, about) says whether it was made; about is all arguments, or the Sizes of a call.

    expected is a sentence, or makes one of (argument, about). got(argument) is what the message says of the argument.
    """

    argument: str
    error: type[Exception]
    expected: str | Callable[[Any, Any], str]
    wrong: Callable[[Any, Any], Any]
    got: Callable[[Any], Any]


# torch and flash-attn raise RuntimeError or AssertionError for the same mistakes: who catches those catches these.
class ArgumentValueError(ValueError, RuntimeError, AssertionError):
    """A ValueError about an argument."""


class ArgumentTypeError(TypeError, RuntimeError, AssertionError):
    """A TypeError about an argument."""


def fail(error: type[Exception], argument: str, expected: Any, got: Any) -> NoReturn:
    """Raise in the one form that every error about an argument has."""
    if error is ValueError:
        error = ArgumentValueError
    elif error is TypeError:
        error = ArgumentTypeError
    raise error(f"{argument}: expected {expected}, got {got}")


def apply(rules: Iterable[Rule], arguments: Any, about: Any) -> None:
    """Raise for the first rule that arguments break."""
    for rule in rules:
        argument = getattr(arguments, rule.argument)
        if rule.wrong(argument, about):
            expected = rule.expected if isinstance(rule.expected, str) else rule.expected(argument, about)
            fail(rule.error, rule.argument, expected, rule.got(argument))


# What a message says of an argument.
def shape(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape)


def dtype(x: Tensor) -> torch.dtype:
    return x.dtype


def type_name(x: Any) -> str:
    """The type of x, with the library of which it is: a bool of NumPy is none of Python."""
    library, name = type(x).__module__.partition(".")[0], type(x).__name__
    return name if library in ("builtins", "torch") else f"{library}.{name}"


def kind(x: Any) -> Any:
    """The dtype of a tensor, or the type of anything else, an array of NumPy among them."""
    return x.dtype if isinstance(x, Tensor) else type_name(x)


def unfit(x: Any) -> Any:
    """The kind of what should be floating; one of 8 bits is floating, but not for us."""
    strange = isinstance(x, Tensor) and x.dtype.is_floating_point
    return f"{x.dtype}, which is none of float16, bfloat16, float32 and float64" if strange else kind(x)


def boolean(x: Any, _: Any = None) -> str:
    """What is expected of a mask, by what it is instead."""
    if not isinstance(x, Tensor):
        return "a bool tensor, True = may attend"
    floating = x.dtype.is_floating_point
    return f"a bool tensor, True = may attend ({'added to scores, it is a bias' if floating else 'say .bool()'})"


def value(x: Any) -> str:
    """The value in one line; that of a tensor would take many."""
    return "a tensor" if isinstance(x, Tensor) else repr(x)


def invalid(
    name: str,
    expected: str | Callable[[Any, Any], str],
    wrong: Callable[[Any, Any], Any],
    got: Callable[[Any], Any] = shape,
) -> Rule:
    """A Rule of a value or a shape, which raises ValueError."""
    return Rule(name, ValueError, expected, wrong, got)


# Rules that several arguments have.
def is_tensor(name: str) -> Rule:
    return Rule(name, TypeError, "a tensor", lambda x, _: not isinstance(x, Tensor), type_name)


def is_strided(name: str) -> Rule:
    return Rule(name, TypeError, "a strided tensor", lambda x, _: irregular(x) is not None, irregular)


def is_bool(name: str) -> Rule:
    return Rule(name, TypeError, boolean, lambda x, _: not isinstance(x, Tensor) or x.dtype != torch.bool, kind)


def is_floating(name: str) -> Rule:
    return Rule(
        name, TypeError, "a floating tensor", lambda x, _: not isinstance(x, Tensor) or x.dtype not in FLOATING, unfit
    )


def is_flag(name: str) -> Rule:
    return Rule(name, TypeError, "a bool", lambda x, _: not isinstance(x, bool), value)


def of_dtype(name: str, dtype: torch.dtype | None = None) -> tuple[Rule, ...]:
    """A tensor of a dtype, by default that of the query, where the query is."""

    def expected(_: Any, a: Any) -> str:
        return f"a tensor of {dtype}" if dtype else f"a tensor of the dtype of query, {a.query.dtype}"

    def wrong(x: Any, a: Any) -> bool:
        return not isinstance(x, Tensor) or x.dtype != (dtype or a.query.dtype)

    return (Rule(name, TypeError, expected, wrong, kind), *place(name))


def is_beside(name: str, other: str) -> Rule:
    """A Rule: required by `other`."""
    return invalid(
        name, f"a tensor beside {other}", lambda x, a: x is None and getattr(a, other) is not None, lambda x: None
    )


def has_rank(rank: int, name: str, dims: str = "") -> Rule:
    return invalid(name, f"rank {rank}{dims}", lambda x, _: x.dim() != rank)


def has_shape(name: str, *shapes: Callable[[Any], tuple[int, ...]]) -> Rule:
    """A Rule: the shape is one of `shapes`, functions of what the rule is about."""

    def expected(_: Tensor, about: Any) -> str:
        return f"shape {' or '.join(str(allowed(about)) for allowed in shapes)}"

    return invalid(name, expected, lambda x, about: not is_shape(x.shape, *[allowed(about) for allowed in shapes]))


def has_columns(name: str) -> Rule:
    return invalid(name, "a head dimension of 1 or more", lambda x, _: x.shape[-1] == 0)


def _of_query(fact: str, a: Any) -> Any:
    """A fact of the query of arguments, or of Sizes, which have it themselves."""
    return getattr(a if isinstance(a, Sizes) else a.query, fact)


def _on_device(name: str) -> Rule:
    def expected(_: Tensor, a: Any) -> str:
        return f"the device of query, {_of_query('device', a)}"

    return invalid(name, expected, lambda x, a: x.device != _of_query("device", a), lambda x: x.device)


def place(name: str) -> tuple[Rule, ...]:
    """How and where every tensor is stored."""
    return (is_strided(name), _on_device(name))


def _is_number(name: str) -> Rule:
    return Rule(name, TypeError, "a number", lambda x, _: not is_number(x), type_name)


def _fits_float32(name: str) -> Rule:
    def wrong(x: float, s: Sizes | None) -> bool:
        return s is not None and s.dtype != torch.float64 and abs(as_python(x)) > LARGEST_SINGLE

    return invalid(name, "a number that float32 can hold", wrong, value)


def _tokens_hint(mask: Any, s: Sizes) -> str:
    """What a mask that says nothing of pairs should have been passed as; nothing if it says something."""
    lengths = {"key_mask": (s.Sk, "of keys"), "query_mask": (s.Sq, "of queries")}
    hints = [
        f"one {of} is passed as {name}" for name, (n, of) in lengths.items() if tuple(mask.shape) in ((n,), (s.B, n))
    ]
    return f" ({', '.join(hints)})" if hints else ""


def _pairs(name: str) -> tuple[Rule, ...]:
    """What broadcasts to the scores: a mask or a bias."""

    def hint(x: Tensor, s: Sizes) -> str:
        return _tokens_hint(x, s) if name == "mask" else ""

    def rank(x: Tensor, s: Sizes) -> str:
        return f"rank 2 or that of query, {s.rank}{hint(x, s)}"

    def whole(x: Tensor, s: Sizes) -> str:
        return f"broadcastable to {s.scores}{hint(x, s)}"

    return (
        invalid(name, rank, lambda x, s: x.dim() not in (2, s.rank)),
        invalid(name, whole, lambda x, s: not broadcasts(x, s.scores)),
    )


def _tokens(name: str, size: Callable[[Sizes], int]) -> Rule:
    """A key_mask or query_mask: (S,), (1, S) or (B, S)."""

    def expected(_: Tensor, s: Sizes) -> str:
        of_batches = ", ".join(f"({batch}, {size(s)})" for batch in dict.fromkeys((s.B, 1)))
        return f"shape {of_batches} or ({size(s)},)"

    def wrong(x: Tensor, s: Sizes) -> bool:
        return x.dim() not in (1, 2) or not is_size(x.shape[-1], size(s)) or not broadcasts(x, (s.B, size(s)))

    return invalid(name, expected, wrong)


def _is_window(x: Any) -> bool:
    return isinstance(x, tuple | list) and len(x) == 2 and all(side is None or is_int(side) for side in x)


def _seed_kind(x: Any, _: Any) -> bool:
    return x.dtype != torch.int64 or irregular(x) is not None if isinstance(x, Tensor) else not is_int(x)


def heads(x: Tensor) -> int:
    """How many heads a query, key or value of `attention` has."""
    return x.shape[1] if x.dim() == 4 else 1


def of_query_key_value(
    key: str, value: str, ranks: tuple[Rule, ...], heads: Callable[[Tensor], int]
) -> tuple[Rule, ...]:
    """The rules of query, key and value, in the order in which they are looked for: one may rely on those above it.

    Args:
        key, value: what the arguments are called. ranks: the rules of their ranks and batches.
        heads: of one of them, how many it has.
    """

    def dtype_of_query(_: Tensor, a: Any) -> str:
        return f"{'' if key == 'key' else 'a tensor of '}the dtype of query, {a.query.dtype}"

    return (
        *map(is_tensor, ("query", key, value)),
        *map(is_strided, ("query", key, value)),
        Rule("query", TypeError, "a floating dtype", lambda q, _: q.dtype not in FLOATING, unfit),
        *(Rule(x, TypeError, dtype_of_query, lambda x, a: x.dtype != a.query.dtype, dtype) for x in (key, value)),
        *map(_on_device, (key, value)),
        *ranks,
        *map(has_columns, ("query", value)),
        invalid(
            key,
            lambda k, a: f"the head dimension of query, {a.query.shape[-1]}",
            lambda k, a: not is_size(k.shape[-1], a.query.shape[-1]),
        ),
        invalid(
            key,
            lambda k, a: f"a number of heads that divides the {heads(a.query)} of query",
            lambda k, a: not divides(heads(a.query), heads(k)),
            lambda k: f"{heads(k)} heads",
        ),
        invalid(
            value,
            lambda v, a: f"all but the last dimension as in {key}, {tuple(getattr(a, key).shape)}",
            lambda v, a: not is_shape(v.shape[:-1], getattr(a, key).shape[:-1]),
        ),
    )


_RANKS = (
    invalid("query", "rank 2, 3 or 4", lambda q, _: q.dim() not in (2, 3, 4)),
    *(
        invalid(name, lambda x, a: f"the rank of query, {a.query.dim()}", lambda x, a: x.dim() != a.query.dim())
        for name in ("key", "value")
    ),
    invalid(
        "key",
        lambda k, a: f"the batch size of query, {a.query.shape[0]}",
        lambda k, a: k.dim() > 2 and not is_size(k.shape[0], a.query.shape[0]),
    ),
)
TENSORS = of_query_key_value("key", "value", _RANKS, heads)
# Of options, in terms of Sizes; those of numbers also without, as a module gets them before there is a query.
OPTIONS = {
    "mask": (is_bool("mask"), *place("mask"), *_pairs("mask")),
    "bias": (is_floating("bias"), *place("bias"), *_pairs("bias")),
    "key_mask": (is_bool("key_mask"), *place("key_mask"), _tokens("key_mask", lambda s: s.Sk)),
    "query_mask": (is_bool("query_mask"), *place("query_mask"), _tokens("query_mask", lambda s: s.Sq)),
    "causal": (is_flag("causal"),),
    "window": (
        Rule("window", TypeError, "(left, right), each an int or None", lambda x, _: not _is_window(x), value),
        invalid(
            "window",
            "no negative side; None is unbounded",
            lambda x, _: any(side is not None and side < 0 for side in x),
            value,
        ),
    ),
    "align": (
        invalid(
            "align", "'bottom_right' or 'top_left'", lambda x, _: not isinstance(x, str) or x not in ALIGNMENTS, value
        ),
    ),
    "scale": (
        _is_number("scale"),
        # Not math.isfinite: the compiler cannot trace it on a number that varies.
        invalid("scale", "a finite number", lambda x, _: not -LARGEST <= as_python(x) <= LARGEST, value),
        _fits_float32("scale"),
    ),
    "softcap": (
        _is_number("softcap"),
        invalid("softcap", "a finite number above 0", lambda x, _: not 0 < as_python(x) <= LARGEST, value),
        _fits_float32("softcap"),
    ),
    "alibi_slopes": (
        is_floating("alibi_slopes"),
        *place("alibi_slopes"),
        has_shape("alibi_slopes", lambda s: (s.Hq,), lambda s: (s.B, s.Hq)),
    ),
    "sinks": (is_floating("sinks"), *place("sinks"), has_shape("sinks", lambda s: (s.Hq,))),
    "dropout_p": (
        _is_number("dropout_p"),
        invalid("dropout_p", "a number from 0 to 1", lambda x, _: not 0 <= x <= 1, value),
    ),
    "seed": (
        Rule("seed", TypeError, "an int or a tensor of one int64", _seed_kind, lambda x: irregular(x) or kind(x)),
        invalid(
            "seed",
            lambda x, s: f"one element on the device of query, {s.device}",
            lambda x, s: isinstance(x, Tensor) and (x.numel() != 1 or x.device != s.device),
            lambda x: f"shape {tuple(x.shape)} on {x.device}",
        ),
        invalid(
            "seed", "an int of 64 bits", lambda x, _: not isinstance(x, Tensor) and not -(2**63) <= x < 2**63, value
        ),
    ),
}
DEFAULTS = Arguments._field_defaults


def check_flags(**flags: Any) -> None:
    """Raise for a flag, such as return_lse, that is not a bool."""
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            fail(TypeError, name, "a bool", type_name(flag))


def check_tensors(**tensors: Any) -> None:
    """Raise for what is no tensor, among what is no field of Arguments."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            fail(TypeError, name, "a tensor", type_name(tensor))


def check_strided(**tensors: Any) -> None:
    """`check_tensors`, also for a tensor without strides."""
    check_tensors(**tensors)
    for name, tensor in tensors.items():
        if (got := irregular(tensor)) is not None:
            fail(TypeError, name, "a strided tensor", got)


def _scale(scale: Tensor) -> Any:
    """Return the number in a tensor of rank 0, and any other tensor unchanged."""
    if irregular(scale) is not None or scale.dim() or scale.dtype == torch.bool or scale.is_complex():
        return scale
    if scale.requires_grad or differentiated((scale,)):
        expected = "a number or a tensor without gradient (for a learned scale pass scale=1.0 and multiply query by it)"
        fail(TypeError, "scale", expected, "a tensor that requires grad")
    if scale.is_meta or (not is_compiling() and unmapped(scale) is not scale):
        fail(TypeError, "scale", "a number or a tensor that holds one number", "a meta tensor or one that vmap maps")
    return scale.item()


def check_options(arguments: Arguments, sizes: Sizes | None = None) -> Arguments:
    """Return the arguments with scale as a number. Raise for the first option that is wrong.

    Without sizes, as for a module, no option but scale may be a tensor.
    """
    if isinstance(arguments.scale, Tensor):
        arguments = arguments._replace(scale=_scale(arguments.scale))
    for name, default in DEFAULTS.items():
        if getattr(arguments, name) is not default:
            apply(OPTIONS[name], arguments, sizes)
    return arguments


def checked(arguments: Arguments, named: bool = False) -> Call:
    """The Call of arguments as the caller wrote them, autocast and plans included; named: whether a backend is.

    Raises: ValueError or TypeError, in one line, for the first thing that is wrong, before anything is computed.
    """
    arguments, block_mask = autocast(arguments), None
    if isinstance(arguments.mask, Plan):
        plan = arguments.mask
        for name in ("key_mask", "query_mask"):
            if getattr(arguments, name) is not None:
                fail(ValueError, name, "None beside a plan, which holds the masks that it was made of", "a mask")
        arguments = arguments._replace(mask=plan.mask, key_mask=plan.key_mask, query_mask=plan.query_mask)
        block_mask = plan.block_mask
    apply(TENSORS, arguments, arguments)
    query, rank, keys = arguments.query, arguments.query.dim(), arguments.key.shape[-2]
    batch, scores = query.shape[0] if rank > 2 else 1, (*query.shape[:-1], keys)
    sizes = Sizes(query.device, query.dtype, rank, batch, heads(query), query.shape[-2], keys, scores)
    arguments = check_options(arguments, sizes)
    return normalise(arguments, block_mask=block_mask, named=named)
