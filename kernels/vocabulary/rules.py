"""Options of a call as kernels take them: Rules and the compile-time Spec."""

from typing import NamedTuple

from . import dropout, masks, scores


class Rules(NamedTuple):
    """Masks, options of scores, and dropout (or None) of a call."""

    masks: masks.Masks
    score: scores.Score
    dropout: dropout.Dropout


class Spec(NamedTuple):
    """Compile-time constants of a call, in one constexpr argument. Each kernel reads some of them.

    GROUP query heads share a kv head. D and DV are the head dimensions of keys and values. PRECISION is for tl.dot.
    BY_THREADS: threads may load single elements of k or v. ROTARY_DIM, INTERLEAVED and PAGE (its rows) are for caches.
    """

    GROUP: int
    D: int
    DV: int
    TOP_LEFT: bool
    PRECISION: str
    BY_THREADS: bool = False
    ROTARY_DIM: int = 0
    INTERLEAVED: bool = False
    PAGE: "int | None" = None
