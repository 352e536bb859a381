"""What the backend "cpu" cannot take, and results in the form in which the operators return them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn.functional import pad

from ..call.form import DIFFERENTIABLE, Call, device_of, differentiated
from ..naive.formula import without_autocast
from ..private import flash_attention_for_cpu, flash_attention_for_cpu_backward, transforms_active
from . import flash
from .few import FEW

# A narrower query or key makes scores of long tails, for which the kernel's exponentials of float32 are too coarse.
NARROW = 16
# The kernel computes a score of its backward in another order than in its forward: of larger ones the weights would be
# wrong by more than 1e-5 of them, and infinite where the rounding of a score passes 88.
LARGEST_LSE = 128.0


def limits(call: Call) -> list[str]:
    """Why no call like this one can be taken, whatever is wanted of it."""
    lacks = []
    if flash_attention_for_cpu is None or flash_attention_for_cpu_backward is None:
        lacks.append("this version of PyTorch has not its kernel")
    if (device := device_of(call.query)).type != "cpu":
        lacks.append(f"the tensors are on {device.type}, not on a CPU")
    if call.seed is not None:
        lacks.append("it knows no dropout")
    if call.softcap is not None:
        lacks.append("it knows no softcap")
    return lacks


def _differentiated(tensors: Sequence[Any]) -> bool:
    """Whether a derivative may be wanted. Inside of torch.func requires_grad does not say so."""
    return differentiated(tensors) or (transforms_active() and any(x is not None for x in tensors))


def _is_too_coarse(call: Call) -> bool:
    """Whether the kernel's gradients of a call on a CPU are not right by the rule of `testing.tolerance`."""
    narrow = call.query.dtype == torch.float32 and call.query.shape[3] < NARROW
    # A graph would be of few keys, or of many, if it asked how many there are.
    return narrow and _differentiated(call[:DIFFERENTIABLE]) and (is_compiling() or call.key.shape[2] > FEW)


def reasons(call: Call, need_weights: bool) -> list[str]:
    """Why a call cannot be taken; empty if it can."""
    lacks = limits(call)
    if device_of(call.query).type == "cpu" and _is_too_coarse(call):
        asked = ", and a graph cannot ask how many there are" if is_compiling() else ""
        lacks.append(
            f"its gradients of float32 are not exact enough for a head_dim under {NARROW} and over {FEW} keys{asked}"
        )
    if _differentiated((call.bias, call.alibi_slopes)):
        lacks.append("it has no gradients of bias and alibi_slopes")
    if need_weights and _differentiated(call[:DIFFERENTIABLE]):
        lacks.append("it has no gradients of weights")
    return lacks


def stats_columns(dtype: torch.dtype, width: int) -> int:
    """How many float32 numbers (float64 of float64) a forward keeps a row: lse, and of 16-bit outputs better ones."""
    return 1 + {torch.float16: width, torch.bfloat16: -(-width // 2)}.get(dtype, 0)


def stats(result: flash.Result) -> Tensor:
    """What a backward takes of a forward besides its output: (B, Hq, Sq, columns of `stats_columns`)."""
    lse, dtype = result.lse[..., None], result.out.dtype
    if dtype.itemsize != 2:
        return lse.contiguous()
    kept = result.kept
    if dtype == torch.bfloat16:
        kept = pad(kept, (0, kept.shape[-1] % 2)).clone(memory_format=torch.contiguous_format).view(torch.float32)
    return torch.cat([lse, kept], -1)


def _kept(out: Tensor, stats: Tensor) -> Tensor:
    """What `stats` was made of."""
    if out.dtype.itemsize != 2:
        return out
    kept = stats[..., 1:]
    return kept.view(torch.bfloat16)[..., : out.shape[-1]] if out.dtype == torch.bfloat16 else kept


@without_autocast
def forward(call: Call, need_lse: bool, need_weights: bool, save: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(output, lse, weights, stats) of a call; what is not needed is empty."""
    result = flash.forward(call, save)
    out, lse = result.out, result.lse + result.less if result.less else result.lse
    columns = call.key.shape[2] if call.cu_seqlens_q is None else call.max_seqlen_k
    weights = flash.weights(call, columns or 0) if need_weights else out.new_empty(0)
    kept = stats(result) if save else lse.new_empty(0)
    lse = lse.contiguous() if need_lse else lse.new_empty(0)
    # No two results share memory.
    return out, lse, weights, kept.clone() if need_lse and save and out.dtype.itemsize != 2 else kept


def too_large(lse: Tensor) -> bool:
    """Whether scores, by their log-sum-exp, are too large for the kernel's backward: the formula's is right."""
    if not lse.numel() or lse.abs().amax().item() <= LARGEST_LSE:
        return False
    return bool(lse.masked_fill(lse.isinf(), 0.0).abs().gt(LARGEST_LSE).any())  # rows may see nothing


@without_autocast
def backward(call: Call, incoming: Sequence[Tensor | None], out: Tensor, stats: Tensor, need: Sequence[bool]) -> tuple:
    """Gradients of the first fields of a call, from those of output and lse; empty where they are not needed.

    Raises: NotImplementedError where it is asked for what `reasons` names.
    """
    grad_out, grad_lse, grad_weights = incoming
    if grad_weights is not None or need[3] or need[4]:
        raise NotImplementedError("backend: 'cpu' has no gradients of bias, alibi_slopes and weights")
    gradients = flash.backward(call, grad_out, grad_lse, out, _kept(out, stats), stats[..., 0])
    query, key, value, sinks = gradients
    made = query, key, value, None, None, sinks
    return tuple(grad if needed else out.new_empty(0) for grad, needed in zip(made, need, strict=True))
