"""Shards of a sequence: split among the ranks of a group, and joined again."""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.types import Device

from ..call.checks import check_place, fail, is_int, overridable, type_name, value
from ..call.private import eager
from . import ranks as ranks_of
from .ranks import Ranks


class Chunk(NamedTuple):
    """Rows first .. last - 1 of a sequence, which begin at row `at` of a rank's shard."""

    first: int
    last: int
    at: int

    @property
    def length(self) -> int:
        return self.last - self.first

    @property
    def in_shard(self) -> slice:
        return slice(self.at, self.at + self.length)


def check_balance(balance: Any) -> None:
    if balance is not None and not (isinstance(balance, str) and balance == "zigzag"):
        fail(ValueError, "balance", "None or 'zigzag'", value(balance))


def chunks(length: int, size: int, balance: str | None) -> list[list[Chunk]]:
    """Split a sequence of this length among `size` ranks, and return the Chunks of each rank."""
    count = size if balance is None else 2 * size
    rows, more = divmod(length, count)
    spans = list(itertools.pairwise(n * rows + min(n, more) for n in range(count + 1)))
    if balance is None:
        return [[Chunk(*span, 0)] for span in spans]
    pairs = zip(spans[:size], reversed(spans[size:]), strict=True)
    return [[Chunk(*early, 0), Chunk(*late, early[1] - early[0])] for early, late in pairs]


def chunks_of(argument: str, lengths: Sequence[int], size: int, balance: str | None) -> list[list[Chunk]]:
    """Return the Chunks of each rank. Raise if lengths, the rows on each rank, are not what `shard` gives them."""
    every = chunks(sum(lengths), size, balance)
    for rank, (got, expected) in enumerate(zip(lengths, map(rows_of, every), strict=True)):
        if got != expected:
            fail(ValueError, argument, f"{expected} rows on rank {rank}, as `shard` cuts {sum(lengths)} rows", got)
    return every


def rows_of(some: list[Chunk]) -> int:
    return sum(chunk.length for chunk in some)


def _own(length: int, group: Any, balance: Any) -> list[Chunk]:
    check_balance(balance)
    ranks = ranks_of.of(group)
    return [Chunk(0, length, 0)] if ranks is None else chunks(length, ranks.size, balance)[ranks.rank]


@overridable
def shard(x: Tensor, dim: int, *, group: Any = None, balance: str | None = None) -> Tensor:
    """Return this rank's rows of a tensor that every rank has whole, without communication.

    Examples:
        >>> x = torch.arange(8)[None]
        >>> fusedattn.distributed.shard(x, 1).shape  # without a process group: all rows
        torch.Size([1, 8])

    Args:
        x: any strided tensor.
        dim: the dimension to cut.
        group: a process group or a DeviceMesh of one dimension; None is the default group. Without a default group,
            this process has all rows.
        balance: None gives rank r of n the r-th of n spans. "zigzag" gives it spans r and 2 * n - 1 - r of 2 * n,
            joined, so that all ranks have equal work in causal attention. If the length is not divisible, the first
            spans have one row more.

    Raises:
        TypeError, ValueError: for wrong arguments.
    """
    dim = _checked_dim(x, dim)
    pieces = [x.narrow(dim, chunk.first, chunk.length) for chunk in _own(x.shape[dim], group, balance)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def positions(length: int, *, group: Any = None, balance: str | None = None, device: Device = None) -> Tensor:
    """Return the positions of this rank's rows in the whole sequence, int64, for rotary embeddings and labels.

    Examples:
        >>> fusedattn.distributed.positions(4)
        tensor([0, 1, 2, 3])

    Args:
        group, balance: as in `shard`.
        device: the device of the result.

    Raises:
        TypeError, ValueError: for wrong arguments.
    """
    if not is_int(length):
        fail(TypeError, "length", "an int", type_name(length))
    if not 0 <= length < 2**63:
        fail(ValueError, "length", "a number from 0 to 2**63 - 1", length)
    return torch.cat([torch.arange(x.first, x.last, device=device) for x in _own(length, group, balance)])


def _checked_dim(x: Tensor, dim: Any) -> int:
    check_place("x", x)
    if not is_int(dim):
        fail(TypeError, "dim", "an int", type_name(dim))
    if not -x.dim() <= dim < x.dim():
        fail(ValueError, "dim", f"{-x.dim()} to {x.dim() - 1}, because x has {x.dim()} dimensions", dim)
    return dim % x.dim()


@overridable
@eager
def unshard(x: Tensor, dim: int, *, group: Any = None, balance: str | None = None) -> Tensor:
    """Gather the rows that `shard` gave to each rank, and return the whole tensor on every rank.

    Examples:
        >>> x = torch.arange(8)[None]
        >>> fusedattn.distributed.unshard(fusedattn.distributed.shard(x, 1), 1).shape
        torch.Size([1, 8])

    The gradient of x is summed over all ranks, as if the loss were the sum of the ranks' losses.

    Args:
        x: this rank's rows. Only the number of rows may differ between ranks.
        dim, group, balance: as in `shard`.

    Raises:
        TypeError, ValueError: on all ranks, for wrong arguments on one.
        NotImplementedError: on all ranks, for DTensors, for tangents and inside torch.func.
    """
    ranks = ranks_of.of(group)

    def facts() -> tuple[int, dict[str, Any], dict[str, Any]]:
        axis = _checked_dim(x, dim)
        check_balance(balance)
        rest = (*x.shape[:axis], *x.shape[axis + 1 :])
        options = dict(dim=axis, balance=balance, shape=rest, dtype=x.dtype, device=x.device.type)
        return axis, options, dict(rows=x.shape[axis], grad=int(torch.is_grad_enabled() and x.requires_grad))

    if ranks is None:
        facts()
        return x
    axis, table = ranks_of.agree(ranks, "unshard", dict(x=x), facts)
    every = chunks_of("x", [entry["rows"] for entry in table], ranks.size, balance)
    if any(entry["grad"] for entry in table):
        return _Unshard.apply(x, ranks_of.anchor(x), axis, ranks, every)
    return gathered(x, axis, ranks, every)


def gathered(x: Tensor, dim: int, ranks: Ranks, every: list[list[Chunk]]) -> Tensor:
    """Gather the Chunks of all ranks along a dimension, and return the whole tensor."""
    most, own = max(map(rows_of, every)), x.movedim(dim, 0)
    sent = own.new_zeros(most, *own.shape[1:])  # all ranks send equally many rows
    sent[: own.shape[0]] = own
    received = own.new_empty(ranks.size, *sent.shape)
    if sent.numel():
        dist.all_gather([ranks_of.as_bytes(x) for x in received], ranks_of.as_bytes(sent), group=ranks.group)
    pieces = [(chunk, block[chunk.in_shard]) for block, some in zip(received, every, strict=True) for chunk in some]
    return torch.cat([piece for _, piece in sorted(pieces, key=lambda pair: pair[0])]).movedim(0, dim)


def scattered(x: Tensor, dim: int, ranks: Ranks, every: list[list[Chunk]]) -> Tensor:
    """Sum a whole tensor over all ranks, and return this rank's Chunks of the sum: the backward of `gathered`."""
    whole = x.movedim(dim, 0)
    sent = [torch.cat([whole[chunk.first : chunk.last] for chunk in some]) for some in every]
    rows, shape = rows_of(every[ranks.rank]), whole.shape[1:]
    parts = ranks_of.all_to_all(ranks, sent, [(rows, *shape)] * ranks.size)
    return sum(parts[1:], parts[0]).movedim(0, dim)


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, anchor, dim, ranks, every):
        ctx.rest = dim, ranks, every
        return gathered(x, dim, ranks, every)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        ranks_of.refuse_batched(grad)
        return scattered(grad, *ctx.rest), None, None, None, None
