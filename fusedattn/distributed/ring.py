"""Ring attention: rows stay, keys and values travel from rank to rank while those at hand are computed.

Source: Ring Attention with Blockwise Transformers, arXiv:2310.01889; the balance of causal work, "zigzag": Striped
Attention, arXiv:2311.09431, and zhuzilin/ring-flash-attention. Here a shard goes straight to each rank that sees it, at
step t to the t-th one after its owner: as many bytes as from neighbour to neighbour, and none to who sees nothing.
"""

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..call.options import Call, wide_dtype
from ..call.overrides import overridable
from ..call.private import eager
from . import ranks as ranks_of
from .global_call import GlobalCall, Piece, agreed, arguments_of, attend_alone
from .parts import attend
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
    """`fusedattn.attention` of a sequence that is cut over the ranks of a group: each has some rows, and gets theirs.

    Examples:
        >>> shards = (torch.randn(1, 8, 1000, 64) for _ in range(3))  # of this rank
        >>> fusedattn.distributed.ring_attention(*shards, causal=True).shape
        torch.Size([1, 8, 1000, 64])

    Besides its own a rank holds two shards of keys and values at a time. All positions are those of the whole: causal,
    window, alibi_slopes and dropout give what one process would. What no row sees is neither sent nor computed.

    Args:
        query: (B, Hq, rows, D).
        key, value: (B, Hkv, rows, D or Dv). As many rows as `shard` gives this rank; those of query may be of another
            sequence than those of key and value.
        group: a process group, or a DeviceMesh of one dimension; None is the default group. Without one: `attention`.
        balance: as in `shard`.
        key_mask: (B, rows) of the rank's own keys.
        alibi_slopes, sinks: the same on all ranks. Each gets the sum of all ranks' gradients.
        seed: the same on all ranks. Without it that of rank 0 is everyone's.
        causal, window, scale, softcap, dropout_p, return_lse, backend: as in `attention`, and the same on all ranks.

    Returns:
        the rank's rows of what `attention` returns.

    Raises:
        TypeError, NotImplementedError: as `attention` does, on all ranks.
        ValueError: as `attention` does, and for what differs between two ranks.
        RuntimeError: for a rank that did not come within the time limit of the group, or has ended.
    """
    arguments = arguments_of(locals())
    whole = agreed("ring_attention", group, balance, arguments, backend, return_lse)
    if whole is None:
        return attend_alone(arguments, return_lse=return_lse, backend=backend)
    out, lse = attend(whole, _Keys)
    return (out, lse) if return_lse else out


class _Keys:
    """The keys and values of all ranks, one after the other; the next are on their way. Gradients travel back."""

    def __init__(self, whole: GlobalCall):
        call = whole.call
        self.whole, self.own = whole, [x.contiguous() for x in (call.key, call.value, call.key_mask) if x is not None]
        self.coming: Transfer | None = None  # gradients of own keys

    @functools.cached_property
    def totals(self) -> list[Tensor | None]:
        """The gradients of own keys and values so far."""
        call = self.whole.call
        needs = self.wanted(self.whole.ranks.rank)
        pairs = dict(key=call.key, value=call.value).items()
        return [x.new_zeros(x.shape, dtype=wide_dtype(call)) if name in needs else None for name, x in pairs]

    def _begin(self, step: int) -> Transfer | None:
        whole, (_, rank, size) = self.whole, self.whole.ranks
        if step == size:
            return None
        to, owner = (rank + step) % size, (rank - step) % size
        to_sees, owner_seen = whole.meet(to, rank), whole.meet(rank, owner)
        rows = rows_of(whole.keys[owner])
        room = [x.new_empty(*x.shape[: x.dim() - 2], rows, x.shape[-1]) for x in self.own[:2]] if owner_seen else []
        if owner_seen and len(self.own) > 2:
            room.append(self.own[2].new_empty(self.own[2].shape[0], rows))
        return ranks_of.exchange(whole.ranks, self.own, to if to_sees else None, room, owner if owner_seen else None)

    def __iter__(self) -> Iterator[tuple[int, Call, list[Piece]]]:
        whole, (_, rank, size) = self.whole, self.whole.ranks
        tensors, owner = self.own, rank
        for step in range(size):
            coming = self._begin(step + 1)
            seen = bool(tensors) and whole.meet(rank, owner)
            key, value, key_mask = (*tensors, None)[:3] if seen else (None, None, None)
            shown = whole.call._replace(key=key, value=value, key_mask=key_mask)  # type: ignore[arg-type]
            yield owner, shown, whole.pieces(owner) if seen else []
            if coming is not None:
                tensors, owner = list(coming.wait()), (rank - step - 1) % size

    def wanted(self, owner: int) -> set[str]:
        return self.whole.needs[owner]

    def give_back(self, owner: int, key: Tensor | None, value: Tensor | None) -> None:
        """Add this rank's own gradients, or send the owner's, which are None if no row here sees its keys."""
        whole, (_, rank, size) = self.whole, self.whole.ranks
        if owner == rank:
            self._add((key, value))
            return
        self._wait()
        back = (2 * rank - owner) % size  # as far behind this rank as the owner is before it
        grads = [x for x in (key, value) if x is not None]
        room = [torch.empty_like(x) for x in self.totals if x is not None] if whole.meet(back, rank) else []
        self.coming = ranks_of.exchange(whole.ranks, grads, owner if grads else None, room, back if room else None)

    def _add(self, grads: Iterable[Tensor | None]) -> None:
        totals, grads = ([x for x in some if x is not None] for some in (self.totals, grads))
        for total, grad in zip(totals, grads, strict=False):
            total += grad

    def _wait(self) -> None:
        if self.coming is not None:
            self._add(self.coming.wait())
            self.coming = None

    def gradients(self) -> tuple[Tensor | None, Tensor | None]:
        self._wait()
        key, value = self.totals
        return key, value
