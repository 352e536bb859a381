"""Ring attention: rows stay on their rank. Keys and values are sent from rank to rank during the computation.

A shard is sent directly to each rank that sees it: at step t, to the rank t places after its owner. That takes as many
bytes as sending from neighbour to neighbour, and a rank that sees nothing of a shard does not get it.
Source: Ring Attention with Blockwise Transformers, arXiv:2310.01889. Balanced causal work ("zigzag"): Striped
Attention, arXiv:2311.09431, and zhuzilin/ring-flash-attention.
"""

from typing import Any

import torch
from torch import Tensor

from ..call.checks import overridable
from ..call.options import DIMS
from ..call.private import eager
from . import ranks as ranks_of
from .global_call import GlobalCall, attend
from .parts import Compute, in_pieces
from .ranks import Transfer
from .shards import rows_of


@overridable
@eager
def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, *, group: Any = None, balance: str | None = None,
    causal: bool = False, window: tuple[int | None, int | None] | None = None, align: str = "bottom_right",
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
            another sequence than query, with another length.
        group: a process group, or a DeviceMesh of one dimension; None is the default group. Without a default group,
            this is `attention`.
        balance: None, or "zigzag" for equal work with causal, as in `shard`.
        key_mask: bool (B, rows), for this rank's keys.
        alibi_slopes, sinks: the same on all ranks. Their gradients are summed over ranks.
        seed: the same on all ranks. None: all ranks use a seed that rank 0 draws.
        causal, window, align, scale, softcap, dropout_p, return_lse, backend: as in `attention`, the same on all ranks.

    Returns:
        the results of `attention` for this rank's rows.

    Raises:
        TypeError, NotImplementedError: as `attention`, on all ranks.
        ValueError: as `attention`, and for options that differ between ranks.
        RuntimeError: if a rank has ended, or did not call this within the time limit of the group.
    """
    return attend(ring_attention, locals(), in_pieces(_receive))


def _receive(whole: GlobalCall, compute: Compute) -> dict[str, Tensor]:
    """Call `compute` with the keys and values of each rank as they arrive, and send the gradients back."""
    (_, rank, size), incoming = whole.ranks, None
    names = [name for name in ("key", "value", "key_mask") if getattr(whole.call, name) is not None]
    own = tensors = tuple(getattr(whole.call, name).contiguous() for name in names)
    totals: dict[str, Tensor] = {}  # gradients of this rank's keys and values, summed over the ranks so far

    def begin(step: int) -> Transfer:
        """Start to send own keys, values and key mask `step` ranks ahead, and receive those `step` behind, if seen."""
        to, owner = (rank + step) % size, (rank - step) % size
        buffers, rows = [], rows_of(whole.keys[owner])
        if whole.rank_sees(rank, owner):
            for name, x in zip(names, own, strict=True):
                axis = DIMS[name].index("K")
                buffers.append(x.new_empty((*x.shape[:axis], rows, *x.shape[axis + 1 :])))
        return ranks_of.exchange(whole.ranks, own if whole.rank_sees(to, rank) else (), to, buffers, owner)

    def add(transfer: Transfer | None) -> None:
        for total, grad in zip(totals.values(), () if transfer is None else transfer.wait(), strict=False):
            total += grad

    for step in range(size):
        transfer = begin(step + 1) if step + 1 < size else None
        ahead, owner = (rank + step) % size, (rank - step) % size
        seen = step == 0 or whole.rank_sees(rank, owner)
        fields: dict[str, Any] = dict(zip(names, tensors, strict=True)) if seen else dict.fromkeys(names)
        grads = compute(owner, whole.call._replace(**fields), whole.pieces(whole.keys[owner]) if seen else [])
        if step == 0:
            totals = grads
        elif grads or totals:  # the rank ahead has computed gradients of this rank's keys
            add(incoming)
            buffers = [torch.empty_like(x) for x in totals.values()] if whole.rank_sees(ahead, rank) else []
            incoming = ranks_of.exchange(whole.ranks, grads.values(), owner, buffers, ahead)
        if transfer is not None:
            tensors = transfer.wait()
    add(incoming)
    return totals
