"""Attention of a rank's rows, computed one Piece (some rows, some keys) at a time, and merged."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ..call.layout import arrange
from ..call.options import BY_HEAD, INPUTS, WITH_DIM, Call, sliced, wide_dtype
from ..naive.formula import without_autocast
from ..operators import partial
from . import ranks as ranks_of
from .global_call import GlobalCall, Method, Piece

# compute(owner, call, pieces) attends to the keys of `call`, which are those of the rank `owner` (None: of all ranks).
# It returns the gradients {"key": ..., "value": ...} that this rank's rows contribute; in a forward {}.
Compute = Callable[[int | None, Call, list[Piece]], dict[str, Tensor]]


def in_pieces(bring: Callable[[GlobalCall, Compute], dict[str, Tensor]]) -> Method:
    """Return a Method in which rows stay on their rank, and `bring` brings keys and values to each rank."""
    # bring(whole, compute) calls `compute` for all keys, and returns the gradients of this rank's keys and values.
    return Method(lambda whole: _forward(whole, bring), lambda whole, *grads: _backward(whole, *grads, bring))


def _sliced(name: str, x: Tensor | None, piece: Piece) -> Any:
    """Slice x, the Call's field `name` or its gradient, to the rows and keys of a Piece."""
    pairs = dict(Q=piece.pair_rows or piece.rows, K=piece.pair_keys or piece.keys)
    return sliced(name, x, pairs, B=piece.batch, Q=piece.rows, K=piece.keys)


def _part_of(call: Call, piece: Piece) -> Call:
    tensors = {name: _sliced(name, getattr(call, name), piece) for name in WITH_DIM["B"]}
    return call._replace(**tensors | dict(sinks=None, partial=True) | piece.fields)


@without_autocast
def _forward(whole: GlobalCall, bring: Any) -> tuple[list[Tensor | None], GlobalCall, partial.RowStats]:
    call, rows = whole.call, None

    def compute(_: int | None, shown: Call, pieces: list[Piece]) -> dict[str, Tensor]:
        nonlocal rows
        for piece in pieces:
            part = _part_of(shown, piece)
            rows = rows or partial.start(call, partial.unit(part, whole.backend))
            out, stats = partial.forward(part, whole.backend)
            partial.add(rows, piece.rows, out, stats)
        return {}

    bring(whole, compute)
    rows = rows or partial.start(call, 1.0)
    if call.sinks is not None:
        partial.add_sinks(rows, call.sinks)
    return [arrange(rows.out, call.query), rows.lse if whole.need_lse else None, None], whole, rows


def _zeros(call: Call, names: set[str]) -> dict[str, Any]:
    """Return a zero gradient for each named tensor that a call has, in float32 (float64 for float64 inputs)."""
    # Ranks send gradients in the order of INPUTS, because the order of a set of strings differs between processes.
    tensors, dtype = {name: getattr(call, name) for name in INPUTS if name in names}, wide_dtype(call.query.dtype)
    return {name: x.new_zeros(x.shape, dtype=dtype) for name, x in tensors.items() if x is not None}


@without_autocast
def _backward(whole: GlobalCall, saved: Any, incoming: Sequence[Any], bring: Any) -> dict[str, Tensor | None]:
    rows, (out_grad, lse_grad, _) = partial.RowStats(*saved), incoming
    call, of_all = whole.call, whole.wanted()
    if call.query_mask is not None:  # incoming gradients of hidden rows may be NaN
        hidden = ~call.query_mask[:, None]
        out_grad = out_grad.masked_fill(hidden[..., None], 0.0)
        lse_grad = None if lse_grad is None else lse_grad.masked_fill(hidden, 0.0)
    own = _zeros(call, whole.wanted(whole.ranks.rank) & {"query", "bias"} | of_all & {*BY_HEAD} - {"sinks"})

    def compute(owner: int | None, shown: Call, pieces: list[Piece]) -> dict[str, Tensor]:
        of_keys = _zeros(shown, whole.wanted(owner) & {"key", "value"})
        totals = own | of_keys
        need = [name in totals for name in INPUTS]
        for piece in pieces if totals else ():
            here = piece.rows
            given = out_grad[:, :, here], None if lse_grad is None else lse_grad[:, :, here]
            saved_rows = rows.out[:, :, here], rows.stats[:, :, here]
            found = partial.backward(_part_of(shown, piece), whole.backend, *given, *saved_rows, need)
            for name, grad in zip(INPUTS, found, strict=True):
                if grad is not None:
                    _sliced(name, totals[name], piece).add_(grad)
        return of_keys

    grads: dict[str, Tensor | None] = own | bring(whole, compute)
    if call.sinks is not None and "sinks" in of_all:
        grads["sinks"] = partial.of_sinks(call, rows, out_grad, lse_grad)
    for name in BY_HEAD:
        if (grad := grads.get(name)) is not None:  # all ranks have the same tensor: sum its gradients over ranks
            grads[name] = ranks_of.sum_of(whole.ranks, grad)
    return grads
