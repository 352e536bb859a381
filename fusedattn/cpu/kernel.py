"""PyTorch's fused forward kernel for CPUs, called a second time if it may have ignored a NaN."""

from torch import Tensor

from ..call.private import flash_attention_for_cpu

VECTOR = 16  # float32 numbers in the widest vector register


def attend(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, added: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Return (output, lse); lse is 0 for a row that sees nothing. added: tensor added to the scores, or None."""
    out, lse = flash_attention_for_cpu(query, key, value, 0.0, causal, attn_mask=added, scale=scale)
    if added is None and key.shape[2] < VECTOR and not lse.all():
        # It may have ignored a NaN: its lse is then 0. With an added tensor it checks every score.
        nothing = query.new_zeros((1, 1, 1, 1)).expand(*query.shape[:3], key.shape[2])
        out, lse = flash_attention_for_cpu(query, key, value, 0.0, causal, attn_mask=nothing, scale=scale)
    return out, lse
