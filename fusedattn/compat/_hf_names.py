"""The names that are registered with transformers, and the mark on a config whose models call us throughout."""

from typing import Any, NamedTuple

NAMES: set[str] = set()  # that were registered
MASKS = "_fusedattn_masks"  # the attribute of a config that holds its Masks, where it was found to be safe


class Masks(NamedTuple):
    """What all attention beneath a config takes: bool masks, and None for some. Copied with the config, not pickled."""

    name: str  # the very object that the config was given: a name that is written into it later is another one
    causal: bool  # None for a causal mask
    unhidden: bool  # None for a mask that hides nothing

    def __deepcopy__(self, memo: Any) -> "Masks":
        return self

    def __reduce__(self) -> Any:
        return type(None), ()


def masks_of(config: Any) -> Masks | None:
    """Those of a config whose name was written after all that gets its masks was read; None for eager's masks."""
    masks = getattr(config, MASKS, None)
    return masks if isinstance(masks, Masks) and masks.name is config._attn_implementation else None
