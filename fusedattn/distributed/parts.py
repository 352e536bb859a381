"""Computes attention of a rank's rows, one Piece (some rows, some keys) at a time, and merges the results."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from ..call.layout import arrange
from ..call.options import BY_HEAD, INPUTS, WITH_DIM, Call, sliced, wide_dtype
from ..naive.formula import without_autocast
from ..operators import partial
from . import ranks as ranks_of
from .global_call import GlobalCall, Method, Piece

_Keys = Callable[[GlobalCall], Any]


def in_pieces(keys: _Keys) -> Method:
    """Return a Method in which rows stay on their rank, and `keys` brings keys and values to each rank."""
    # keys(whole) iterates over (owner, the call with the owner's keys and values, its Pieces); owner None is all ranks.
    # Its give_back() takes the gradients that this rank's rows contribute to the owner's keys and values. Its
    # gradients() returns those of this rank's keys and values, summed over all ranks.
    return Method(lambda whole: _forward(whole, keys), lambda whole, *grads: _backward(whole, *grads, keys))


def _sliced(name: str, x: Tensor | None, piece: Piece) -> Any:
    """Slice x, the Call's field `name` or its gradient, to the rows and keys of a Piece."""
    pairs = dict(Q=piece.pair_rows or piece.rows, K=piece.pair_keys or piece.keys)
    return sliced(name, x, pairs, B=piece.batch, Q=piece.rows, K=piece.keys)


def _part_of(call: Call, piece: Piece) -> Call:
    tensors = {name: _sliced(name, getattr(call, name), piece) for name in WITH_DIM["B"]}
    return call._replace(**tensors | dict(sinks=None, partial=True) | piece.fields)


@without_autocast
def _forward(whole: GlobalCall, keys: _Keys) -> tuple[list[Tensor | None], GlobalCall, partial.RowStats]:
    call, rows = whole.call, None
    for _, shown, pieces in keys(whole):
        for piece in pieces:
            part = _part_of(shown, piece)
            rows = rows or partial.start(call, partial.unit(part, whole.backend))
            out, stats = partial.forward(part, whole.backend)
            partial.add(rows, piece.rows, out, stats)
    rows = rows or partial.start(call, 1.0)
    if call.sinks is not None:
        partial.add_sinks(rows, call.sinks)
    return [arrange(rows.out, call.query), rows.lse if whole.need_lse else None, None], whole, rows


def _zeros(call: Call, names: Iterable[str]) -> dict[str, Any]:
    """Return a zero gradient for each named tensor that a call has, in float32 (float64 for float64 inputs)."""
    tensors, dtype = {name: getattr(call, name) for name in names}, wide_dtype(call.query.dtype)
    return {name: x.new_zeros(x.shape, dtype=dtype) for name, x in tensors.items() if x is not None}


@without_autocast
def _backward(
    whole: GlobalCall, saved: Sequence[Any], incoming: Sequence[Any], keys: _Keys
) -> dict[str, Tensor | None]:
    rows, (out_grad, lse_grad, _) = partial.RowStats(*saved), incoming
    call, of_all, of_ranks = whole.call, whole.wanted(), keys(whole)
    if call.query_mask is not None:  # incoming gradients of hidden rows may be NaN
        hidden = ~call.query_mask[:, None]
        out_grad = out_grad.masked_fill(hidden[..., None], 0.0)
        lse_grad = None if lse_grad is None else lse_grad.masked_fill(hidden, 0.0)
    own = _zeros(call, whole.wanted(whole.ranks.rank) & {"query", "bias"} | of_all & {*BY_HEAD} - {"sinks"})
    for owner, shown, pieces in of_ranks:
        totals = own | _zeros(shown, whole.wanted(owner) & {"key", "value"})
        need = [name in totals for name in INPUTS]
        for piece in pieces if totals else ():
            here = piece.rows
            given = out_grad[:, :, here], None if lse_grad is None else lse_grad[:, :, here]
            saved_rows = rows.out[:, :, here], rows.stats[:, :, here]
            found = partial.backward(_part_of(shown, piece), whole.backend, *given, *saved_rows, need)
            for name, grad in zip(INPUTS, found, strict=True):
                if grad is not None:
                    _sliced(name, totals[name], piece).add_(grad)
        of_ranks.give_back(owner, totals.get("key"), totals.get("value"))
    grads: dict[str, Tensor | None] = dict(own)
    grads["key"], grads["value"] = of_ranks.gradients()
    if call.sinks is not None and "sinks" in of_all:
        grads["sinks"] = partial.of_sinks(call, rows, out_grad, lse_grad)
    for name in BY_HEAD:
        if (grad := grads.get(name)) is not None:  # all ranks have the same tensor: sum its gradients over ranks
            grads[name] = ranks_of.sum_of(whole.ranks, grad)
    return grads
