"""Checks of the arguments of `attention`, shared with packed sequences, caches and direct calls of operators."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from . import checks, private
from .checks import broadcasts, check_bool, check_floating, check_number, check_place, divides, fail, is_size, value
from .options import DIMS, Arguments, Call, Plan, differentiated, in_full, seed_tensor, thread_overrides
from .private import holds

ORDER = ": tensors in the order (B, S, H, D) need .transpose(1, 2)"
UNBOUNDED = 2**31  # sides of a window are clamped to this, above any length: larger ones overflow in kernels
_WRITTEN = [name for name, letters in DIMS.items() if letters and name in Arguments._fields]


class Sizes(NamedTuple):
    """Device, dtype and rank of query, and the sizes of the scores (B, Hq, Sq, Sk)."""

    device: torch.device
    dtype: torch.dtype
    B: int
    Hq: int
    Sq: int
    Sk: int
    rank: int = 4


def check_query_key_value(
    query: Any, key: Any, value: Any, key_name: str = "key", value_name: str = "value", layout: str = ""
) -> None:
    """Raise if query, key and value do not match. layout: such as "(T, H, D)"; without it the rank is 2, 3 or 4."""
    # With a layout, heads are second, and the first dimension of key may differ from that of query.
    check_place("query", query)
    dtype, device, rank = query.dtype, query.device, query.dim()
    if dtype not in checks.FLOATING:
        fail(TypeError, "query", f"a tensor of {checks.FLOATS}", checks.unfit(query))
    if layout:
        checks.check_rank("query", query, layout)
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
    if not checks.is_shape(value_sizes[:-1], key_sizes[:-1]):
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
    checks.check_dtype(name, x, torch.int64, device)
    if not x.is_contiguous():
        fail(ValueError, name, "words of a plan in contiguous memory", f"strides {x.stride()}")


def check_heads(name: str, x: Any, device: torch.device, *shapes: tuple[int, ...]) -> None:
    check_floating(name, x, device)
    checks.check_shape(name, x, *shapes, why="one for each head of query")


def check_seed(seed: Any, device: torch.device) -> None:
    if isinstance(seed, Tensor):
        if seed.dtype != torch.int64 or checks.irregular(seed) is not None:
            fail(TypeError, "seed", "an int or a tensor of one int64", checks.irregular(seed) or seed.dtype)
        if seed.numel() != 1 or seed.device != device:
            got = f"shape {tuple(seed.shape)} on {seed.device}"
            fail(ValueError, "seed", f"one element, on the device of query, {device}", got)
    elif not checks.is_int(seed):
        fail(TypeError, "seed", "an int or a tensor of one int64", checks.type_name(seed))
    elif not -(2**63) <= seed < 2**63:
        fail(ValueError, "seed", "an int from -2**63 to 2**63 - 1", value(seed))


def _number_of(scale: Tensor) -> Any:
    """Return the number in a scale of rank 0, or any other tensor unchanged."""
    if checks.irregular(scale) is not None or scale.dim() or scale.dtype == torch.bool or scale.is_complex():
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
        if not pair or any(side is not None and not checks.is_int(side) for side in a.window):
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
    left, right = (None, None) if a.window is None else map(checks.as_python, a.window)
    fields: dict[str, Any] = {name: in_full(name, getattr(a, name)) for name in _WRITTEN}
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
