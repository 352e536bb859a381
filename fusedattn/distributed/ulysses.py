"""All-to-all over heads: for its attention each rank has all rows of some heads, then its own rows of all heads again.

Source: DeepSpeed Ulysses, arXiv:2309.14509. Key heads that are fewer than ranks go to each rank that needs them, and
their gradients come back, and are added up, in float32 (float64).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..call.layout import arrange
from ..call.options import (
    BY_HEAD,
    INPUTS,
    TENSORS,
    Call,
    Origin,
    inputs as inputs_of,
    results as results_of,
    sliced,
    tensors as tensors_of,
    wide_dtype,
    with_tensors,
)
from ..call.overrides import overridable
from ..call.private import eager
from ..call.rules import fail
from ..naive.formula import without_autocast
from ..operators import flops, partial
from ..operators.backward import gradients
from ..operators.namespace import OPERATORS
from . import ranks as ranks_of
from .global_call import GlobalCall, agreed, arguments_of, attend_alone, in_dtypes_of
from .ranks import Ranks
from .shards import rows_of


class Heads(NamedTuple):
    """The heads of each rank: a slice of the query heads, and a list of key heads, which ranks may share."""

    queries: list[slice]
    keys: list[list[int]]

    @property
    def repeated(self) -> bool:
        """Return whether a key head is on several ranks, or twice on one."""
        return sum(map(len, self.keys)) > len({head for some in self.keys for head in some})


def heads_of(heads: int, key_heads: int, size: int) -> Heads:
    """Return the Heads of `size` ranks, which divides the query heads."""
    count, group = heads // size, heads // max(1, key_heads)
    queries = [slice(rank * count, (rank + 1) * count) for rank in range(size)]
    keys = []
    for some in queries:
        every = [head // group for head in range(some.start, some.stop)]
        own = sorted(set(every))
        # Equally many query heads for each of its key heads, in order; otherwise a key head for each of them.
        each = count // max(1, len(own))
        keys.append(own if every == [head for head in own for _ in range(each)] else every)
    return Heads(queries, keys)


@overridable
@eager
def ulysses_attention(
    query: Tensor, key: Tensor, value: Tensor, *, group: Any = None,
    mask: Tensor | None = None, bias: Tensor | None = None,
    key_mask: Tensor | None = None, query_mask: Tensor | None = None,
    causal: bool = False, window: tuple[int | None, int | None] | None = None, align: str = "bottom_right",
    scale: float | None = None, softcap: float | None = None,
    alibi_slopes: Tensor | None = None, sinks: Tensor | None = None,
    dropout_p: float = 0.0, seed: int | Tensor | None = None,
    return_lse: bool = False, return_weights: bool = False, backend: str | None = None,
) -> Tensor | Any:  # fmt: skip
    """`ring_attention` with every option of `fusedattn.attention`: each rank computes some heads of the whole sequence.

    Examples:
        >>> shards = (torch.randn(1, 8, 1000, 64) for _ in range(3))  # of this rank
        >>> fusedattn.distributed.ulysses_attention(*shards, causal=True).shape
        torch.Size([1, 8, 1000, 64])

    Args:
        query: (B, Hq, rows, D); Hq is a multiple of the number of ranks.
        key, value: (B, Hkv, rows, D or Dv), any Hkv. Rows as `shard` cuts them without balance.
        mask, bias: of the rank's own rows and all keys; they broadcast to (B, Hq, rows, Sk). The gradient of a bias is
            that of the rank's own rows.
        return_weights: also return the weights (B, Hq, rows, Sk) of the rank's own rows.
        All others: as in `gather_attention`.

    Returns:
        the rank's rows of what `attention` returns.

    Raises:
        TypeError, NotImplementedError, RuntimeError: as `ring_attention`.
        ValueError: as `ring_attention`, and where the ranks do not divide Hq, before anything is sent.
    """
    arguments = arguments_of(locals())

    def prepare(call: Call, ranks: Ranks) -> tuple[Call, dict[str, Any]]:
        if call.query.shape[1] % ranks.size:
            fail(ValueError, "query", f"heads that {ranks.size} ranks divide", f"{call.query.shape[1]} heads")
        return call, {}

    whole = agreed("ulysses_attention", group, None, arguments, backend, return_lse, return_weights, prepare)
    if whole is None:
        return attend_alone(arguments, return_lse=return_lse, return_weights=return_weights, backend=backend)
    rest = whole, _Exchange(whole), return_lse, return_weights
    if whole.differentiated:
        return results_of(4, *_Ulysses.apply(*tensors_of(whole.call), ranks_of.anchor(query), *rest))
    return results_of(4, *_forward(*rest)[0])


class _Exchange:
    """All-to-all between the rows and the heads of ranks."""

    def __init__(self, whole: GlobalCall):
        call, self.ranks = whole.call, whole.ranks
        self.total = call.query.shape[1]
        self.heads = heads_of(self.total, call.key.shape[1], self.ranks.size)
        self.own = self.heads.queries[self.ranks.rank]
        self.rows, self.keys = ([rows_of(some) for some in every] for every in (whole.rows, whole.keys))

    def to_heads(self, x: Tensor, heads: Sequence[slice | list[int]], lengths: list[int]) -> Tensor:
        """Return (B, H, own rows, ...) as (B, heads of this rank, all rows, ...), `lengths` of them on each rank."""
        shapes = [(x.shape[0], _count(heads[self.ranks.rank]), rows, *x.shape[3:]) for rows in lengths]
        return torch.cat(ranks_of.all_to_all(self.ranks, [x[:, some] for some in heads], shapes), 2)

    def to_rows(self, x: Tensor, heads: Sequence[slice | list[int]], total: int, lengths: list[int]) -> Tensor:
        """Return (B, heads of this rank, all rows, ...) as (B, `total` heads, own rows, ...), added up."""
        shapes = [(x.shape[0], _count(some), lengths[self.ranks.rank], *x.shape[3:]) for some in heads]
        parts = ranks_of.all_to_all(self.ranks, list(x.split(lengths, 2)), shapes)
        if isinstance(heads[0], slice):
            return torch.cat(parts, 1)
        whole = x.new_zeros(x.shape[0], total, *shapes[0][2:])
        for some, part in zip(heads, parts, strict=True):
            whole.index_add_(1, torch.tensor(some, dtype=torch.int64, device=x.device), part)
        return whole


def _count(heads: slice | list[int]) -> int:
    return heads.stop - heads.start if isinstance(heads, slice) else len(heads)


def _local(whole: GlobalCall, exchange: _Exchange) -> Call:
    """Return the call of this rank's heads, all rows and all keys."""
    call, size = whole.call, whole.ranks.size
    heads, own, rows, keys = exchange.heads, exchange.own, exchange.rows, exchange.keys
    first = [slice(0, 1)] * size

    def pairs(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        x = x.expand(-1, -1, rows[whole.ranks.rank], whole.total)
        return exchange.to_heads(x, heads.queries if x.shape[1] > 1 else first, rows)

    def tokens(mask: Tensor | None, lengths: list[int]) -> Tensor | None:
        return None if mask is None else exchange.to_heads(mask[:, None], first, lengths)[:, 0]

    return call._replace(
        query=exchange.to_heads(call.query, heads.queries, rows),
        key=exchange.to_heads(call.key, heads.keys, keys),
        value=exchange.to_heads(call.value, heads.keys, keys),
        bias=pairs(call.bias),
        mask=pairs(call.mask),
        key_mask=tokens(call.key_mask, keys),
        query_mask=tokens(call.query_mask, rows),
        origin=list(Origin(whole.shift, 0, 0, own.start, exchange.total)),
        **{name: sliced(name, getattr(call, name), H=own) for name in BY_HEAD},
    )


@without_autocast
def _forward(
    whole: GlobalCall, exchange: _Exchange, need_lse: bool, need_weights: bool
) -> tuple[list[Tensor | None], Call, tuple[Tensor, ...]]:
    """Return ((output, lse or None, weights or None), the local call, what its backward needs of its results)."""
    call, query = _local(whole, exchange), whole.call.query
    if exchange.heads.repeated:  # gradients of a key head on several ranks are rounded after they are added up
        kernels = whole.backend in partial.KERNELS and not need_weights
        call = call._replace(partial=True) if kernels else partial.widened(call)
    flops.offer(OPERATORS.forward)
    out, lse, weights, stats = OPERATORS.forward(*call, need_lse, need_weights, whole.differentiated, whole.backend)
    asked = out.to(query.dtype), lse if need_lse else None, weights.to(query.dtype) if need_weights else None
    results = [
        None if x is None else exchange.to_rows(x, exchange.heads.queries, exchange.total, exchange.rows) for x in asked
    ]
    results[0] = arrange(results[0], query)  # type: ignore[arg-type]
    return results, call, (out, weights, stats)


@without_autocast
def _backward(
    whole: GlobalCall, exchange: _Exchange, call: Call, saved: Sequence[Tensor], incoming: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Return the gradients of the first fields of a rank's call, from those of its results."""
    heads, rows, keys, total = exchange.heads, exchange.rows, exchange.keys, exchange.total
    out, weights, stats = saved
    given = [None if x is None else exchange.to_heads(x, heads.queries, rows) for x in incoming]
    given = [x if x is None or n == 1 else x.to(call.query.dtype) for n, x in enumerate(given)]  # 1: of lse
    need = [whole.wanted(name) and x is not None for name, x in zip(INPUTS, inputs_of(call), strict=True)]
    saved_weights = weights if weights.dim() == 4 else None
    made = gradients(given, out, saved_weights, stats, tuple(call), whole.backend, need)
    grads: dict[str, Any] = dict(zip(INPUTS, made, strict=True))
    dtype, key_heads = whole.call.query.dtype, whole.call.key.shape[1]
    for name, grad in grads.items():
        if grad is None:
            continue
        if name == "query":
            grads[name] = exchange.to_rows(grad.to(dtype), heads.queries, total, rows)
        elif name in ("key", "value"):
            grads[name] = exchange.to_rows(grad if heads.repeated else grad.to(dtype), heads.keys, key_heads, keys)
        elif name in BY_HEAD:
            every = grad.new_zeros((grad.shape[0], total), dtype=wide_dtype(call))
            every[:, exchange.own] = grad.to(every.dtype)
            grads[name] = ranks_of.sum_of(whole.ranks, every)
        else:
            like = getattr(whole.call, name)
            owners, count = ([[0]] * whole.ranks.size, 1) if like.shape[1] == 1 else (heads.queries, total)
            grads[name] = exchange.to_rows(grad.to(wide_dtype(call)), owners, count, rows).sum_to_size(like.shape)
    return in_dtypes_of(inputs_of(whole.call), list(grads.values()))


class _Ulysses(torch.autograd.Function):
    """`ulysses_attention` of a GlobalCall, and its derivative."""

    @staticmethod
    def forward(ctx, *arguments):
        *tensors, _, whole, exchange, need_lse, need_weights = arguments
        whole = whole.with_tensors(tensors)
        results, call, saved = _forward(whole, exchange, need_lse, need_weights)
        like = [None if x is None else x.new_empty(()).expand(x.shape) for x in tensors]
        ctx.whole, ctx.exchange = whole.with_tensors(like), exchange
        ctx.call = with_tensors(call, [None] * len(TENSORS))
        ctx.save_for_backward(*tensors_of(call), *saved)
        return tuple(results)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *incoming):
        # Zeros stand for what did not come: another rank may have it, and all take part in the exchange.
        saved = ctx.saved_tensors  # once, as checkpoints want it
        call = with_tensors(ctx.call, saved[: len(TENSORS)])
        grads = _backward(ctx.whole, ctx.exchange, call, saved[len(TENSORS) :], incoming)
        return *grads, *(None,) * (len(TENSORS) - len(INPUTS) + 5)
