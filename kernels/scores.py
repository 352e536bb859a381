"""What happens to a score between q @ k.T and the softmax."""

from typing import NamedTuple

import triton
import triton.language as tl


class Score(NamedTuple):
    """What turns products into scores; None is absent. `score` makes one.

    Products are multiplied by scale here, or by unit inside the softmax.
    """

    scale: tl.tensor
    unit: tl.tensor


def score(scale):
    """The Score of a call: the scale waits for the softmax where nothing else needs scaled scores.

    There it costs no instruction. It must be positive, for the softmax looks for the largest score before it scales,
    and leave room in float32 for a factor of a few, both ways.
    """
    return Score(None, scale) if 2.0**-100 < scale < 2.0**100 else Score(scale, None)


@triton.jit
def apply(score, x):
    """Scores of the products x."""
    # The float32 products are scaled, never q: rounding scale * q to 16 bits costs accuracy as scale grows.
    return x if score.scale is None else x * score.scale


@triton.jit
def grad(score, total):
    """Gradient of q or k, from the sum over tiles of (gradient of the scores) @ (k or q)."""
    return total * (score.unit if score.scale is None else score.scale)
