"""Ring attention: rows stay on their rank. Keys and values are sent from rank to rank during the computation.

A shard is sent directly to each rank that sees it: at step t, to the rank t places after its owner. That takes as many
bytes as sending from neighbour to neighbour, and a rank that sees nothing of a shard does not get it.
Source: Ring Attention with Blockwise Transformers, arXiv:2310.01889. Balanced causal work ("zigzag"): Striped
Attention, arXiv:2311.09431, and zhuzilin/ring-flash-attention.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..call.options import DIMS, Call, wide_dtype
from ..call.private import eager
from ..call.rules import overridable
from . import ranks as ranks_of
from .global_call import GlobalCall, Piece, attend
from .parts import in_pieces
from .ranks import Transfer
from .shards import rows_of


@overridable
@eager
def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, *, group: Any = None, balance: str | None = None,
    causal: bool = False, window: tuple[int | None, int | None] | None = None,
    scale: float | None = None, softcap: float | None = None,
    alibi_slopes: Tensor | None = None, sinks: Tensor | None = None, key_mask: Tensor | None = None,
    dropout_p: float = 0.0, seed: int | Tensor | None = None, return_lse: bool = False, backend: str | None = None,
) -> Tensor | Any:  # fmt: skip
    """Compute `fusedattn.attention` over a sequence that is split among the ranks of a process group.

    Examples:
        >>> shards = (torch.randn(1, 8, 1000, 64) for _ in range(3))  # of this rank
        >>> fusedattn.distributed.ring_attention(*shards, causal=True).shape
        torch.Size([1, 8, 1000, 64])

    Each rank gets the output of its rows. Besides its own, a rank holds two shards of keys and values at a time.
    Positions count in the whole sequence, so causal, window, alibi_slopes and dropout give the results of one process.
    Keys that no row of a rank sees are not sent to it.

    Args:
        query: (B, Hq, rows, D).
        key, value: (B, Hkv, rows, D or Dv). rows: the number that `shard` gives this rank. Key and value may be of
            another sequence than query, with another number of rows.
        group: a process group, or a DeviceMesh of one dimension; None is the default group. Without a default group,
            this is `attention`.
        balance: as in `shard`.
        key_mask: (B, rows), for this rank's keys.
        alibi_slopes, sinks: the same on all ranks. Their gradients are summed over ranks.
        seed: the same on all ranks. None: all ranks use a seed that rank 0 draws.
        causal, window, scale, softcap, dropout_p, return_lse, backend: as in `attention`, and the same on all ranks.

    Returns:
        the results of `attention` for this rank's rows.

    Raises:
        TypeError, NotImplementedError: as `attention`, on all ranks.
        ValueError: as `attention`, and for options that differ between ranks.
        RuntimeError: if a rank has ended, or did not call this within the time limit of the group.
    """
    return attend(ring_attention, locals(), in_pieces(_Keys))


class _Keys:
    """Keys and values for `in_pieces`, received from one rank after another. Their gradients are sent back."""

    def __init__(self, whole: GlobalCall):
        fields = {name: getattr(whole.call, name) for name in ("key", "value", "key_mask")}
        self.whole, self.own = whole, {name: x.contiguous() for name, x in fields.items() if x is not None}
        self.incoming: Transfer | None = None  # gradients of this rank's keys and values

    @functools.cached_property
    def totals(self) -> dict[str, Tensor]:
        """Gradients of this rank's keys and values, summed over the ranks so far."""
        wanted, dtype = self.whole.wanted(self.whole.ranks.rank), wide_dtype(self.whole.call.query.dtype)
        return {name: torch.zeros_like(x, dtype=dtype) for name, x in self.own.items() if name in wanted}

    def _begin(self, step: int) -> Transfer:
        """Start to send this rank's keys to the rank `step` ahead, and to receive keys from the rank `step` behind."""
        whole, (_, rank, size) = self.whole, self.whole.ranks
        to, owner = (rank + step) % size, (rank - step) % size
        buffers, rows = [], rows_of(whole.keys[owner])
        if owner_seen := whole.rank_sees(rank, owner):
            for name, x in self.own.items():
                axis = DIMS[name].index("K")
                buffers.append(x.new_empty((*x.shape[:axis], rows, *x.shape[axis + 1 :])))
        receiver = to if whole.rank_sees(to, rank) else None
        return ranks_of.exchange(whole.ranks, self.own.values(), receiver, buffers, owner if owner_seen else None)

    def __iter__(self) -> Iterator[tuple[int, Call, list[Piece]]]:
        whole, (_, rank, size) = self.whole, self.whole.ranks
        tensors, absent = tuple(self.own.values()), dict.fromkeys(("key", "value", "key_mask"))
        for step in range(size):
            transfer = self._begin(step + 1) if step + 1 < size else None
            owner = (rank - step) % size
            seen = whole.rank_sees(rank, owner)
            fields: dict[str, Any] = absent | (dict(zip(self.own, tensors, strict=True)) if seen else {})
            yield owner, whole.call._replace(**fields), whole.pieces(whole.keys[owner]) if seen else []
            if transfer is not None:
                tensors = transfer.wait()

    def give_back(self, owner: int | None, key: Tensor | None, value: Tensor | None) -> None:
        """Add the gradients to `totals` if this rank is the owner of these keys; else send them. None: no gradient."""
        whole, (_, rank, size) = self.whole, self.whole.ranks
        grads = [x for x in (key, value) if x is not None]
        if owner is None or owner == rank:
            self._add(grads)
            return
        self._wait()
        source = (2 * rank - owner) % size  # the rank as far behind this one as the owner is ahead
        buffers = [torch.empty_like(x) for x in self.totals.values()] if whole.rank_sees(source, rank) else []
        receiver, sender = owner if grads else None, source if buffers else None
        self.incoming = ranks_of.exchange(whole.ranks, grads, receiver, buffers, sender)

    def _add(self, grads: Sequence[Tensor]) -> None:
        for total, grad in zip(self.totals.values(), grads, strict=False):  # no grads if no row here sees the keys
            total += grad

    def _wait(self) -> None:
        if self.incoming is not None:
            self._add(self.incoming.wait())
            self.incoming = None

    def gradients(self) -> tuple[Tensor | None, Tensor | None]:
        self._wait()
        return self.totals.get("key"), self.totals.get("value")
