"""Checks of the masks of a plan (dtypes, ranks, and shapes that broadcast together), and their packing."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from . import bits
from .checks import check_bool, check_sizes, fail, is_int, type_name, value
from .layout import narrow
from .options import Plan, in_full
from .private import lookups


def make_plan(masks: Mapping[str, Any], sizes: Mapping[str, Any], device: torch.device, kernels: int | None) -> Plan:
    """Check masks, return their Plan. sizes: of a mask function. kernels: block size of kernels, None without them."""
    function, given = None, {name: x for name, x in masks.items() if x is not None}
    if not given:
        fail(ValueError, "mask", "a mask, a key_mask or a query_mask", "none of them")
    if callable(masks["mask"]) and not isinstance(masks["mask"], type):
        function = given.pop("mask")
        for name, size in sizes.items():
            if size is None:
                fail(TypeError, name, "an int, because mask is a function", size)
        sizes = dict(zip(sizes, check_sizes(0, **sizes), strict=True))
    else:
        for name, size in sizes.items():
            if size is not None and not (is_int(size) and size == 1):
                fail(ValueError, name, "no size, because mask is no function", value(size))
    for name, mask in given.items():
        check_bool(name, mask, device, "the plan or the other masks")
        if mask.dim() not in ((2, 3, 4) if name == "mask" else (1, 2)):
            fail(ValueError, name, "rank 2, 3 or 4" if name == "mask" else "rank 1 or 2", mask.shape)
    tensors: dict[str, Any] = {name: in_full(name, x) for name, x in given.items()}
    shapes = {name: pairs_of(name, x) for name, x in tensors.items()}
    shape = check_fit(shapes if function is None else dict(mask=tuple(sizes.values())) | shapes)
    key_mask, query_mask, size = tensors.get("key_mask"), tensors.get("query_mask"), kernels or bits.BLOCK
    block_mask = mask_bits = None
    if masks["mask"] is not None:
        whole = tuple(sizes.values()) if function is not None else tuple(narrow(tensors["mask"]).shape)
        # A mask of one row or one key broadcasts, so its blocks have equal rows or keys.
        wide = *whole[:2], *(size if n == 1 else n for n in whole[2:])
        if function is None:
            mask = narrow(tensors["mask"]).expand(wide)
            block_mask, mask_bits = bits.pack(lambda *where: mask[where], wide, size, device)
        else:
            pairs = functools.partial(_evaluate, function, whole, device)
            block_mask, mask_bits = bits.pack(pairs, wide, size, device)
    elif kernels is not None:
        block_mask = torch.full((1, 1, 1, 1), bits.FULL, dtype=torch.int32, device=device)
    block_mask = None if block_mask is None else bits.hide_tokens(block_mask, key_mask, query_mask, size)
    return Plan(block_mask, mask_bits, key_mask, query_mask, shape)


def _evaluate(function: Callable[..., Any], whole: tuple[int, ...], device: torch.device, *where: slice) -> Tensor:
    """Return function(batch, head, row, key) for each position in four slices of a mask of shape `whole`."""

    def shown(*place: Tensor) -> Tensor:
        seen = function(*place)
        if not isinstance(seen, Tensor) or seen.dtype != torch.bool or seen.dim() > 0:
            got = f"{seen.dtype} and shape {tuple(seen.shape)}" if isinstance(seen, Tensor) else type_name(seen)
            fail(TypeError, "mask", "a function that returns a 0-d bool tensor for four 0-d indices", got)
        if seen.device != device:
            fail(ValueError, "mask", f"a function that returns a tensor on {device}", seen.device)
        return seen

    index = [torch.arange(x.start, min(x.stop, n), device=device) for x, n in zip(where, whole, strict=True)]
    for own in (3, 2, 1, 0):
        shown = torch.vmap(shown, tuple(0 if axis == own else None for axis in range(4)))
    with lookups():
        try:
            seen = shown(*index)
        except IndexError as error:
            fail(ValueError, "mask", f"a function of all indices in a plan of {whole}", f"its IndexError: {error}")
    return seen.expand([x.stop - x.start for x in where])  # one row, or one key, stands for all


def pairs_of(name: str, mask: Tensor) -> tuple[Any, ...]:
    """Return the rank-4 shape of a mask or bias; for a token mask (rank 2) return (B, 1, 1, Sk) or (B, 1, Sq, 1)."""
    if name in ("mask", "bias"):
        return tuple(mask.shape)
    batch, length = mask.shape
    return (batch, 1, 1, length) if name == "key_mask" else (batch, 1, length, 1)


def check_fit(shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """Broadcast rank-4 shapes, {name: shape}, and return the result. Raise if they do not fit."""
    whole: tuple[int, ...] = (1, 1, 1, 1)
    own = {"key_mask": (slice(0, 4, 3), "the (B, Sk)"), "query_mask": (slice(0, 4, 2), "the (B, Sq)")}
    for place, (name, shape) in enumerate(shapes.items()):
        if any(1 != size != other != 1 for size, other in zip(shape, whole, strict=True)):
            part, dimensions = own.get(name, (slice(4), "the (B, H, Sq, Sk)"))
            expected = f"a shape that broadcasts with {whole[part]}, {dimensions} of {' and '.join([*shapes][:place])}"
            fail(ValueError, name, expected, f"shape {shape[part]}")
        whole = tuple(other if size == 1 else size for size, other in zip(shape, whole, strict=True))
    return whole
