"""flash_attn.bert_padding: from padded batches to packed sequences, and back."""

from typing import Any

import torch
from torch import Tensor

from ..call.numbers import is_int
from ..call.options import is_known
from ..call.overrides import overridable
from ..call.padding import longest
from ..call.rules import FLOATING, check_strided, fail
from ..layers.attention import check_sizes


@overridable
def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Return rows of input (n, ...), differentiable."""
    return input[indices]


@overridable
def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Return (first_axis_dim, ...) with values (n, ...) in rows indices (n,) and 0 elsewhere, differentiable."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_put((indices,), values)


# What masks of 0 and 1 may be of.
_ZERO_OR_ONE = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, *FLOATING)


@overridable
def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Pack the real rows of a padded batch hidden_states (B, S, ...).

    Args:
        attention_mask, unused_mask: bool or int (B, S), 1 where a row is real, and where one is kept though not real.
    Returns: (rows (T, ...), their indices (T,) in the B * S of the batch, cu_seqlens int32 (B + 1,), the longest
        length, the number of real rows of each, int32 (B,)). On a GPU the host waits for the counts.
    """
    check_strided(hidden_states=hidden_states)
    if hidden_states.dim() < 2:
        fail(ValueError, "hidden_states", "shape (B, S, ...)", tuple(hidden_states.shape))
    masks: dict[str, Any] = dict(attention_mask=attention_mask, unused_mask=unused_mask)
    for name, mask in masks.items():
        if mask is None and name == "unused_mask":
            continue
        check_strided(**{name: mask})
        if mask.dtype not in _ZERO_OR_ONE:
            fail(TypeError, name, "a tensor of bool or integers", mask.dtype)
        if mask.device != hidden_states.device:
            fail(ValueError, name, f"the device of hidden_states, {hidden_states.device}", mask.device)
        if mask.shape != hidden_states.shape[:2]:
            fail(ValueError, name, f"shape {tuple(hidden_states.shape[:2])}", tuple(mask.shape))
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    places = kept.flatten().nonzero().flatten()
    offsets = torch.nn.functional.pad(kept.sum(-1).cumsum(0, dtype=torch.int32), (1, 0))
    real = attention_mask.sum(-1, dtype=torch.int32)
    return index_first_axis(hidden_states.flatten(0, 1), places), places, offsets, longest(offsets, "max_seqlen"), real


@overridable
def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Return (batch, seqlen, ...) of packed rows (T, ...) and their indices, 0 in the other rows."""
    check_strided(hidden_states=hidden_states, indices=indices)
    check_sizes(**{name: x for name, x in dict(batch=batch, seqlen=seqlen).items() if not (is_int(x) and x == 0)})
    if indices.dtype not in (torch.int32, torch.int64):
        fail(TypeError, "indices", "int32 or int64", indices.dtype)
    if hidden_states.dim() < 1 or indices.shape != hidden_states.shape[:1]:
        fail(ValueError, "indices", f"shape (T,), of T rows as {tuple(hidden_states.shape)}", tuple(indices.shape))
    if indices.device != hidden_states.device:
        fail(ValueError, "indices", f"the device of hidden_states, {hidden_states.device}", indices.device)
    if is_known(indices) and len(outside := indices[(indices < 0) | (indices >= batch * seqlen)]):
        fail(ValueError, "indices", f"numbers from 0 to {batch * seqlen - 1}", int(outside[0]))
    padded: Tensor = index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))
    return padded
