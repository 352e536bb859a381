"""Names that `fusedattn_forward` and `_hf` share; this module does not import transformers."""

from typing import Any

NAMES: dict[str, str] = {}  # {registered name: "dense" or "blocks"}
MASKS = "_fusedattn_masks"  # a config's attribute: the tuple of `masks_of`; a name while its model is built
# Keywords that some models pass. Ignoring one would change the result.
REFUSED = dict(indices="sparse attention by indices", block_indices="sparse attention by blocks")
REFUSED |= dict(sinks="a sink for each query", head_mask="a weight for each head")


def masks_of(config: Any) -> tuple[bool, bool, bool] | None:
    """Return (an absent mask may mean causal, it may mean unmasked, a mask may be a plan); None for eager's masks."""
    masks = getattr(config, MASKS, None)
    return masks if isinstance(masks, tuple) else None
