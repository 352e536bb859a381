"""Mask functions for `fusedattn.plan`. They take (batch, head, query, key) index tensors; True = may attend.

Positions count from the first query and the first key. A tensor with an entry for each batch needs a plan with batch=B,
one with an entry for each head a plan with heads=H. Otherwise all use the first entry. Your own functions work, too.
"""

import functools
from collections.abc import Callable

from torch import Tensor
from torch.compiler import is_compiling

from .call.checks import check_bool, check_place, check_sizes, fail

_MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def _at(x: Tensor, plane: Tensor, *index: Tensor) -> Tensor:
    """Return x[index], or x[plane, index] if x has one more dimension."""
    return x[index if x.dim() == len(index) else (plane, *index)]


def _check_table(name: str, x: Tensor, rank: int) -> None:
    check_place(name, x)
    if x.dim() not in (rank, rank + 1):
        fail(ValueError, name, f"rank {rank} or {rank + 1}", x.shape)


def _check_ints(least: int, **numbers: int) -> None:
    # A compiler traces a NumPy scalar as an array, whose value it does not know.
    known = {name: x for name, x in numbers.items() if isinstance(x, int) or not is_compiling()}
    check_sizes(least, **known)


def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """Hide the keys after a query's own position."""
    return j <= i


def sliding_window(left: int, right: int) -> _MaskFunction:
    """Show `left` keys before a query's own position, its own key, and `right` keys after it.

    With left=-1 only keys after the own position are visible, with right=-1 only keys before it.
    """
    _check_ints(-(2**63), left=left, right=right)
    return lambda b, h, i, j: (i - j <= left) & (j - i <= right)


def prefix(length: int | Tensor) -> _MaskFunction:
    """Show the first `length` keys. length: an int, or a tensor of rank 0 or (B,).

    A prefix language model is or_(causal, prefix(length)).
    """
    if isinstance(length, Tensor):
        _check_table("length", length, 0)
    else:
        _check_ints(0, length=length)
    return lambda b, h, i, j: j < (length[b] if isinstance(length, Tensor) and length.dim() else length)


def documents(ids: Tensor) -> _MaskFunction:
    """Show the keys of a query's own document. ids: the document of each position, (S,) or (B, S)."""
    _check_table("ids", ids, 1)
    return lambda b, h, i, j: _at(ids, b, i) == _at(ids, b, j)


def spans(ids: Tensor) -> _MaskFunction:
    """Show the keys of a query's own span, such as an image inside text. ids: (S,) or (B, S), below 0 outside of spans.

    For bidirectional images in causal text use or_(causal, spans(ids)).
    """
    _check_table("ids", ids, 1)
    return lambda b, h, i, j: (_at(ids, b, i) == _at(ids, b, j)) & (_at(ids, b, i) >= 0)


def dilated(step: int) -> _MaskFunction:
    """Show every `step`-th key, counted from a query's own position."""
    _check_ints(1, step=step)
    return lambda b, h, i, j: (i - j) % step == 0


def block_sparse(table: Tensor, size: int) -> _MaskFunction:
    """Show blocks of size x size pairs. table: bool (row blocks, key blocks) or (H, row blocks, key blocks)."""
    check_bool("table", table, None)
    _check_table("table", table, 2)
    _check_ints(1, size=size)
    return lambda b, h, i, j: _at(table, h, i // size, j // size)


def and_(mask: _MaskFunction, *others: _MaskFunction) -> _MaskFunction:
    """Show the pairs that all masks show."""
    return lambda *at: functools.reduce(Tensor.logical_and, [each(*at) for each in (mask, *others)])


def or_(mask: _MaskFunction, *others: _MaskFunction) -> _MaskFunction:
    """Show the pairs that any of the masks shows."""
    return lambda *at: functools.reduce(Tensor.logical_or, [each(*at) for each in (mask, *others)])


def not_(mask: _MaskFunction) -> _MaskFunction:
    """Show the pairs that a mask hides."""
    return lambda b, h, i, j: ~mask(b, h, i, j)
