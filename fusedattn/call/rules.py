"""Everything a caller can get wrong, a row each: the argument, what is wrong with it, what was expected and got."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from .form import Arguments, Call, Plan, autocast, normalise

LARGEST, LARGEST_SINGLE = torch.finfo(torch.float64).max, torch.finfo(torch.float32).max
BOOL = "a bool tensor, True = may attend (say .bool())"
FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Rule(NamedTuple):
    """A mistake in an Arguments, or the like. `expected` may name what FACTS holds; `got` says what was found."""

    argument: str
    error: type[Exception]
    wrong: Callable[[Any], bool]
    expected: str
    got: Callable[[Any], Any]


def is_tensor(name: str) -> Rule:
    return Rule(
        name,
        TypeError,
        lambda a: not isinstance(getattr(a, name), Tensor),
        "a tensor",
        lambda a: type(getattr(a, name)).__name__,
    )


def is_strided(name: str) -> Rule:
    return Rule(
        name,
        TypeError,
        lambda a: getattr(a, name).layout != torch.strided or getattr(a, name).is_nested,
        "a strided tensor",
        lambda a: "a nested tensor" if getattr(a, name).is_nested else getattr(a, name).layout,
    )


def is_bool(name: str) -> Rule:
    return Rule(
        name,
        TypeError,
        lambda a: not isinstance(getattr(a, name), Tensor) or getattr(a, name).dtype != torch.bool,
        BOOL,
        kind_of(name),
    )


def is_floating(name: str) -> Rule:
    return Rule(
        name,
        TypeError,
        lambda a: not isinstance(getattr(a, name), Tensor) or getattr(a, name).dtype not in FLOATING,
        "a floating tensor",
        kind_of(name),
    )


def has_rank(rank: int, name: str) -> Rule:
    return Rule(name, ValueError, lambda a: getattr(a, name).dim() != rank, f"rank {rank}", shape_of(name))


def _is_number(name: str) -> Rule:
    kinds = (int, float, torch.SymFloat, torch.SymInt)
    return Rule(
        name,
        TypeError,
        lambda a: not isinstance(getattr(a, name), kinds) or isinstance(getattr(a, name), bool),
        "a number",
        lambda a: type(getattr(a, name)).__name__,
    )


def _pairs(name: str) -> tuple[Rule, ...]:
    """What broadcasts to the scores: a mask or a bias."""
    rank, shape = "rank 2 or that of query, {rank}", "broadcastable to {scores}"
    if name == "mask":
        rank, shape = rank + "{tokens}", shape + "{tokens}"
    return (
        Rule(name, ValueError, lambda a: getattr(a, name).dim() not in (2, a.query.dim()), rank, shape_of(name)),
        Rule(name, ValueError, lambda a: not broadcasts(getattr(a, name), _scores(a)), shape, shape_of(name)),
    )


def _on_device(name: str) -> Rule:
    return Rule(
        name,
        ValueError,
        lambda a: getattr(a, name).device != a.query.device,
        "the device of query, {device}",
        lambda a: getattr(a, name).device,
    )


def place(name: str) -> tuple[Rule, ...]:
    """What holds for every tensor: how and where it is stored."""
    return (is_strided(name), _on_device(name))


def broadcasts(tensor: Tensor, shape: tuple[int, ...]) -> bool:
    sizes = zip(reversed(tensor.shape), reversed(shape), strict=False)
    return tensor.dim() <= len(shape) and all(size == 1 or size == whole for size, whole in sizes)


def _scores(a: Arguments) -> tuple[int, ...]:
    return (*a.query.shape[:-1], a.key.shape[-2])


def _tokens(name: str, length: str, size: Callable[[Arguments], int]) -> Rule:
    """A key_mask or query_mask: (S,), (1, S) or (B, S)."""

    def wrong(a: Arguments) -> bool:
        mask = getattr(a, name)
        return mask.dim() not in (1, 2) or mask.shape[-1] != size(a) or not broadcasts(mask, (_batch(a), size(a)))

    return Rule(name, ValueError, wrong, f"shape ({{B}}, {length}), (1, {length}) or ({length},)", shape_of(name))


def _of_tokens(a: Arguments) -> str:
    """What a mask that says nothing of pairs should have been passed as; nothing if it says something."""
    *_, rows, keys = _scores(a)
    lengths = {"key_mask": (keys, "of keys"), "query_mask": (rows, "of queries")}
    said = [
        f"one {kind} is passed as {name}"
        for name, (length, kind) in lengths.items()
        if tuple(a.mask.shape) in ((length,), (_batch(a), length))
    ]
    return f" ({', '.join(said)})" if said else ""


def shape_of(name: str) -> Callable[[Arguments], Any]:
    return lambda a: tuple(getattr(a, name).shape)


def kind_of(name: str) -> Callable[[Any], Any]:
    """The dtype of a tensor, or the type of what is none."""
    return lambda a: getattr(getattr(a, name), "dtype", type(getattr(a, name)).__name__)


def dtype_of(name: str) -> Callable[[Arguments], Any]:
    return lambda a: getattr(a, name).dtype


def _given(name: str) -> Callable[[Any], Any]:
    """What was passed, in one line: a tensor would take many."""
    return lambda a: "a tensor" if isinstance(getattr(a, name), Tensor) else repr(getattr(a, name))


def is_flag(name: str) -> Rule:
    return Rule(name, TypeError, lambda a: not isinstance(getattr(a, name), bool), "a bool", _given(name))


def _batch(a: Arguments) -> int:
    return a.query.shape[0] if a.query.dim() > 2 else 1


def _heads(a: Arguments) -> tuple[int, int]:
    return (a.query.shape[1], a.key.shape[1]) if a.query.dim() == 4 else (1, 1)


def divides(heads: int, kv_heads: int) -> bool:
    return heads == kv_heads or (kv_heads != 0 and heads % kv_heads == 0)


def _is_side(side: Any) -> bool:
    return side is None or (isinstance(side, int | torch.SymInt) and not isinstance(side, bool))


# In the order in which they are looked for: a rule may rely on those above it.
TENSORS = (
    is_tensor("query"),
    is_tensor("key"),
    is_tensor("value"),
    is_strided("query"),
    is_strided("key"),
    is_strided("value"),
    Rule("query", TypeError, lambda a: a.query.dtype not in FLOATING, "a floating dtype", dtype_of("query")),
    Rule("key", TypeError, lambda a: a.key.dtype != a.query.dtype, "the dtype of query, {dtype}", dtype_of("key")),
    Rule(
        "value", TypeError, lambda a: a.value.dtype != a.query.dtype, "the dtype of query, {dtype}", dtype_of("value")
    ),
    _on_device("key"),
    _on_device("value"),
    Rule("query", ValueError, lambda a: a.query.dim() not in (2, 3, 4), "rank 2, 3 or 4", shape_of("query")),
    Rule("key", ValueError, lambda a: a.key.dim() != a.query.dim(), "the rank of query, {rank}", shape_of("key")),
    Rule("value", ValueError, lambda a: a.value.dim() != a.query.dim(), "the rank of query, {rank}", shape_of("value")),
    Rule("query", ValueError, lambda a: a.query.shape[-1] == 0, "a head dimension of 1 or more", shape_of("query")),
    Rule("value", ValueError, lambda a: a.value.shape[-1] == 0, "a head dimension of 1 or more", shape_of("value")),
    Rule(
        "key",
        ValueError,
        lambda a: a.key.shape[-1] != a.query.shape[-1],
        "the head dimension of query, {D}",
        shape_of("key"),
    ),
    Rule(
        "key",
        ValueError,
        lambda a: a.query.dim() > 2 and a.key.shape[0] != a.query.shape[0],
        "the batch size of query, {B}",
        shape_of("key"),
    ),
    Rule(
        "value",
        ValueError,
        lambda a: a.value.shape[:-1] != a.key.shape[:-1],
        "all but the last dimension as in key, {key}",
        shape_of("value"),
    ),
    Rule(
        "key",
        ValueError,
        lambda a: not divides(*_heads(a)),
        "a number of heads that divides the {Hq} of query",
        lambda a: f"{_heads(a)[1]} heads",
    ),
)

OPTIONS = {
    "mask": (is_bool("mask"), *place("mask"), *_pairs("mask")),
    "bias": (is_floating("bias"), *place("bias"), *_pairs("bias")),
    "key_mask": (
        is_bool("key_mask"),
        *place("key_mask"),
        _tokens("key_mask", "{Sk}", lambda a: a.key.shape[-2]),
    ),
    "query_mask": (
        is_bool("query_mask"),
        *place("query_mask"),
        _tokens("query_mask", "{Sq}", lambda a: a.query.shape[-2]),
    ),
    "causal": (is_flag("causal"),),
    "window": (
        Rule(
            "window",
            TypeError,
            lambda a: not (isinstance(a.window, tuple | list) and len(a.window) == 2 and all(map(_is_side, a.window))),
            "(left, right), each an int or None",
            _given("window"),
        ),
        Rule(
            "window",
            ValueError,
            lambda a: any(side is not None and side < 0 for side in a.window),
            "no negative side; None is unbounded",
            _given("window"),
        ),
    ),
    "align": (
        Rule(
            "align",
            ValueError,
            lambda a: a.align not in ("bottom_right", "top_left"),
            "'bottom_right' or 'top_left'",
            _given("align"),
        ),
    ),
    "scale": (
        _is_number("scale"),
        # Not math.isfinite: the compiler cannot trace it on a number that varies.
        Rule("scale", ValueError, lambda a: not -LARGEST <= a.scale <= LARGEST, "a finite number", _given("scale")),
        Rule(
            "scale",
            ValueError,
            lambda a: isinstance(a.query, Tensor) and a.query.dtype != torch.float64 and abs(a.scale) > LARGEST_SINGLE,
            "a number that float32 can hold",
            _given("scale"),
        ),
    ),
    "softcap": (
        _is_number("softcap"),
        Rule(
            "softcap",
            ValueError,
            lambda a: not 0 < a.softcap <= LARGEST,
            "a finite number above 0",
            _given("softcap"),
        ),
        Rule(
            "softcap",
            ValueError,
            lambda a: isinstance(a.query, Tensor) and a.query.dtype != torch.float64 and a.softcap > LARGEST_SINGLE,
            "a number that float32 can hold",
            _given("softcap"),
        ),
    ),
    "alibi_slopes": (
        is_floating("alibi_slopes"),
        *place("alibi_slopes"),
        Rule(
            "alibi_slopes",
            ValueError,
            lambda a: tuple(a.alibi_slopes.shape) not in ((_heads(a)[0],), (_batch(a), _heads(a)[0])),
            "shape ({Hq},) or ({B}, {Hq})",
            shape_of("alibi_slopes"),
        ),
    ),
    "sinks": (
        is_floating("sinks"),
        *place("sinks"),
        Rule(
            "sinks", ValueError, lambda a: tuple(a.sinks.shape) != (_heads(a)[0],), "shape ({Hq},)", shape_of("sinks")
        ),
    ),
    "dropout_p": (
        _is_number("dropout_p"),
        Rule("dropout_p", ValueError, lambda a: not 0 <= a.dropout_p <= 1, "a number from 0 to 1", _given("dropout_p")),
    ),
    "seed": (
        Rule(
            "seed",
            TypeError,
            lambda a: (
                a.seed.dtype != torch.int64
                if isinstance(a.seed, Tensor)
                else not isinstance(a.seed, int | torch.SymInt) or isinstance(a.seed, bool)
            ),
            "an int or a tensor of one int64",
            lambda a: getattr(a.seed, "dtype", type(a.seed).__name__),
        ),
        Rule(
            "seed",
            ValueError,
            lambda a: isinstance(a.seed, Tensor) and (a.seed.numel() != 1 or a.seed.device != a.query.device),
            "one element on the device of query, {device}",
            lambda a: f"shape {tuple(a.seed.shape)} on {a.seed.device}",
        ),
        Rule(
            "seed",
            ValueError,
            lambda a: not isinstance(a.seed, Tensor) and not -(2**63) <= a.seed < 2**63,
            "an int of 64 bits",
            _given("seed"),
        ),
    ),
}
DEFAULTS = Arguments._field_defaults


# What `expected` may name.
FACTS: dict[str, Callable[[Arguments], Any]] = {
    "device": lambda a: a.query.device,
    "dtype": lambda a: a.query.dtype,
    "rank": lambda a: a.query.dim(),
    "B": lambda a: _batch(a),
    "Hq": lambda a: _heads(a)[0],
    "D": lambda a: a.query.shape[-1],
    "Sq": lambda a: a.query.shape[-2],
    "Sk": lambda a: a.key.shape[-2],
    "key": lambda a: tuple(a.key.shape),
    "scores": _scores,
    "tokens": _of_tokens,
}


def fail(error: type[Exception], argument: str, expected: Any, got: Any) -> NoReturn:
    """Raise in the one form that every error about an argument has."""
    raise error(f"{argument}: expected {expected}, got {got}")


def check_flags(**flags: Any) -> None:
    """`is_flag` for what is no field of Arguments."""
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            fail(TypeError, name, "a bool", type(flag).__name__)


def apply(rules: tuple[Rule, ...], arguments: Any, facts: Mapping[str, Callable[[Any], Any]] = FACTS) -> None:
    """Raise for the first rule that arguments break; facts are what it may name."""
    for rule in rules:
        if rule.wrong(arguments):
            named = {name: fact(arguments) for name, fact in facts.items() if f"{{{name}}}" in rule.expected}
            expected = rule.expected.format(**named)
            fail(rule.error, rule.argument, expected, rule.got(arguments))


def check(arguments: Arguments) -> None:
    """Raise ValueError or TypeError, in one line, for the first thing that is wrong, before anything is computed."""
    apply(TENSORS, arguments)
    for name, default in DEFAULTS.items():
        if getattr(arguments, name) is not default:
            apply(OPTIONS[name], arguments)


def check_options(**options: Any) -> None:
    """`check` for options alone, as a module gets them before there is a query."""
    arguments = Arguments(None, None, None, **options)
    for name, option in options.items():
        if option is not DEFAULTS[name]:
            apply(OPTIONS[name], arguments)


def checked(arguments: Arguments) -> Call:
    """The Call of arguments as the caller wrote them, autocast and plans included."""
    arguments, marks = autocast(arguments), None
    if isinstance(arguments.mask, Plan):
        plan = arguments.mask
        for name in ("key_mask", "query_mask"):
            if getattr(arguments, name) is not None:
                fail(ValueError, name, "None beside a plan, which holds the masks that it was made of", "a mask")
        arguments = arguments._replace(mask=plan.mask, key_mask=plan.key_mask, query_mask=plan.query_mask)
        marks = plan.marks
    check(arguments)
    return normalise(arguments, marks)
