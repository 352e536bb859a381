"""Checks masks that `plan` gets before there is a call: dtypes, ranks, and shapes that broadcast together."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .form import Plan, rank4, rows
from .rules import FLOATING, boolean, check_strided, fail, kind, unfit


def check_plan(plan: Plan) -> None:
    """Raise for masks that no call could take together; whether they fit a call, the call will see."""
    masks = {name: x for name, x in plan._asdict().items() if x is not None}
    if not masks:
        fail(ValueError, "mask", "a mask, a key_mask or a query_mask", "none of them")
    check_masks(masks, dict(mask=(2, 3, 4), key_mask=(1, 2), query_mask=(1, 2)))
    check_fit({name: pairs_of(name, rank4(x) if name == "mask" else rows(x)) for name, x in masks.items()})


def check_masks(masks: Mapping[str, Any], ranks: Mapping[str, tuple[int, ...]]) -> None:
    """Raise for masks, or a bias, of other dtypes or ranks, or on several devices."""
    first = next(iter(masks.values()))
    for name, mask in masks.items():
        floating = name == "bias"
        if not isinstance(mask, Tensor) or not (mask.dtype in FLOATING if floating else mask.dtype == torch.bool):
            fail(TypeError, name, *("a floating tensor", unfit(mask)) if floating else (boolean(mask), kind(mask)))
        check_strided(**{name: mask})
        if mask.dim() not in ranks[name]:
            least, most = ranks[name][0], ranks[name][-1]
            fail(ValueError, name, f"rank {least}" + (f" to {most}" if most > least else ""), tuple(mask.shape))
        if mask.device != first.device:
            fail(ValueError, name, f"the device of the other masks, {first.device}", mask.device)


def pairs_of(name: str, mask: Tensor) -> tuple[int, ...]:
    """The shape that a mask or bias of rank 4, a key_mask or a query_mask of rank 2, has among the pairs."""
    if name in ("mask", "bias"):
        return tuple(mask.shape)
    batch, length = mask.shape
    return (batch, 1, 1, length) if name == "key_mask" else (batch, 1, length, 1)


def check_fit(shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise for shapes of rank 4, by the names of what has them, that do not broadcast together."""
    whole: tuple[int, ...] = (1, 1, 1, 1)
    for name, shape in shapes.items():
        if any(1 != size != other != 1 for size, other in zip(shape, whole, strict=True)):
            got = {"key_mask": shape[::3], "query_mask": shape[::2]}.get(name, shape)  # as it was given
            fail(ValueError, name, f"a shape that fits the other masks, {whole}", got)
        whole = tuple(other if size == 1 else size for size, other in zip(shape, whole, strict=True))
