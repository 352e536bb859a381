"""Ring attention: rows stay, keys and values travel from rank to rank while what is there already is computed.

Source: Ring Attention with Blockwise Transformers, arXiv:2310.01889; the balance of causal work, "zigzag": Striped
Attention, arXiv:2311.09431, and zhuzilin/ring-flash-attention. Here a shard goes straight to each rank that sees it, at
step t to the t-th one after its owner: as many bytes as from neighbour to neighbour, and none for who does not see it.
"""

from typing import Any

import torch
from torch import Tensor

from ..call.form import TENSORS, Arguments, Call, tensors as tensors_of, wide_dtype
from ..call.layout import arrange
from ..call.overrides import overridable
from ..operators import partial
from ..private import eager
from . import ranks as ranks_of
from .eager import as_inputs, without_autocast
from .ranks import Transfer
from .shards import rows_of
from .whole import NEEDS, Pair, Whole, agreed, alone, grad_of_out


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
    arguments = Arguments(
        query, key, value, None, None, key_mask, None, causal, window, "bottom_right", scale, softcap,
        alibi_slopes, sinks, dropout_p, seed,
    )  # fmt: skip
    whole = agreed("ring_attention", group, balance, arguments, return_lse, backend)
    if whole is None:
        return alone(arguments, return_lse=return_lse, backend=backend)
    if whole.differentiated:
        out, lse = _Ring.apply(*tensors_of(whole.call), ranks_of.anchor(query), whole)
    else:
        out, rows = _forward(whole)
        lse = rows.lse
    return (out, lse) if return_lse else out


def _tensors(call: Call) -> list[Tensor]:
    """What travels: keys, values, and which of the keys are real."""
    return [x.contiguous() for x in (call.key, call.value, call.key_mask) if x is not None]


class _Keys:
    """The keys and values of all ranks, one after the other, as far as they are seen; the next are on their way."""

    def __init__(self, whole: Whole):
        self.whole, self.own = whole, _tensors(whole.call)

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

    def __iter__(self):
        """(owner, the call with the owner's keys and values or None if no row sees any), the rank's own first."""
        whole, (_, rank, size) = self.whole, self.whole.ranks
        tensors, owner = self.own, rank
        for step in range(size):
            coming = self._begin(step + 1)
            seen = tensors and whole.meet(rank, owner)
            key_mask = tensors[2] if len(tensors) > 2 else None
            yield owner, whole.call._replace(key=tensors[0], value=tensors[1], key_mask=key_mask) if seen else None
            if coming is not None:
                tensors, owner = list(coming.wait()), (rank - step - 1) % size


def _part(call: Call, pair: Pair) -> Call:
    """The partial call of a Pair."""
    key_mask = None if call.key_mask is None else call.key_mask[:, pair.keys]
    return call._replace(
        query=call.query[:, :, pair.rows],
        key=call.key[:, :, pair.keys],
        value=call.value[:, :, pair.keys],
        key_mask=key_mask,
        sinks=None,
        partial=True,
        **pair.band,
    )


@without_autocast
def _forward(whole: Whole) -> tuple[Tensor, partial.Rows]:
    """(the output, in query's dtype; the Rows)."""
    call = whole.call
    rows = partial.start(call, partial.unit(call._replace(sinks=None), whole.backend))
    for owner, shown in _Keys(whole):
        for pair in whole.pairs(owner) if shown is not None else ():
            out, stats = partial.forward(_part(shown, pair), whole.backend)
            partial.add(rows, pair.rows, out, *stats.unbind(-1))
    if call.sinks is not None:
        partial.add_sinks(rows, call.sinks)
    return arrange(rows.out, call.query), rows


class _Back:
    """Gradients of keys and values on their way to the owners: from this rank of others' ones, and the other way."""

    def __init__(self, whole: Whole, totals: list[Tensor]):
        self.whole, self.totals = whole, totals
        self.coming: Transfer | None = None

    def wait(self) -> None:
        """Add what has come."""
        if self.coming is not None:
            for total, part in zip(self.totals, self.coming.wait(), strict=False):
                total += part
            self.coming = None

    def send(self, owner: int, grads: list[Tensor]) -> None:
        """Send the owner what its keys got here; grads are empty if no row here sees them."""
        whole, (_, rank, size) = self.whole, self.whole.ranks
        back = (2 * rank - owner) % size  # which is as far behind this rank as the owner is before it
        self.wait()
        needed = [whole.needs[rank][1], whole.needs[rank][2]]
        comes = whole.meet(back, rank) and any(needed)
        room = [torch.empty_like(x) for x in self.totals] if comes else []
        self.coming = ranks_of.exchange(whole.ranks, grads, owner if grads else None, room, back if comes else None)


@without_autocast
def _backward(whole: Whole, rows: partial.Rows, out_grad: Tensor, lse_grad: Tensor | None) -> list:
    """Gradients of query, key, value, alibi_slopes and sinks, None where nobody wants them."""
    call, (_, rank, _) = whole.call, whole.ranks
    wide, stats, need = wide_dtype(call), rows.stats, whole.needs[rank]

    def zeros(x: Tensor) -> Tensor:
        return x.new_zeros(x.shape, dtype=wide)

    grad_query = zeros(call.query) if need[0] else None
    grad_slopes = None if call.alibi_slopes is None or not whole.wanted(4) else zeros(call.alibi_slopes)
    own = [zeros(x) for x, wanted in zip(call[1:3], need[1:3], strict=True) if wanted]
    back = _Back(whole, own)
    for owner, shown in _Keys(whole):
        of_owner = whole.needs[owner]
        wanted = [need[0], of_owner[1], of_owner[2], False, grad_slopes is not None, False]
        totals: list[Tensor] = []
        if shown is not None and any(wanted):
            keys = [zeros(x) if asked else None for x, asked in zip(shown[1:3], wanted[1:3], strict=True)]
            totals = [x for x in keys if x is not None]
            for pair in whole.pairs(owner):
                here = pair.rows
                grads = partial.backward(
                    _part(shown, pair),
                    whole.backend,
                    out_grad[:, :, here],
                    None if lse_grad is None else lse_grad[:, :, here],
                    rows.out[:, :, here],
                    stats[:, :, here],
                    wanted,
                )
                places = (
                    None if grad_query is None else grad_query[:, :, here],
                    *(None if x is None else x[:, :, pair.keys] for x in keys),
                    None,
                    grad_slopes,
                )
                for place, grad in zip(places, grads, strict=False):
                    if place is not None and grad is not None:
                        place += grad
        if owner == rank:
            for total, grad in zip(own, totals, strict=False):
                total += grad
        else:
            back.send(owner, totals)
    back.wait()
    if grad_slopes is not None:
        grad_slopes = ranks_of.sum_of(whole.ranks, grad_slopes)
    grad_sinks = None
    if call.sinks is not None and whole.wanted(5):
        grad_sinks = ranks_of.sum_of(whole.ranks, partial.of_sinks(call, rows, out_grad, lse_grad))
    given = iter(own)
    grads = [grad_query, *(next(given) if wanted else None for wanted in need[1:3]), grad_slopes, grad_sinks]
    inputs = *call[:3], call.alibi_slopes, call.sinks
    return as_inputs(grads, inputs)


class _Ring(torch.autograd.Function):
    """`ring_attention` of a Whole, and its derivative."""

    @staticmethod
    def forward(ctx, *arguments):
        *tensors, _, whole = arguments
        out, rows = _forward(whole.with_tensors(tensors))
        ctx.whole, ctx.unit = whole.with_tensors(), rows.unit
        ctx.save_for_backward(*tensors, *rows[:3])
        ctx.set_materialize_grads(False)
        return out, rows.lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, out_grad, lse_grad):
        *tensors, out, largest, log2_sum = ctx.saved_tensors
        rows = partial.Rows(out, largest, log2_sum, ctx.unit)
        whole = ctx.whole.with_tensors(tensors)
        query, key, value, slopes, sinks = _backward(whole, rows, grad_of_out(out_grad, out, tensors[0]), lse_grad)
        return query, key, value, None, slopes, sinks, *(None,) * (len(TENSORS) - NEEDS + 2)
