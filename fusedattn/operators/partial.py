"""Attention over keys that come in parts: a backend computes each part, and the results are merged.

Parts are partial Calls, with results in float32, or float64 for float64 inputs. A row keeps two numbers, as in the
kernels: its largest score and log2(sum of exp(score - largest)). The log-sum-exp alone would lose digits of these.
Source: Online normalizer calculation for softmax, arXiv:1805.02867, section 3.1.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..call.options import Call, wide_dtype
from ..call.private import autograd_inside
from ..cpu import flash, small_k
from ..cpu.run import is_narrow, lacks_gradients, too_large
from ..naive import partial
from ..naive.pairs import prepared
from ..naive.partial import INFINITE, LN2
from . import flops
from .namespace import OPERATORS
from .schema import KERNELS


def forward(call: Call, backend: str) -> tuple[Tensor, Tensor]:
    """Return (output, stats) of a partial call without sinks."""
    # stats (B, Hq, Sq, 2): m / `unit`, and log2(sum of exp(score - m)), for an m near the row max. Empty: -inf and inf.
    flops.offer(OPERATORS.forward)
    if backend in KERNELS:
        out, _, _, stats = OPERATORS.forward(*call, False, False, True, backend)
        return out, stats
    narrow, call = is_narrow(call), prepared(call)  # 16-bit inputs do not need exact exponentials
    if backend == "naive" or narrow or small_k.is_few(call):
        return partial.forward(call)
    out, _, _, kept = OPERATORS.forward(*call, False, False, True, backend)
    less, offset = kept[..., 0], flash.offset(call)  # the lse minus the offset is near 0, so it is exact
    if too_large(less + offset):
        return partial.forward(call)
    largest = torch.full_like(less, offset).masked_fill_(less == -INFINITE, -INFINITE)
    return out, torch.stack([largest, (less / LN2).masked_fill_(less == -INFINITE, INFINITE)], -1)


def is_part(call: Call, has_weights: bool) -> bool:
    """Return whether a call's results may be merged with results over other keys, for which they need stats."""
    return call.partial and call.sinks is None and not has_weights


def naive_forward(call: Call, backend: str) -> tuple[Tensor, Tensor, None, Tensor]:
    """Return (output, lse, None, stats) by the naive path, with stats as kernels of `backend` return them."""
    rows = RowStats(*partial.forward(prepared(call)), 1.0)
    largest, log2_sum = rows.stats.unbind(-1)
    return rows.out, rows.lse, None, torch.stack([largest / unit(call, backend), log2_sum], -1)


def naive_backward(
    call: Call, backend: str, grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, stats: Tensor, need: list[bool]
) -> list[Tensor | None]:
    """Return gradients by the naive path, from stats of `naive_forward` or of kernels of `backend`."""
    largest, log2_sum = stats.unbind(-1)
    stats = torch.stack([largest * unit(call, backend), log2_sum], -1)
    with autograd_inside(call.query.device):
        return partial.backward(prepared(call), grad_out, grad_lse, out, stats, need)


def backward(
    call: Call, backend: str, grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, stats: Tensor, need: list[bool]
) -> list[Tensor | None]:
    """Return gradients of the INPUTS of a partial call, None if not needed."""
    # grad_out has the dtype of query. out and stats cover all keys that the rows see, not only this part.
    stats, grad_lse = stats.contiguous(), None if grad_lse is None else grad_lse.contiguous()
    if backend not in KERNELS:
        call = prepared(call)
        largest, log2_sum = stats.unbind(-1)
        lse = torch.where(log2_sum == INFINITE, -INFINITE, (largest - flash.offset(call)) + log2_sum * LN2)
        by_kernel = backend != "naive" and not small_k.is_few(call) and not lacks_gradients(call, None, need)
        if not by_kernel or too_large(lse):
            return partial.backward(call, grad_out, grad_lse, out, stats, need)
        grad_out, stats = grad_out.to(call.query.dtype), lse[..., None]
    grads = OPERATORS.backward(grad_out, grad_lse, None, out, grad_out.new_empty(0), stats, *call, backend, need)
    return [grad if wanted else None for grad, wanted in zip(grads, need, strict=True)]


def unit(call: Call, backend: str) -> float:
    """Return the factor that scales the row max in stats: the scale if kernels leave scores unscaled, otherwise 1."""
    if backend not in KERNELS:
        return 1.0
    from ..launch import arguments

    scale = arguments.scored(call).softmax_scale
    return 1.0 if scale is None else scale


class RowStats(NamedTuple):
    """Output, stats and `unit` of rows, over the parts of the keys that are merged so far."""

    out: Tensor
    stats: Tensor
    unit: float

    @property
    def lse(self) -> Tensor:
        largest, log2_sum = self.stats.unbind(-1)
        return torch.where(log2_sum == INFINITE, -INFINITE, largest * self.unit + log2_sum * LN2)


def start(call: Call, unit: float) -> RowStats:
    """Return the RowStats of a call before any part of the keys is merged."""
    out = call.query.new_zeros((*call.query.shape[:3], call.value.shape[3]), dtype=wide_dtype(call.query.dtype))
    return RowStats(out, torch.stack([out.new_full(out.shape[:3], x) for x in (-INFINITE, INFINITE)], -1), unit)


def add(rows: RowStats, here: slice, out: Tensor | None, stats: Tensor) -> None:
    """Merge the results of a part of the keys into the rows `here`. Sinks are a part without values (out is None)."""
    before, place = rows.stats[:, :, here], rows.out[:, :, here]
    largest, log2_sum = torch.stack([before, stats]).unbind(-1)
    most = largest.amax(0)
    lses = (largest - most.masked_fill(most == -INFINITE, 0.0)).double() * rows.unit + log2_sum.double() * LN2
    shares, total = flash.shares_of(lses.masked_fill(log2_sum == INFINITE, -INFINITE).unbind(0))
    old, new = shares[..., None].to(place.dtype)
    place *= old
    if out is not None:
        place += out * new
    before.copy_(torch.stack([most, (total / LN2).masked_fill(total == -INFINITE, INFINITE)], -1))


def add_sinks(rows: RowStats, sinks: Tensor) -> None:
    largest = (sinks.to(rows.out.dtype) / rows.unit)[:, :, None].expand(rows.out.shape[:3])
    log2_sum = torch.zeros_like(largest).masked_fill_(largest == -INFINITE, INFINITE)
    add(rows, slice(None), None, torch.stack([largest, log2_sum], -1))


def of_sinks(call: Call, rows: RowStats, grad_out: Tensor, grad_lse: Tensor | None) -> Tensor:
    """Return the gradient of the sinks (1 or B, Hq) in float32, or float64 for float64 inputs."""
    sinks, (largest, log2_sum) = call.sinks, rows.stats.unbind(-1)
    assert sinks is not None
    exponent = (sinks.to(largest.dtype)[:, :, None] / rows.unit - largest) * (rows.unit / LN2) - log2_sum
    weights = exponent.exp2().masked_fill(log2_sum == INFINITE, 0.0)
    grad = (0.0 if grad_lse is None else grad_lse) - (grad_out.to(rows.out.dtype) * rows.out).sum(-1)
    grad = grad if call.query_mask is None else grad.masked_fill(~call.query_mask[:, None], 0.0)
    return (weights * grad).sum(2).sum_to_size(sinks.shape)
