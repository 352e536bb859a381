"""flash_attn.bert_padding: from padded batches to packed sequences, and back."""

import torch
from torch import Tensor

from ..call.packing import longest


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Rows of input (n, ...), differentiable."""
    return input[indices]


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """(first_axis_dim, ...) with values (n, ...) in the rows indices (n,) and 0 elsewhere, differentiable."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_put((indices,), values)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The real rows of a padded batch hidden_states (B, S, ...), packed, and where they were.

    Args:
        attention_mask, unused_mask: bool or int (B, S), 1 where a row is real, and where one is kept though not real.
    Returns: (rows (T, ...), their indices (T,) in the B * S of the batch, cu_seqlens int32 (B + 1,), the longest
        length, the number of real rows of each, int32 (B,)). On a GPU the host waits for the counts.
    """
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    places = kept.flatten().nonzero().flatten()
    offsets = torch.nn.functional.pad(kept.sum(-1).cumsum(0, dtype=torch.int32), (1, 0))
    real = attention_mask.sum(-1, dtype=torch.int32)
    return index_first_axis(hidden_states.flatten(0, 1), places), places, offsets, longest(offsets, "max_seqlen"), real


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """(batch, seqlen, ...) of packed rows (T, ...) and their indices, 0 in the others."""
    padded: Tensor = index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))
    return padded
