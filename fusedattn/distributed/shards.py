"""Cuts a sequence over the ranks of a group, and puts it together again."""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.types import Device

from ..call.numbers import is_int
from ..call.overrides import overridable
from ..call.rules import check_strided, fail, type_name
from . import ranks as ranks_of
from .ranks import Ranks


class Chunk(NamedTuple):
    """Rows first .. last - 1 of a sequence, which a rank has from row `at` of its shard on."""

    first: int
    last: int
    at: int

    @property
    def here(self) -> slice:
        """Where they are in the shard."""
        return slice(self.at, self.at + self.last - self.first)


def check_balance(balance: Any) -> None:
    if balance is not None and not (isinstance(balance, str) and balance == "zigzag"):
        fail(ValueError, "balance", "None or 'zigzag'", repr(balance))


def _spans(length: int, count: int) -> list[tuple[int, int]]:
    """`count` spans of a length; the first of them are longer by one, if it is not divisible."""
    size, more = divmod(length, count)
    starts = [n * size + min(n, more) for n in range(count + 1)]
    return list(zip(starts, starts[1:], strict=False))


def chunks(length: int, size: int, balance: str | None) -> list[list[Chunk]]:
    """The Chunks of each of `size` ranks."""
    if balance is None:
        return [[Chunk(first, last, 0)] for first, last in _spans(length, size)]
    spans = _spans(length, 2 * size)
    pairs = [(spans[rank], spans[2 * size - 1 - rank]) for rank in range(size)]
    return [[Chunk(*early, 0), Chunk(*late, early[1] - early[0])] for early, late in pairs]


def rows_of(some: list[Chunk]) -> int:
    """How many rows Chunks have together."""
    return sum(chunk.last - chunk.first for chunk in some)


def _own(length: int, ranks: Ranks | None, balance: str | None) -> list[Chunk]:
    return [Chunk(0, length, 0)] if ranks is None else chunks(length, ranks.size, balance)[ranks.rank]


@overridable
def shard(x: Tensor, dim: int, *, group: Any = None, balance: str | None = None) -> Tensor:
    """The rows of a tensor that this rank has, of one that is whole on every rank; nothing is sent.

    Examples:
        >>> x = torch.arange(8)[None]
        >>> fusedattn.distributed.shard(x, 1).shape  # without a process group all of it
        torch.Size([1, 8])

    Args:
        x: any strided tensor.
        dim: along which it is cut.
        group: a process group or a DeviceMesh of one dimension; None is the default group, or, where there is none,
            this process alone.
        balance: None gives rank r of n the r-th of n spans. "zigzag" gives it spans r and 2 * n - 1 - r of 2 * n, one
            behind the other, so that causal attention is as much work for each. The first spans have one row more,
            where the length is not divisible.

    Raises:
        TypeError, ValueError: for wrong arguments.
    """
    check_strided(x=x)
    dim = _checked_dim(x, dim)
    check_balance(balance)
    own = _own(x.shape[dim], ranks_of.of(group), balance)
    pieces = [x.narrow(dim, chunk.first, chunk.last - chunk.first) for chunk in own]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def positions(length: int, *, group: Any = None, balance: str | None = None, device: Device = None) -> Tensor:
    """Which rows of a sequence of so many this rank has, int64: what rotary embeddings and labels are taken by.

    Examples:
        >>> fusedattn.distributed.positions(4)
        tensor([0, 1, 2, 3])

    Args:
        group, balance: as in `shard`.
        device: where the result is.

    Raises:
        TypeError, ValueError: for wrong arguments.
    """
    if not is_int(length):
        fail(TypeError, "length", "an int", type_name(length))
    if length < 0:
        fail(ValueError, "length", "0 or more", length)
    if length >= 2**63:
        fail(ValueError, "length", "less than 2**63", length)
    check_balance(balance)
    own = _own(length, ranks_of.of(group), balance)
    return torch.cat([torch.arange(chunk.first, chunk.last, device=device) for chunk in own])


def _checked_dim(x: Tensor, dim: Any) -> int:
    if not is_int(dim):
        fail(TypeError, "dim", "an int", type_name(dim))
    if not -x.dim() <= dim < x.dim():
        fail(ValueError, "dim", f"a dimension of x, which has {x.dim()}", dim)
    return dim % x.dim()


@overridable
def unshard(x: Tensor, dim: int, *, group: Any = None, balance: str | None = None) -> Tensor:
    """The whole tensor, on every rank, from what `shard` gave each.

    Examples:
        >>> x = torch.arange(8)[None]
        >>> fusedattn.distributed.unshard(fusedattn.distributed.shard(x, 1), 1).shape
        torch.Size([1, 8])

    Its gradient is the sum of those of all ranks, as if what is minimised were the sum of all their losses.

    Args:
        x: the rank's rows, of which there may be others on each rank; nothing else may differ.
        dim, group, balance: as in `shard`.

    Raises:
        TypeError, ValueError: on all ranks where one of them is wrong.
    """
    ranks = ranks_of.of(group)
    if ranks is None:
        check_strided(x=x)
        _checked_dim(x, dim)
        check_balance(balance)
        return x
    problem = None
    try:
        check_strided(x=x)
        dim = _checked_dim(x, dim)
        check_balance(balance)
    except (TypeError, ValueError) as error:
        problem = error
    options: dict[str, Any] = {}
    if problem is None:
        rest = (*x.shape[:dim], *x.shape[dim + 1 :])
        options = dict(dim=dim, balance=balance, shape=rest, dtype=x.dtype, device=x.device.type)
    own = dict(rows=x.shape[dim] if problem is None else 0, grad=int(problem is None and wants_grad(x)))
    table = ranks_of.agree(ranks, "unshard", options, own, problem)
    rows = [entry["rows"] for entry in table]
    every = chunks(sum(rows), ranks.size, balance)
    ranks_of.check_rows("x", rows, every)
    if any(entry["grad"] for entry in table):
        return _Unshard.apply(x, ranks_of.anchor(x), dim, ranks, every)
    return gathered(x, dim, ranks, every)


def wants_grad(*tensors: Any) -> bool:
    """Whether a gradient of one of some tensors (others are passed over) is wanted."""
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in tensors)


def gathered(x: Tensor, dim: int, ranks: Ranks, every: list[list[Chunk]]) -> Tensor:
    """The whole of what each rank has the Chunks of along a dimension."""
    most = max(map(rows_of, every))
    own = x.movedim(dim, 0).contiguous()
    shape = own.shape[1:]
    sent = own.new_zeros(most, *shape)
    sent[: own.shape[0]] = own
    received = own.new_empty(ranks.size, most, *shape)
    if sent.numel():
        dist.all_gather([ranks_of.as_bytes(x) for x in received], ranks_of.as_bytes(sent), group=ranks.group)
    whole = own.new_empty(sum(map(rows_of, every)), *shape)
    for block, some in zip(received, every, strict=True):
        for chunk in some:
            whole[chunk.first : chunk.last] = block[chunk.here]
    return whole.movedim(0, dim)


def scattered(x: Tensor, dim: int, ranks: Ranks, every: list[list[Chunk]]) -> Tensor:
    """The rows of this rank of the sum over ranks of a whole tensor of each: the derivative of `gathered`."""
    whole = x.movedim(dim, 0)
    sent = [torch.cat([whole[chunk.first : chunk.last] for chunk in some]) for some in every]
    rows, shape = rows_of(every[ranks.rank]), whole.shape[1:]
    parts = ranks_of.all_to_all(ranks, sent, [(rows, *shape)] * ranks.size)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total.movedim(0, dim)


class _Unshard(torch.autograd.Function):
    """`gathered`, and its derivative."""

    @staticmethod
    def forward(ctx, x, anchor, dim, ranks, every):
        ctx.rest = dim, ranks, every
        return gathered(x, dim, ranks, every)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return scattered(grad, *ctx.rest), None, None, None, None
