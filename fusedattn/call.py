"""One call of attention: as the caller wrote it, and as every backend takes it."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

UNBOUNDED = 2**31  # a side of the window that no tensor is long enough for; larger ones would overflow


class Arguments(NamedTuple):
    """What the caller passed, unchecked, but for query, key and value under autocast: those are already cast."""

    query: Any
    key: Any
    value: Any
    mask: Any = None
    key_mask: Any = None
    query_mask: Any = None
    causal: Any = False
    window: Any = None
    align: Any = "bottom_right"
    scale: Any = None


class Call(NamedTuple):
    """The same call, checked and in one form.

    query (B, Hq, Sq, D), key (B, Hkv, Sk, D), value (B, Hkv, Sk, Dv). mask of rank 4 broadcasts to (B, Hq, Sq, Sk);
    key_mask is (1 or B, Sk), query_mask (1 or B, Sq). Row i sees keys shift + i - left .. shift + i + right; None is
    unbounded; shift is 0 if top_left, otherwise Sk - Sq.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    key_mask: Tensor | None
    query_mask: Tensor | None
    left: int | None
    right: int | None
    top_left: bool
    scale: float


def autocasting(tensor: Tensor) -> bool:
    """Whether autocast is enabled on the device of a tensor; some devices, such as meta, do not know it."""
    kind = tensor.device.type
    # Both of these know it, and asking costs more than the answer.
    return (kind in ("cpu", "cuda") or torch.amp.is_autocast_available(kind)) and torch.is_autocast_enabled(kind)


def autocast(arguments: Arguments) -> Arguments:
    """query, key and value in autocast's dtype where it is enabled, as torch's SDPA has them; float64 stays."""
    query = arguments.query
    if not isinstance(query, Tensor) or not autocasting(query):
        return arguments
    dtype = torch.get_autocast_dtype(query.device.type)
    lower = (torch.float16, torch.bfloat16, torch.float32)
    cast = [
        x.to(dtype) if isinstance(x, Tensor) and x.dtype in lower else x
        for x in (query, arguments.key, arguments.value)
    ]
    return arguments._replace(query=cast[0], key=cast[1], value=cast[2])


def normalise(arguments: Arguments) -> Call:
    """The Call of arguments that have passed every check."""
    query, key, value, mask, key_mask, query_mask, causal, window, align, scale = arguments
    left, right = (None if side is None else min(side, UNBOUNDED) for side in window or (None, None))
    if causal:
        right = 0
    missing = 4 - query.dim()
    if missing == 1:
        query, key, value = query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)
        if mask is not None and mask.dim() == 3:
            mask = mask.unsqueeze(1)
    elif missing == 2:
        query, key, value = query[None, None], key[None, None], value[None, None]
    if mask is not None and mask.dim() == 2:
        mask = mask[None, None]
    if key_mask is not None and key_mask.dim() == 1:
        key_mask = key_mask[None]
    if query_mask is not None and query_mask.dim() == 1:
        query_mask = query_mask[None]
    # Where nothing is bounded, alignment means nothing: one kernel for both.
    top_left = align == "top_left" and (left is not None or right is not None)
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    return Call(query, key, value, mask, key_mask, query_mask, left, right, top_left, scale)


def drop(tensor: Tensor, rank: int) -> Tensor:
    """A result of a Call without the dimensions that a query of `rank` did not have."""
    return tensor if rank == 4 else tensor[:, 0] if rank == 3 else tensor[0, 0]
