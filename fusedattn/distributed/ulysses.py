"""All-to-all over heads: each rank computes some heads of the whole sequence, and gets its rows of all heads back.

A key head goes to each rank that needs it. If that is more than one, its gradients return in float32 (float64).
Source: DeepSpeed Ulysses, arXiv:2309.14509.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..call.layout import arrange
from ..call.options import (
    DIMS,
    INPUTS,
    TENSORS,
    Arguments,
    Call,
    Origin,
    results as results_of,
    tensors as tensors_of,
    wide_dtype,
    with_dims,
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
from .global_call import GlobalCall, agreed, gradients_of, prepared
from .parts import attend_locally
from .ranks import Ranks
from .shards import rows_of


class Heads(NamedTuple):
    """The heads of each rank: a slice of query heads, and a list of key heads. Ranks may share key heads."""

    queries: list[slice]
    keys: list[list[int]]

    @property
    def repeated(self) -> bool:
        """Return whether a key head goes to several ranks, or twice to one."""
        return sum(map(len, self.keys)) > len({head for some in self.keys for head in some})


def heads_of(heads: int, key_heads: int, size: int) -> Heads:
    """Return the Heads of `size` ranks. `size` divides the query heads."""
    count, group = heads // size, heads // max(1, key_heads)
    queries = [slice(rank * count, (rank + 1) * count) for rank in range(size)]
    keys = []
    for some in queries:
        every = [head // group for head in range(some.start, some.stop)]
        own = sorted(set(every))
        # Each key head once if its query heads are equally many and in order; otherwise a key head per query head.
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
    """Compute `ring_attention` with all options of `fusedattn.attention`: each rank takes some heads of all rows.

    Examples:
        >>> shards = (torch.randn(1, 8, 1000, 64) for _ in range(3))  # of this rank
        >>> fusedattn.distributed.ulysses_attention(*shards, causal=True).shape
        torch.Size([1, 8, 1000, 64])

    Args:
        query: (B, Hq, rows, D); Hq is a multiple of the number of ranks.
        key, value: (B, Hkv, rows, D or Dv), any Hkv. Rows as `shard` cuts them without balance.
        mask, bias: for this rank's rows and all keys. They broadcast to (B, Hq, rows, Sk). The gradient of a bias comes
            from this rank's rows only.
        return_weights: also return the weights (B, Hq, rows, Sk) of this rank's rows.
        All others: as in `gather_attention`.

    Returns:
        the results of `attention` for this rank's rows.

    Raises:
        TypeError, NotImplementedError, RuntimeError: as `ring_attention`.
        ValueError: as `ring_attention`, and if the number of ranks does not divide Hq, before anything is sent.
    """
    given = locals()

    def prepare(arguments: Arguments, backend: Any, ranks: Ranks) -> tuple[Call, dict[str, Any]]:
        call, options = prepared(arguments, backend, ranks)
        if call.query.shape[1] % ranks.size:
            expected = f"heads that {ranks.size} ranks can share equally"
            fail(ValueError, "query", expected, f"{call.query.shape[1]} heads")
        return call, options

    whole = agreed("ulysses_attention", given, prepare)
    if whole is None:
        return attend_locally(given)
    rest = whole, _Exchange(whole), return_lse, return_weights
    if whole.wanted():
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
        """Return (B, H, own rows, ...) as (B, this rank's heads, all rows, ...). lengths: rows of each rank."""
        shapes = [(x.shape[0], _count(heads[self.ranks.rank]), rows, *x.shape[3:]) for rows in lengths]
        return torch.cat(ranks_of.all_to_all(self.ranks, [x[:, some] for some in heads], shapes), 2)

    def to_rows(self, x: Tensor, heads: Sequence[slice | list[int]], total: int, lengths: list[int]) -> Tensor:
        """Return (B, this rank's heads, all rows, ...) as (B, total heads, own rows, ...), shared heads summed."""
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
    """Return the call of this rank's heads, with all rows and all keys."""
    heads, rank = exchange.heads, whole.ranks.rank
    first = [slice(0, 1)] * whole.ranks.size
    tensors: dict[str, Any] = {name: getattr(whole.call, name) for name in with_dims("B")}
    for name, x in tensors.items():
        letters = DIMS[name]
        lengths = exchange.rows if "Q" in letters else exchange.keys
        if x is None:
            continue
        if letters == "BH":  # equal on all ranks, so nothing is sent
            tensors[name] = x[:, exchange.own]
        elif letters in ("BQ", "BK"):
            tensors[name] = exchange.to_heads(x[:, None], first, lengths)[:, 0]
        elif "G" in letters:
            tensors[name] = exchange.to_heads(x, heads.keys, lengths)
        else:
            x = x.expand(-1, -1, exchange.rows[rank], whole.total_keys) if letters == "BHQK" else x
            tensors[name] = exchange.to_heads(x, first if x.shape[1] == 1 else heads.queries, lengths)
    origin = list(Origin(whole.shift, 0, 0, exchange.own.start, exchange.total))
    return whole.call._replace(**tensors, origin=origin)


@without_autocast
def _forward(
    whole: GlobalCall, exchange: _Exchange, need_lse: bool, need_weights: bool
) -> tuple[list[Tensor | None], Call, tuple[Tensor, ...]]:
    """Return ([output, lse or None, weights or None], the local call, its results that its backward needs)."""
    call, query = _local(whole, exchange), whole.query
    if exchange.heads.repeated:  # round gradients of shared key heads only after their sum
        kernels = whole.backend in partial.KERNELS and not need_weights
        call = call._replace(partial=True) if kernels else partial.widened(call)
    flops.offer(OPERATORS.forward)
    out, lse, weights, stats = OPERATORS.forward(*call, need_lse, need_weights, bool(whole.wanted()), whole.backend)
    wanted = out.to(query.dtype), lse if need_lse else None, weights.to(query.dtype) if need_weights else None
    results = [
        None if x is None else exchange.to_rows(x, exchange.heads.queries, exchange.total, exchange.rows)
        for x in wanted
    ]
    results[0] = arrange(results[0], query)  # type: ignore[arg-type]
    return results, call, (out, weights, stats)


@without_autocast
def _backward(
    whole: GlobalCall, exchange: _Exchange, call: Call, saved: Sequence[Tensor], incoming: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Return a gradient for each of TENSORS of a rank's call, from those of its results."""
    heads, rows, total, dtype = exchange.heads, exchange.rows, exchange.total, whole.query.dtype
    out, weights, stats = saved
    out_grad, lse_grad, weights_grad = (
        None if x is None else exchange.to_heads(x, heads.queries, rows) for x in incoming
    )
    out_grad, weights_grad = (None if x is None else x.to(call.query.dtype) for x in (out_grad, weights_grad))
    tensors, wanted = {name: getattr(call, name) for name in INPUTS}, whole.wanted()
    need = [name in wanted and x is not None for name, x in tensors.items()]
    kept_weights = weights if weights.dim() == 4 else None
    found = gradients((out_grad, lse_grad, weights_grad), out, kept_weights, stats, tuple(call), whole.backend, need)
    grads: dict[str, Tensor | None] = {}
    for name, grad in zip(INPUTS, found, strict=True):
        letters, x = DIMS[name], getattr(whole.call, name)
        if grad is None:
            continue
        if letters == "BH":
            every = grad.new_zeros((grad.shape[0], total), dtype=wide_dtype(call))
            every[:, exchange.own] = grad.to(every.dtype)
            grads[name] = ranks_of.sum_of(whole.ranks, every)
        elif letters == "BHQK":
            grad, shared = grad.to(wide_dtype(call)), x.shape[1] == 1
            own_heads: Any = [[0]] * whole.ranks.size if shared else heads.queries
            grads[name] = exchange.to_rows(grad, own_heads, 1 if shared else total, rows).sum_to_size(x.shape)
        elif "G" in letters:
            grad = grad if heads.repeated else grad.to(dtype)
            grads[name] = exchange.to_rows(grad, heads.keys, x.shape[1], exchange.keys)
        else:
            grads[name] = exchange.to_rows(grad.to(dtype), heads.queries, total, rows)
    return gradients_of(whole.call, grads)


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
        # Missing gradients are zeros here: another rank may have one, and all ranks take part in the exchange.
        *tensors, out, weights, stats = ctx.saved_tensors  # read once: a checkpoint computes them for each reading
        call = with_tensors(ctx.call, tensors)
        grads = _backward(ctx.whole, ctx.exchange, call, (out, weights, stats), incoming)
        return *grads, None, None, None, None, None
