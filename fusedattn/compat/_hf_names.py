"""Names that `fusedattn_forward` and `_hf` share; this module does not import transformers."""

from typing import Any

NAMES: set[str] = set()  # that were registered
MASKS = (
    "_fusedattn_masks"  # an attribute of configs: (None may be causal, None may hide nothing), if bool masks are safe
)
# Keywords of some models. Leaving one out would change the answer.
REFUSED = {
    "indices": "sparse attention by indices",
    "block_indices": "sparse attention by blocks",
    "sinks": "a sink for each query",
    "head_mask": "a weight for each head",
}


def masks_of(config: Any) -> tuple[bool, bool] | None:
    """Return what `None` may mean for a config whose attention takes bool masks; None if it gets eager's masks."""
    masks = getattr(config, MASKS, None)
    return masks if isinstance(masks, tuple) else None
