"""Attention of a rank's rows, Piece by Piece: each by a backend, and one softmax over all of them."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from ..api import attention
from ..call.layout import arrange
from ..call.options import BY_HEAD, DIMS, INPUTS, TENSORS, Call, sliced, tensors as tensors_of, wide_dtype, with_dims
from ..naive.formula import without_autocast
from ..operators import partial
from . import ranks as ranks_of
from .global_call import GlobalCall, Piece, Prepare, agreed, gradients_of, prepared


class Keys(Protocol):
    """The keys and values of all ranks, in the order in which a method brings them to this rank."""

    def __iter__(self) -> Iterator[tuple[int | None, Call, list[Piece]]]:
        """Yield (owner, the call with the owner's keys and values, its Pieces). Owner None is all ranks."""

    def give_back(self, owner: int | None, key: Tensor | None, value: Tensor | None) -> None:
        """Take this rank's gradients of the owner's keys and values."""

    def gradients(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of this rank's keys and values, summed over all ranks."""


Method = Callable[[GlobalCall], Keys]


def attend(function: str, given: dict[str, Any], method: Method, prepare: Prepare = prepared) -> Any:
    """Return the result of a public function from its arguments by name."""
    whole = agreed(function, given, prepare)
    if whole is None:
        return attend_locally(given)
    out, lse = attend_pieces(whole, method)
    return (out, lse) if given["return_lse"] else out


def attend_locally(given: dict[str, Any]) -> Any:
    """Return `fusedattn.attention`: the result of a process without a group."""
    return attention(**{name: x for name, x in given.items() if name not in ("group", "balance")})


def attend_pieces(whole: GlobalCall, method: Method) -> tuple[Tensor, Tensor]:
    """Return (output, lse) of this rank's rows."""
    if whole.wanted():
        return _Attend.apply(*tensors_of(whole.call), ranks_of.anchor(whole.query), whole, method)
    out, rows = _forward(whole, method)
    return out, rows.lse


def _sliced(name: str, x: Tensor | None, piece: Piece) -> Any:
    """Return a Piece's view of a field, or of a tensor of its shape."""
    rows, keys = piece.rows, piece.keys
    if DIMS[name] == "BHQK":
        rows, keys = piece.pair_rows or rows, piece.pair_keys or keys
    return sliced(name, x, B=piece.batch, Q=rows, K=keys)


def _part_of(call: Call, piece: Piece) -> Call:
    """Return the partial call of a Piece."""
    tensors = {name: _sliced(name, getattr(call, name), piece) for name in with_dims("B")}
    return call._replace(**tensors | dict(sinks=None, partial=True) | piece.fields)


@without_autocast
def _forward(whole: GlobalCall, method: Method) -> tuple[Tensor, partial.RowStats]:
    """Return (output in query's dtype, RowStats for the backward)."""
    call, rows = whole.call, None
    for _, shown, pieces in method(whole):
        for piece in pieces:
            part = _part_of(shown, piece)
            rows = partial.start(call, partial.unit(part, whole.backend)) if rows is None else rows
            out, stats = partial.forward(part, whole.backend)
            partial.add(rows, piece.rows, out, *stats.unbind(-1))
    rows = partial.start(call, 1.0) if rows is None else rows
    if call.sinks is not None:
        partial.add_sinks(rows, call.sinks)
    return arrange(rows.out, call.query), rows


def _zeros(call: Call, names: Iterable[str]) -> dict[str, Any]:
    """Return zeros of the shapes of a call's tensors, float32 (float64)."""
    tensors = {name: getattr(call, name) for name in names}
    return {name: x.new_zeros(x.shape, dtype=wide_dtype(call)) for name, x in tensors.items() if x is not None}


@without_autocast
def _backward(
    whole: GlobalCall, method: Method, rows: partial.RowStats, out_grad: Tensor, lse_grad: Tensor | None
) -> list[Tensor | None]:
    """Return a gradient for each of TENSORS."""
    call, of_all, keys = whole.call, whole.wanted(), method(whole)
    if call.query_mask is not None:  # incoming gradients of hidden rows may be NaN
        hidden = ~call.query_mask[:, None]
        out_grad = out_grad.masked_fill(hidden[..., None], 0.0)
        lse_grad = None if lse_grad is None else lse_grad.masked_fill(hidden, 0.0)
    own = _zeros(call, whole.wanted(whole.ranks.rank) & {"query", "bias"} | of_all & {*BY_HEAD} - {"sinks"})
    for owner, shown, pieces in keys:
        totals = own | _zeros(shown, whole.wanted(owner) & {"key", "value"})
        need = [name in totals for name in INPUTS]
        for piece in pieces if totals else ():
            here = piece.rows
            incoming = out_grad[:, :, here], None if lse_grad is None else lse_grad[:, :, here]
            saved = rows.out[:, :, here], rows.stats[:, :, here]
            found = partial.backward(_part_of(shown, piece), whole.backend, *incoming, *saved, need)
            for name, grad in zip(INPUTS, found, strict=True):
                if grad is not None:
                    _sliced(name, totals[name], piece).add_(grad)
        keys.give_back(owner, totals.get("key"), totals.get("value"))
    grads: dict[str, Tensor | None] = dict(own)
    grads["key"], grads["value"] = keys.gradients()
    if call.sinks is not None and "sinks" in of_all:
        grads["sinks"] = partial.of_sinks(call, rows, out_grad, lse_grad)
    for name in BY_HEAD:
        if (grad := grads.get(name)) is not None:  # of the same tensor on all ranks
            grads[name] = ranks_of.sum_of(whole.ranks, grad)
    return gradients_of(call, grads)


class _Attend(torch.autograd.Function):
    """`attend_pieces` and its derivative."""

    @staticmethod
    def forward(ctx, *arguments):
        *tensors, _, whole, method = arguments
        out, rows = _forward(whole.with_tensors(tensors), method)
        ctx.whole, ctx.method, ctx.unit = whole.with_tensors([None] * len(TENSORS)), method, rows.unit
        ctx.save_for_backward(*tensors, rows.out, rows.largest, rows.log2_sum)
        ctx.set_materialize_grads(False)
        return out, rows.lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, out_grad, lse_grad):
        *tensors, out, largest, log2_sum = ctx.saved_tensors
        rows = partial.RowStats(out, largest, log2_sum, ctx.unit)
        out_grad = out.new_zeros((), dtype=tensors[0].dtype).expand(out.shape) if out_grad is None else out_grad
        return *_backward(ctx.whole.with_tensors(tensors), ctx.method, rows, out_grad, lse_grad), None, None, None
