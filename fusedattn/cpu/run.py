"""The backend "cpu": the calls that it supports, and forward and backward as operators call them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..call.options import INPUTS, Call, thread_overrides
from ..call.private import flash_attention_for_cpu, flash_attention_for_cpu_backward
from ..naive.formula import run_naive, without_autocast
from . import flash, flash_backward
from .small_k import FEW, is_few
from .tiling import is_widened
from .value_mean import INFINITE

# Heads with fewer columns have scores with long tails, for which the kernel's exponentials are too inaccurate.
NARROW = 16
# The kernel's backward sums a score in another order than its forward. Above this lse, weights would have an error of
# more than 1e-5. They would overflow if the rounding error of a score exceeded 88.
LARGEST_LSE = 128.0
# In bfloat16 the kernel's exp(0) is 1 - 5e-5. That error exceeds the tolerance if every lse is below this limit, as in
# rows that see one key with a score near 0.
SMALL_LSE = 0.125

_DIFFERENTIATED = "query", "key", "value", "bias", "sinks"  # inputs whose gradients `backward` returns
# Options with the default None that the backend supports, or that `limits` checks separately. Others are refused.
_KNOWN = {"bias", "alibi_slopes", "sinks", "mask", "key_mask", "query_mask", "block_mask", "left", "right", "origin"}
_KNOWN |= {"seed", "mask_bits", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"}
_LACKS = tuple(name for name, default in Call._field_defaults.items() if default is None and name not in _KNOWN)


def limits(call: Call) -> list[str]:
    """Return the reasons why the CPU backend cannot take a call; [] if it can."""
    lacks = []
    if flash_attention_for_cpu is None or flash_attention_for_cpu_backward is None:
        lacks.append("this version of PyTorch does not have its kernel")
    if (device := thread_overrides.gpu or call.query.device).type != "cpu":
        lacks.append(f"the tensors are on {device.type}, not on a CPU")
    if call.seed is not None:
        lacks.append("it does not support dropout")
    return lacks + [f"it does not support {name}" for name in _LACKS if getattr(call, name) is not None]


def is_narrow(call: Call) -> bool:
    """Return whether D is so small, in float32 with many keys, that the kernel's gradients are too inaccurate."""
    return call.query.dtype == torch.float32 and call.query.shape[3] < NARROW and call.key.shape[2] > FEW


def lacks_gradients(call: Call, grad_weights: Tensor | None, need: Sequence[bool]) -> list[str]:
    """Return the reasons why the naive path must compute a call's gradients; [] if `backward` may compute them."""
    needed = [name for name, wanted in zip(INPUTS, need, strict=True) if wanted]
    lacks = [f"its kernel has no gradient of {name}" for name in needed if name not in _DIFFERENTIATED]
    in_parts, dtype = call.partial or call.cu_seqlens_q is not None, call.query.dtype
    if grad_weights is not None:
        # Saved 16-bit weights are too inaccurate. With sinks, the gradient also needs the weights of the sinks.
        supported = dtype.itemsize >= 4 and call.sinks is None and not in_parts
        return lacks if supported else [*lacks, "its kernel has no gradient of weights in such a call"]
    if "bias" in needed and (in_parts or not call.key_mask is call.query_mask is None):
        lacks.append("its kernel has no gradient of bias in such a call")
    if "sinks" in needed and dtype == torch.bfloat16 and not is_widened(dtype):
        lacks.append("its kernel rounds outputs to bfloat16, which is too inaccurate for gradients of sinks")
    if is_narrow(call):
        lacks.append(f"its kernel is too inaccurate for float32 heads narrower than {NARROW} with more than {FEW} keys")
    return lacks


def stats_columns(dtype: torch.dtype, width: int) -> int:
    """Return how many float32 numbers a row saves for the backward: lse, and for 16-bit dtypes `kept` of a Result."""
    return 1 + (width if dtype.itemsize == 2 else 0)


def _stats(result: flash.Result) -> Tensor:
    """Return the stats that a plain call saves: the lse, and `kept` if it differs from the output."""
    lse, same = result.lse[..., None], result.kept is result.out
    return lse if same or result.out.dtype.itemsize != 2 else torch.cat([lse, result.kept.to(lse.dtype)], -1)


def with_all_columns(stats: Tensor, out: Tensor) -> Tensor:
    """Return saved stats with `stats_columns` columns, as operators take them; `out` is added if only lse was saved."""
    only_lse = out.dtype.itemsize == 2 and stats.shape[-1] == 1
    return torch.cat([stats, out.detach().to(stats.dtype)], -1) if only_lse else stats


def _kept(out: Tensor, stats: Tensor) -> Tensor:
    if out.dtype.itemsize != 2 or stats.shape[-1] == 1:
        return out
    return stats[..., 1:] if is_widened(out.dtype) else stats[..., 1:].to(out.dtype)


@without_autocast
def forward(call: Call, need_lse: bool, need_weights: bool, save: bool) -> tuple[Any, ...]:
    """Return (output, lse, weights, stats), None for a result that is not needed."""
    result, lse = flash.forward(call, save), None
    out = result.out
    if need_lse:
        lse = (result.lse + result.less).contiguous()
        exact = out.dtype == torch.bfloat16 and call.cu_seqlens_q is None  # packed offsets may be wrong
        if exact and lse.masked_fill(lse == -INFINITE, 0.0).abs().lt(SMALL_LSE).all():
            lse = run_naive(call, True, False)[1].contiguous()
    weights = flash.weights(call) if need_weights else None
    return out, lse, weights, _stats(result) if save else None


def too_large(lse: Tensor) -> bool:
    """Return whether an lse is too large for the kernel's backward to be accurate."""
    if not lse.numel() or torch.linalg.vector_norm(lse, float("inf")).item() <= LARGEST_LSE:
        return False
    return bool(lse.masked_fill(lse.isinf(), 0.0).abs().gt(LARGEST_LSE).any())  # -inf: a row that sees nothing


@without_autocast
def backward(
    call: Call, incoming: Sequence[Tensor | None], out: Tensor, weights: Tensor, stats: Tensor, need: Sequence[bool]
) -> tuple | None:
    """Return the gradients of INPUTS, including unneeded ones, or None if the naive path must compute them."""
    grad_out, grad_lse, grad_weights = incoming
    if lacks_gradients(call, grad_weights, need):
        return None
    lse, of_sinks, need_bias = stats[..., 0], None, need[INPUTS.index("bias")]
    of_bias = torch.zeros_like(call.bias, dtype=lse.dtype) if call.bias is not None and need_bias else None
    grads: Sequence[Tensor]
    if grad_weights is not None:
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        grads = flash_backward.from_weights(call, weights, lse, grad_out, grad_lse, grad_weights, of_bias)
    # The formula reads no lse if it computes all weights at once.
    elif (call.partial or (is_few(call) and flash.at_once(call) is not None)) or not too_large(lse):
        grads, of_sinks = flash_backward.backward(call, grad_out, grad_lse, out, _kept(out, stats), lse, of_bias)
    else:
        return None
    return *grads, None if of_bias is None or call.bias is None else of_bias.to(call.bias.dtype), None, of_sinks
