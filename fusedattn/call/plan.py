"""Checks the masks of a plan: dtypes, ranks, and shapes that broadcast together."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from .options import Lengths, Plan, in_full
from .rules import check_bool, check_floating, fail


def check_plan(plan: Plan) -> None:
    masks = {name: x for name, x in plan._asdict().items() if x is not None}
    if not masks:
        fail(ValueError, "mask", "a mask, a key_mask or a query_mask", "none of them")
    check_masks(masks, dict(mask=(2, 3, 4), key_mask=(1, 2), query_mask=(1, 2)))
    check_fit({name: pairs_of(name, in_full(name, x)) for name, x in masks.items()})


def check_masks(masks: Mapping[str, Any], ranks: Mapping[str, tuple[int, ...]]) -> None:
    """Raise if a mask or bias has a wrong dtype or rank, or if their devices differ. ranks: {name: allowed ranks}."""
    device = None
    for name, mask in masks.items():
        (check_floating if name == "bias" else check_bool)(name, mask, device, "the other masks")
        device = mask.device
        if mask.dim() not in ranks[name]:
            allowed = " or ".join(map(str, ranks[name])).replace(" or ", ", ", len(ranks[name]) - 2)
            fail(ValueError, name, f"rank {allowed}", mask.shape)


def pairs_of(name: str, mask: Tensor, lengths: Lengths | None = None) -> tuple[Any, ...]:
    """Return the rank-4 shape of a mask or bias; for a token mask (rank 2) return (B, 1, 1, Sk) or (B, 1, Sq, 1).

    lengths: of packed sequences; a token mask is then (1, total), and stands for pairs of the maximum lengths.
    """
    if name in ("mask", "bias"):
        return tuple(mask.shape)
    sizes: Any = mask.shape
    if lengths is not None and lengths.cu_seqlens_q is not None:
        longest = lengths.max_seqlen_k if name == "key_mask" else lengths.max_seqlen_q
        sizes = lengths.cu_seqlens_q.shape[0] - 1, longest
    batch, length = sizes
    return (batch, 1, 1, length) if name == "key_mask" else (batch, 1, length, 1)


def check_fit(shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise if shapes of rank 4, {name: shape}, do not broadcast together."""
    whole: tuple[int, ...] = (1, 1, 1, 1)
    own = {"key_mask": (slice(0, 4, 3), "the (B, Sk)"), "query_mask": (slice(0, 4, 2), "the (B, Sq)")}
    for place, (name, shape) in enumerate(shapes.items()):
        if any(1 != size != other != 1 for size, other in zip(shape, whole, strict=True)):
            part, dimensions = own.get(name, (slice(4), "the (B, H, Sq, Sk)"))
            expected = f"a shape that broadcasts with {whole[part]}, {dimensions} of {' and '.join([*shapes][:place])}"
            fail(ValueError, name, expected, f"shape {shape[part]}")
        whole = tuple(other if size == 1 else size for size, other in zip(shape, whole, strict=True))
