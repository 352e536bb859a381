"""The names registered with transformers, an attribute of configs for masks that models take, and what we refuse."""

from typing import Any, NamedTuple

NAMES: set[str] = set()  # that were registered
MASKS = "_fusedattn_masks"  # the attribute of a config that holds its Masks, if there are safe ones
# Keywords of some models. Leaving one out would change the answer.
REFUSED = {
    "indices": "sparse attention by indices",
    "block_indices": "sparse attention by blocks",
    "sinks": "a sink for each query",
    "head_mask": "a weight for each head",
}


class Masks(NamedTuple):
    """What all attention beneath a config takes: bool masks, and None for some. Copied with the config, not pickled."""

    name: str  # the object that the config has for a name: one that is written into it later is another object
    causal: bool  # None for a causal mask
    unhidden: bool  # None for a mask that hides nothing

    def __deepcopy__(self, memo: Any) -> "Masks":
        return self

    def __reduce__(self) -> Any:
        return type(None), ()


def masks_of(config: Any) -> Masks | None:
    """The Masks of a config whose name `give` wrote; None, for eager's masks, where somebody else wrote it."""
    masks = getattr(config, MASKS, None)
    return masks if isinstance(masks, Masks) and masks.name is config._attn_implementation else None
