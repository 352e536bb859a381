"""The functions of flash_attn.bert_padding: pack padded batches, and unpack them."""

import torch
from torch import Tensor

from ..call.checks import FLOATING, check_place, check_shape, check_sizes, fail, overridable
from ..call.options import is_known
from ..call.padding import longest
from ._flash import check_range


@overridable
def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Return the rows of input (n, ...) at these indices, differentiable."""
    return input[indices]


@overridable
def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Return zeros (first_axis_dim, ...) with values[i] in row indices[i], differentiable."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_put((indices,), values)


@overridable
def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Pack the real rows of a padded batch hidden_states (B, S, ...).

    Args:
        attention_mask: bool, int or float (B, S), 1 for real rows.
        unused_mask: (B, S) like attention_mask, 1 for further rows to keep.

    Returns:
        (rows (T, ...), their indices (T,) in the B * S rows of the batch, cu_seqlens int32 (B + 1,), the longest
        length, the number of real rows of each sequence, int32 (B,)). On a GPU the host waits for T and the length.
    """
    check_place("hidden_states", hidden_states)
    if hidden_states.dim() < 2:
        fail(ValueError, "hidden_states", "shape (B, S, ...)", hidden_states.shape)
    masks = dict(attention_mask=attention_mask) | ({} if unused_mask is None else dict(unused_mask=unused_mask))
    for name, mask in masks.items():
        check_place(name, mask, hidden_states.device, "hidden_states")
        if mask.dtype not in (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, *FLOATING):
            fail(TypeError, name, "a tensor of bool, integers or floating numbers", mask.dtype)
        check_shape(name, mask, tuple(hidden_states.shape[:2]), why="as hidden_states has")
    packed = attention_mask if unused_mask is None else attention_mask + unused_mask
    indices = packed.flatten().nonzero().flatten()
    offsets = torch.nn.functional.pad(packed.sum(-1).cumsum(0, dtype=torch.int32), (1, 0))
    real = attention_mask.sum(-1, dtype=torch.int32)
    rows = index_first_axis(hidden_states.flatten(0, 1), indices)
    return rows, indices, offsets, longest(offsets, "max_seqlen"), real


@overridable
def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Pad packed rows (T, ...) to (batch, seqlen, ...): row i goes to flat index indices[i], others are 0."""
    check_place("hidden_states", hidden_states)
    check_place("indices", indices)
    check_sizes(0, batch=batch, seqlen=seqlen)
    if indices.dtype not in (torch.int32, torch.int64):
        fail(TypeError, "indices", "int32 or int64", indices.dtype)
    check_shape("indices", indices, tuple(hidden_states.shape[:1]), why="one for each row of hidden_states")
    check_place("indices", indices, hidden_states.device, "hidden_states")
    if is_known(indices):
        check_range("indices", indices, "numbers", batch * seqlen - 1)
    padded: Tensor = index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))
    return padded
