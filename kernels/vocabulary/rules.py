"""What kernels over pairs of rows and keys know of a call, besides its tensors and lengths."""

from typing import NamedTuple

from . import dropout, masks, scores


class Rules(NamedTuple):
    """How pairs are masked, scored and dropped; dropout is None without dropout_p."""

    masks: masks.Masks
    score: scores.Score
    dropout: dropout.Dropout


class Spec(NamedTuple):
    """Numbers that a kernel is compiled for, one constexpr argument. A kernel reads those that it needs.

    GROUP query heads share a kv head; D and DV are the head dimensions of keys and values. BY_THREADS: keys are not
    copied. ROTARY_DIM, INTERLEAVED and PAGE, rows of a page, are those of caches; BLOCK_MASK_SIZE that of block masks.
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
    BLOCK_MASK_SIZE: "int | None" = None
