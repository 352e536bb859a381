"""Attention over keys that come in parts: a backend computes each, and the results are merged into one softmax.

Parts are partial Calls, with results in float32 (float64). A row keeps two numbers, as in the kernels: its largest
score and log2(sum of exp(score - largest)). One number, the log-sum-exp, would lose digits of the smaller one.
Source: Online normalizer calculation for softmax, arXiv:1805.02867, section 3.1.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..call.options import Call, wide_dtype
from ..cpu import flash, small_k
from ..cpu.run import is_narrow, lacks_gradients, too_large
from ..naive import partial
from ..naive.partial import LN2
from . import flops
from .attention import KERNELS, OPERATORS

INFINITE = float("inf")


def widened(call: Call) -> Call:
    dtype = wide_dtype(call)
    return call._replace(query=call.query.to(dtype), key=call.key.to(dtype), value=call.value.to(dtype))


def forward(call: Call, backend: str) -> tuple[Tensor, Tensor]:
    """Return (output, stats) of a partial call without sinks.

    stats (B, Hq, Sq, 2): the largest score divided by `unit`, and the log2 of the sum; -inf and inf for an empty row.
    """
    flops.offer(OPERATORS.forward)
    if backend in KERNELS:
        out, _, _, stats = OPERATORS.forward(*call, False, False, True, backend)
        return out, stats
    call = widened(call)
    if backend == "naive" or small_k.is_few(call) or is_narrow(call):
        return partial.forward(call)
    out, _, _, kept = OPERATORS.forward(*call, False, False, True, backend)
    less, offset = kept[..., 0], flash.offset(call)  # the lse minus the offset is near 0, so it is exact
    lse = less + offset
    if too_large(lse):
        return partial.forward(call)
    lost = ((offset - lse) + less) / LN2  # the rounding error of lse
    return out, torch.stack([lse, lost.masked_fill_(lse == -INFINITE, INFINITE)], -1)


def backward(
    call: Call, backend: str, grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, stats: Tensor, need: list[bool]
) -> list[Tensor | None]:
    """Return gradients of the INPUTS of a partial call, None if not needed.

    grad_out has the dtype of query. out and stats are those of all keys that the rows see, not of this part alone.
    """
    stats, grad_lse = stats.contiguous(), None if grad_lse is None else grad_lse.contiguous()
    if backend not in KERNELS:
        call = widened(call)
        largest, log2_sum = stats.unbind(-1)
        lse = torch.where(log2_sum == INFINITE, -INFINITE, (largest - flash.offset(call)) + log2_sum * LN2)
        by_kernel = backend != "naive" and not small_k.is_few(call) and not lacks_gradients(call, None, need)
        if not by_kernel or too_large(lse):
            return partial.backward(call, grad_out, grad_lse, out, stats, need)
        grad_out, stats = grad_out.to(call.query.dtype), lse[..., None]
    grads = OPERATORS.backward(grad_out, grad_lse, None, out, grad_out.new_empty(0), stats, *call, backend, need)
    return [grad if wanted else None for grad, wanted in zip(grads, need, strict=True)]


def unit(call: Call, backend: str) -> float:
    """Return the factor from the largest score in stats to the true one. Kernels leave scores unscaled if they can."""
    if backend not in KERNELS:
        return 1.0
    from ..launch import arguments

    scale = arguments.scored(call).softmax_scale
    return 1.0 if scale is None else scale


class RowStats(NamedTuple):
    """Output, and the two numbers of stats, of rows over the parts so far. An empty row has -inf and inf."""

    out: Tensor
    largest: Tensor
    log2_sum: Tensor
    unit: float

    @property
    def stats(self) -> Tensor:
        return torch.stack([self.largest, self.log2_sum], -1)

    @property
    def lse(self) -> Tensor:
        empty = self.log2_sum == INFINITE
        return torch.where(empty, -INFINITE, self.largest * self.unit + self.log2_sum * LN2)


def start(call: Call, unit: float) -> RowStats:
    """Return the RowStats of a call before its first part."""
    rows = call.query.shape[:3]
    out = call.query.new_zeros((*rows, call.value.shape[3]), dtype=wide_dtype(call))
    return RowStats(out, out.new_full(rows, -INFINITE), out.new_full(rows, INFINITE), unit)


def add(rows: RowStats, here: slice, out: Tensor | None, largest: Tensor, log2_sum: Tensor) -> None:
    """Add the results of a part to the rows `here`. Sinks are a part without values, whose out is None."""
    before = rows.largest[:, :, here], rows.log2_sum[:, :, here]
    most = torch.maximum(before[0], largest)
    pivot = most.masked_fill(most == -INFINITE, 0.0)
    old, new = (
        torch.exp2((a - pivot) * (rows.unit / LN2) + b.masked_fill(b == INFINITE, 0.0)).masked_fill(b == INFINITE, 0.0)
        for a, b in (before, (largest, log2_sum))
    )
    total = old + new
    share = 1 / total.masked_fill(total == 0, 1.0)
    place = rows.out[:, :, here]
    place *= (old * share)[..., None]
    if out is not None:
        place += out * (new * share)[..., None]
    before[0].copy_(most)
    before[1].copy_(total.log2().masked_fill(total == 0, INFINITE))


def add_sinks(rows: RowStats, sinks: Tensor) -> None:
    largest = (sinks.to(rows.largest.dtype) / rows.unit)[:, :, None].expand_as(rows.largest)
    add(rows, slice(None), None, largest, torch.zeros_like(largest).masked_fill_(largest == -INFINITE, INFINITE))


def of_sinks(call: Call, rows: RowStats, grad_out: Tensor, grad_lse: Tensor | None) -> Tensor:
    """Return the gradient of the sinks (1 or B, Hq) in float32 (float64)."""
    sinks = call.sinks
    assert sinks is not None
    exponent = (sinks.to(rows.largest.dtype)[:, :, None] / rows.unit - rows.largest) * (rows.unit / LN2) - rows.log2_sum
    weights = exponent.exp2().masked_fill(rows.log2_sum == INFINITE, 0.0)
    grad = (0.0 if grad_lse is None else grad_lse) - (grad_out.to(rows.out.dtype) * rows.out).sum(-1)
    if call.query_mask is not None:
        grad = grad.masked_fill(~call.query_mask[:, None], 0.0)
    return (weights * grad).sum(2).sum_to_size(sinks.shape)
