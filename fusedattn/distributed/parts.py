"""Attention of a rank's rows, Piece by Piece: each by a backend, and one softmax over all of them."""

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from ..call.layout import arrange
from ..call.options import INPUTS, TENSORS, Call, inputs as inputs_of, tensors as tensors_of, wide_dtype, with_tensors
from ..naive.formula import without_autocast
from ..operators import partial
from . import ranks as ranks_of
from .global_call import GlobalCall, Piece, in_dtypes_of


class Keys(Protocol):
    """The keys and values of all ranks, as a method brings them to this one."""

    def __iter__(self) -> Iterator[tuple[int, Call, list[Piece]]]:
        """Yield (owner, the call with the owner's keys and values, this rank's Pieces of it)."""

    def wanted(self, owner: int) -> tuple[bool, bool]:
        """Return whether the gradients of the owner's keys and values are wanted."""

    def give_back(self, owner: int, key: Tensor | None, value: Tensor | None) -> None:
        """Take this rank's gradients of the owner's keys and values."""

    def gradients(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of own keys and values, from all ranks."""


def part_of(call: Call, piece: Piece) -> Call:
    """Return the partial call of a Piece: views of the tensors of a call, any of which may be None."""
    every, rows, keys, batch = slice(None), piece.rows, piece.keys, piece.batch
    pairs = batch, every, piece.pair_rows or rows, piece.pair_keys or keys
    cuts: dict[str, Any] = dict(query=(every, every, rows), key=(every, every, keys), value=(every, every, keys))
    cuts |= dict(key_mask=(every, keys), query_mask=(every, rows))
    broadcast = dict(bias=pairs, mask=pairs, alibi_slopes=(batch,))  # where a dimension of 1 stays
    tensors: Any = dict(sinks=None)
    for name, slices in (cuts | broadcast).items():
        x = getattr(call, name)
        if x is not None and name in broadcast:
            slices = tuple(every if size == 1 else part for size, part in zip(x.shape, slices, strict=False))
        tensors[name] = None if x is None else x[slices]
    return call._replace(**tensors, partial=True, **piece.fields)


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


def _zeros(call: Call, wanted: list[bool]) -> Call:
    """Return totals of the wanted gradients, float32 (float64), in place of the tensors of a call."""
    totals: Any = [
        x.new_zeros(x.shape, dtype=wide_dtype(call)) if needed and x is not None else None
        for x, needed in zip(inputs_of(call), wanted, strict=True)
    ]
    bare: Any = with_tensors(call, [None] * len(TENSORS))
    return bare._replace(**dict(zip(INPUTS, totals, strict=True)))


@without_autocast
def _backward(
    whole: GlobalCall,
    bring: Method,
    rows: partial.RowStats,
    out_grad: Tensor,
    lse_grad: Tensor | None,
) -> list[Tensor | None]:
    """Return the gradients of the first fields of a call, None where nobody wants them."""
    call, need, keys = whole.call, whole.needs[whole.ranks.rank], bring(whole)
    if call.query_mask is not None:  # what comes to hidden rows may be NaN
        hidden = ~call.query_mask[:, None]
        out_grad = out_grad.masked_fill(hidden[..., None], 0.0)
        lse_grad = None if lse_grad is None else lse_grad.masked_fill(hidden, 0.0)
    own = _zeros(call, [need[0], False, False, need[3], whole.wanted(4), False])
    for owner, shown, pieces in keys:
        totals = _zeros(shown, [False, *keys.wanted(owner), False, False, False])
        totals = totals._replace(query=own.query, bias=own.bias, alibi_slopes=own.alibi_slopes)
        wanted = [x is not None for x in inputs_of(totals)]
        for piece in pieces if any(wanted) else ():
            here = piece.rows
            incoming = out_grad[:, :, here], None if lse_grad is None else lse_grad[:, :, here]
            saved = rows.out[:, :, here], rows.stats[:, :, here]
            grads = partial.backward(part_of(shown, piece), whole.backend, *incoming, *saved, wanted)
            for total, grad in zip(inputs_of(part_of(totals, piece)), grads, strict=True):
                if total is not None and grad is not None:
                    total += grad
        keys.give_back(owner, totals.key, totals.value)
    key, value = keys.gradients()
    sinks = None
    if call.sinks is not None and whole.wanted(5):
        sinks = partial.of_sinks(call, rows, out_grad, lse_grad)
    slopes, sinks = (None if x is None else ranks_of.sum_of(whole.ranks, x) for x in (own.alibi_slopes, sinks))
    return in_dtypes_of(inputs_of(call), (own.query, key, value, own.bias, slopes, sinks))


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
