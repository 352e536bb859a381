"""Attention of a rank's rows, Piece by Piece: each by a backend, and one softmax over all of them."""

from collections.abc import Callable, Collection, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from ..call.layout import arrange
from ..call.options import (
    BY_HEAD,
    DIMS,
    INPUTS,
    TENSORS,
    Call,
    inputs as inputs_of,
    sliced,
    tensors as tensors_of,
    wide_dtype,
    with_tensors,
)
from ..naive.formula import without_autocast
from ..operators import partial
from . import ranks as ranks_of
from .global_call import GlobalCall, Piece, in_dtypes_of


class Keys(Protocol):
    """The keys and values of all ranks, as a method brings them to this one."""

    def __iter__(self) -> Iterator[tuple[int, Call, list[Piece]]]:
        """Yield (owner, the call with the owner's keys and values, this rank's Pieces of it)."""

    def wanted(self, owner: int) -> Collection[str]:
        """Return "key" and "value" if the gradients of the owner's are wanted."""

    def give_back(self, owner: int, key: Tensor | None, value: Tensor | None) -> None:
        """Take this rank's gradients of the owner's keys and values."""

    def gradients(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of own keys and values, from all ranks."""


def part_of(call: Call, piece: Piece) -> Call:
    """Return the partial call of a Piece: views of the tensors of a call, without sinks."""
    tokens = dict(Q=piece.rows, K=piece.keys)
    pairs = dict(B=piece.batch, Q=piece.pair_rows or piece.rows, K=piece.pair_keys or piece.keys)
    tensors: dict[str, Any] = {
        name: sliced(name, getattr(call, name), **(tokens if ("Q" in letters) != ("K" in letters) else pairs))
        for name, letters in DIMS.items()
        if letters
    }
    return call._replace(**tensors | dict(sinks=None), partial=True, **piece.fields)


Method = Callable[[GlobalCall], Keys]


def attend(whole: GlobalCall, bring: Method) -> tuple[Tensor, Tensor]:
    """Return (output, lse) of this rank's rows."""
    if whole.differentiated:
        return _Attend.apply(*tensors_of(whole.call), ranks_of.anchor(whole.call.query), whole, bring)
    out, rows = _forward(whole, bring)
    return out, rows.lse


@without_autocast
def _forward(whole: GlobalCall, bring: Method) -> tuple[Tensor, partial.RowStats]:
    """Return (the output in query's dtype, the Rows that the backward needs)."""
    call, rows = whole.call, None
    for _, shown, pieces in bring(whole):
        for piece in pieces:
            part = part_of(shown, piece)
            rows = partial.start(call, partial.unit(part, whole.backend)) if rows is None else rows
            out, stats = partial.forward(part, whole.backend)
            partial.add(rows, piece.rows, out, *stats.unbind(-1))
    rows = partial.start(call, 1.0) if rows is None else rows
    if call.sinks is not None:
        partial.add_sinks(rows, call.sinks)
    return arrange(rows.out, call.query), rows


def _zeros(call: Call, wanted: Collection[str]) -> Call:
    """Return totals of the wanted gradients, float32 (float64), in place of the tensors of a call."""
    totals: dict[str, Any] = {
        name: x.new_zeros(x.shape, dtype=wide_dtype(call)) if name in wanted and x is not None else None
        for name, x in zip(INPUTS, inputs_of(call), strict=True)
    }
    return with_tensors(call, [None] * len(TENSORS))._replace(**totals)


@without_autocast
def _backward(
    whole: GlobalCall,
    bring: Method,
    rows: partial.RowStats,
    out_grad: Tensor,
    lse_grad: Tensor | None,
) -> list[Tensor | None]:
    """Return the gradients of the INPUTS of a call, None where no rank wants them."""
    call, keys = whole.call, bring(whole)
    # Options by head are equal on all ranks, and so are their gradients.
    needed = {name for name in BY_HEAD if whole.wanted(name)} | whole.needs[whole.ranks.rank]
    if call.query_mask is not None:  # incoming gradients of hidden rows may be NaN
        hidden = ~call.query_mask[:, None]
        out_grad = out_grad.masked_fill(hidden[..., None], 0.0)
        lse_grad = None if lse_grad is None else lse_grad.masked_fill(hidden, 0.0)
    own = _zeros(call, needed - {"key", "value", "sinks"})
    for owner, shown, pieces in keys:
        travelling = _zeros(shown, keys.wanted(owner))
        totals = own._replace(key=travelling.key, value=travelling.value)
        wanted = [x is not None for x in inputs_of(totals)]
        for piece in pieces if any(wanted) else ():
            at = piece.rows
            incoming = out_grad[:, :, at], None if lse_grad is None else lse_grad[:, :, at]
            saved = rows.out[:, :, at], rows.stats[:, :, at]
            made = partial.backward(part_of(shown, piece), whole.backend, *incoming, *saved, wanted)
            for total, grad in zip(inputs_of(part_of(totals, piece)), made, strict=True):
                if total is not None and grad is not None:
                    total += grad
        keys.give_back(owner, totals.key, totals.value)
    grads = dict(zip(INPUTS, inputs_of(own), strict=True))
    grads["key"], grads["value"] = keys.gradients()
    if call.sinks is not None and "sinks" in needed:
        grads["sinks"] = partial.of_sinks(call, rows, out_grad, lse_grad)
    grads |= {name: ranks_of.sum_of(whole.ranks, x) for name in BY_HEAD if (x := grads[name]) is not None}
    return in_dtypes_of(inputs_of(call), list(grads.values()))


class _Attend(torch.autograd.Function):
    """`attend` and its derivative."""

    @staticmethod
    def forward(ctx, *arguments):
        *tensors, _, whole, bring = arguments
        out, rows = _forward(whole.with_tensors(tensors), bring)
        ctx.whole, ctx.bring, ctx.unit = whole.with_tensors(), bring, rows.unit
        ctx.save_for_backward(*tensors, *rows[:3])
        ctx.set_materialize_grads(False)
        return out, rows.lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, out_grad, lse_grad):
        *tensors, out, largest, log2_sum = ctx.saved_tensors
        rows = partial.RowStats(out, largest, log2_sum, ctx.unit)
        out_grad = tensors[0].new_zeros(()).expand(out.shape) if out_grad is None else out_grad
        grads = _backward(ctx.whole.with_tensors(tensors), ctx.bring, rows, out_grad, lse_grad)
        return *grads, *(None,) * (len(TENSORS) - len(INPUTS) + 3)
