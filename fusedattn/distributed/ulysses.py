"""All-to-all over heads: for its attention each rank has all rows of some heads, then its own rows of all heads again.

Source: DeepSpeed Ulysses, arXiv:2309.14509. Key heads that are fewer than ranks go to each rank that needs them, and
their gradients come back, and are added up, in float32 (float64).
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import backends
from ..call.form import TENSORS, Arguments, Call, Origin, results as results_of, tensors as tensors_of, with_tensors
from ..call.layout import arrange
from ..call.overrides import overridable
from ..call.rules import check_flags, fail
from ..operators import partial
from ..private import eager
from . import ranks as ranks_of
from .eager import as_inputs, without_autocast
from .ranks import Ranks
from .shards import rows_of
from .whole import NEEDS, Whole, agreed, alone, grad_of_out


class Heads(NamedTuple):
    """Which heads each rank has: query heads, a slice each; and key heads, a list each, one maybe on several ranks."""

    queries: list[slice]
    keys: list[list[int]]

    @property
    def repeated(self) -> bool:
        """Whether a key head is on several ranks, or twice on one."""
        return sum(map(len, self.keys)) > len({head for some in self.keys for head in some})


def heads_of(heads: int, key_heads: int, size: int) -> Heads:
    """The Heads of `size` ranks, which divides the query heads."""
    count, group = heads // size, heads // max(1, key_heads)
    queries = [slice(rank * count, (rank + 1) * count) for rank in range(size)]
    keys = []
    for some in queries:
        every = [head // group for head in range(some.start, some.stop)]
        own = sorted(set(every))
        # As many query heads for each of its key heads, in this order; or else a key head for each of them.
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
    arguments = Arguments(
        query, key, value, mask, bias, key_mask, query_mask, causal, window, align, scale, softcap, alibi_slopes, sinks,
        dropout_p, seed,
    )  # fmt: skip

    def prepare(call: Call, ranks: Ranks) -> tuple[Call, dict[str, Any]]:
        check_flags(return_weights=return_weights)
        if call.query.shape[1] % ranks.size:
            fail(ValueError, "query", f"heads that {ranks.size} ranks divide", f"{call.query.shape[1]} heads")
        return call, dict(return_weights=return_weights)

    whole = agreed("ulysses_attention", group, None, arguments, return_lse, backend, prepare)
    if whole is None:
        return alone(arguments, return_lse=return_lse, return_weights=return_weights, backend=backend)
    call = whole.call
    heads = heads_of(call.query.shape[1], call.key.shape[1], whole.ranks.size)
    if return_weights:
        out, lse, weights = _with_weights(whole, heads, return_lse, backend)
    else:
        whole, weights = whole._replace(call=_masks(whole, heads)), None
        if whole.differentiated:
            out, lse = _Ulysses.apply(*tensors_of(whole.call), ranks_of.anchor(query), whole, heads, return_lse)
        else:
            out, lse, *_ = _forward(whole, heads)
    return results_of(4, out, lse if return_lse else None, weights)


def _count(heads: slice | list[int]) -> int:
    return heads.stop - heads.start if isinstance(heads, slice) else len(heads)


def _to_heads(x: Tensor, whole: Whole, heads: list[slice] | list[list[int]], lengths: list[int]) -> Tensor:
    """(B, H, own rows, ...) as (B, heads of this rank, all rows, ...): `lengths` of them on each rank."""
    shapes = [(x.shape[0], _count(heads[whole.ranks.rank]), rows, *x.shape[3:]) for rows in lengths]
    return torch.cat(ranks_of.all_to_all(whole.ranks, [x[:, some] for some in heads], shapes), 2)


def _to_rows(x: Tensor, whole: Whole, heads: list[slice] | list[list[int]], total: int, lengths: list[int]) -> Tensor:
    """The same the other way: (B, heads of this rank, all rows, ...) as (B, `total` heads, own rows, ...), added up."""
    shapes = [(x.shape[0], _count(some), lengths[whole.ranks.rank], *x.shape[3:]) for some in heads]
    parts = ranks_of.all_to_all(whole.ranks, list(x.split(lengths, 2)), shapes)
    if isinstance(heads[0], slice):
        return torch.cat(parts, 1)
    made = x.new_zeros(x.shape[0], total, *shapes[0][2:])
    for some, part in zip(heads, parts, strict=True):
        made.index_add_(1, torch.tensor(some, dtype=torch.int64, device=x.device), part)
    return made


def _lengths(whole: Whole) -> tuple[list[int], list[int]]:
    """(rows, keys) of each rank."""
    return [rows_of(some) for some in whole.rows], [rows_of(some) for some in whole.keys]


def _pairs(x: Tensor, whole: Whole, heads: Heads) -> Tensor:
    """A mask or bias of the rank's own rows as one of all rows, of the rank's heads or of all alike."""
    rows, _ = _lengths(whole)
    x = x.expand(-1, -1, rows[whole.ranks.rank], whole.total)
    return _to_heads(x, whole, heads.queries if x.shape[1] > 1 else [slice(0, 1)] * whole.ranks.size, rows)


def _masks(whole: Whole, heads: Heads) -> Call:
    """The call with the masks of all rows and keys."""
    call, (rows, keys) = whole.call, _lengths(whole)

    def tokens(mask: Tensor | None, lengths: list[int]) -> Tensor | None:
        if mask is None:
            return None
        return _to_heads(mask[:, None], whole, [slice(0, 1)] * whole.ranks.size, lengths)[:, 0]

    return call._replace(
        mask=None if call.mask is None else _pairs(call.mask, whole, heads),
        key_mask=tokens(call.key_mask, keys),
        query_mask=tokens(call.query_mask, rows),
    )


def _of_heads(x: Tensor | None, own: slice) -> Tensor | None:
    """What a (1 or B, Hq) tensor has for some heads."""
    return None if x is None else x[:, own]


def _local(whole: Whole, heads: Heads) -> Call:
    """The call of the rank's heads and all rows, whose masks are of all rows already."""
    call, (rows, keys), rank = whole.call, _lengths(whole), whole.ranks.rank
    own, total = heads.queries[rank], call.query.shape[1]
    return call._replace(
        query=_to_heads(call.query, whole, heads.queries, rows),
        key=_to_heads(call.key, whole, heads.keys, keys),
        value=_to_heads(call.value, whole, heads.keys, keys),
        bias=None if call.bias is None else _pairs(call.bias, whole, heads),
        alibi_slopes=_of_heads(call.alibi_slopes, own),
        sinks=_of_heads(call.sinks, own),
        origin=list(Origin(whole.shift, 0, 0, own.start, total)),
    )


@without_autocast
def _forward(whole: Whole, heads: Heads) -> tuple[Tensor, Tensor, Call, partial.Rows]:
    """(output, lse, the rank's own call, its Rows)."""
    call, (lengths, _) = _local(whole, heads), _lengths(whole)
    part = call._replace(partial=True, sinks=None)
    rows = partial.start(call, partial.unit(part, whole.backend))
    out, stats = partial.forward(part, whole.backend)
    partial.add(rows, slice(None), out, *stats.unbind(-1))
    if call.sinks is not None:
        partial.add_sinks(rows, call.sinks)
    total = whole.call.query.shape[1]
    out, lse = (_to_rows(x, whole, heads.queries, total, lengths) for x in (arrange(rows.out, call.query), rows.lse))
    return arrange(out, whole.call.query), lse, call, rows


@without_autocast
def _backward(
    whole: Whole, heads: Heads, call: Call, rows: partial.Rows, out_grad: Tensor, lse_grad: Tensor | None
) -> list[Tensor | None]:
    """Gradients of the first fields of the call of a rank, from what its `_forward` kept."""
    own, (lengths, keys), rank = whole.call, _lengths(whole), whole.ranks.rank
    out_grad = _to_heads(out_grad, whole, heads.queries, lengths)
    lse_grad = None if lse_grad is None else _to_heads(lse_grad, whole, heads.queries, lengths)
    wanted = [whole.wanted(number) and call[number] is not None for number in range(5)] + [False]
    part = call._replace(partial=True, sinks=None)
    grads = partial.backward(part, whole.backend, out_grad, lse_grad, rows.out, rows.stats, wanted)
    query, key, value, bias, slopes, _ = grads
    total = own.query.shape[1]
    if query is not None:
        query = _to_rows(query.to(own.query.dtype), whole, heads.queries, total, lengths)
    made = []
    for grad, x in ((key, own.key), (value, own.value)):
        if grad is not None:
            grad = grad if heads.repeated else grad.to(x.dtype)
            grad = _to_rows(grad, whole, heads.keys, x.shape[1], keys)
        made.append(grad)
    if bias is not None and own.bias is not None:
        bias = bias.to(rows.out.dtype)
        if own.bias.shape[1] > 1:
            bias = _to_rows(bias, whole, heads.queries, total, lengths)
        else:
            bias = _to_rows(bias, whole, [[0]] * whole.ranks.size, 1, lengths)
        bias = bias.sum_to_size(own.bias.shape)
    sinks = None
    if call.sinks is not None and whole.wanted(5):
        sinks = partial.of_sinks(call, rows, out_grad, lse_grad)

    def of_all(grad: Tensor | None, x: Tensor | None) -> Tensor | None:
        if grad is None or x is None:
            return None
        every = rows.out.new_zeros(x.shape)
        every[:, heads.queries[rank]] = grad.to(every.dtype)
        return ranks_of.sum_of(whole.ranks, every)

    slopes, sinks = of_all(slopes, own.alibi_slopes), of_all(sinks, own.sinks)
    return as_inputs((query, *made, bias, slopes, sinks), own[:6])


class _Ulysses(torch.autograd.Function):
    """`ulysses_attention` of a Whole without weights, and its derivative."""

    @staticmethod
    def forward(ctx, *arguments):
        *tensors, _, whole, heads, need_lse = arguments
        out, lse, call, rows = _forward(whole.with_tensors(tensors), heads)
        ctx.whole, ctx.heads, ctx.need_lse, ctx.unit, ctx.call = (
            whole.with_tensors(),
            heads,
            need_lse,
            rows.unit,
            with_tensors(call, (None,) * len(TENSORS)),
        )
        ctx.save_for_backward(*tensors, *tensors_of(call), *rows[:3])
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, out_grad, lse_grad):
        saved = ctx.saved_tensors
        tensors, local, kept = saved[: len(TENSORS)], saved[len(TENSORS) : 2 * len(TENSORS)], saved[2 * len(TENSORS) :]
        rows, call, query = partial.Rows(*kept, ctx.unit), with_tensors(ctx.call, local), tensors[0]
        out_grad = grad_of_out(out_grad, query[..., :1].expand(*query.shape[:3], call.value.shape[3]), query)
        if ctx.need_lse and lse_grad is None:  # another rank may have one, and all take part in the exchange
            lse_grad = rows.out.new_zeros(query.shape[:3])
        grads = _backward(ctx.whole.with_tensors(tensors), ctx.heads, call, rows, out_grad, lse_grad)
        return *grads, *(None,) * (len(TENSORS) - NEEDS + 4)


class _Exchange(torch.autograd.Function):
    """`_to_heads` of a tensor that has `total` heads, and its derivative."""

    @staticmethod
    def forward(ctx, x, whole, heads, lengths, total):
        ctx.rest = whole.with_tensors(), heads, total, lengths
        return _to_heads(x, whole, heads, lengths)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return _to_rows(grad, *ctx.rest), None, None, None, None


class _Back(torch.autograd.Function):
    """`_to_rows` of several results together: ranks may use some of them each, and all take part in the exchanges."""

    @staticmethod
    def forward(ctx, whole, heads, lengths, total, *results):
        ctx.rest, ctx.there = (whole.with_tensors(), heads, lengths), [x is not None for x in results]
        return tuple(None if x is None else _to_rows(x, whole, heads, total, lengths) for x in results)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *grads):
        pairs = zip(grads, ctx.there, strict=True)
        return *(None,) * 4, *(_to_heads(grad, *ctx.rest) if there else None for grad, there in pairs)


class _Shared(torch.autograd.Function):
    """A tensor that is the same on all ranks: each gets the sum of their gradients."""

    @staticmethod
    def forward(ctx, x, ranks):
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return ranks_of.sum_of(ctx.ranks, grad), None


@without_autocast
def _with_weights(
    whole: Whole, heads: Heads, need_lse: bool, backend: Any
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(output, lse, weights) by the operators themselves, between exchanges that are differentiable."""
    given, dtype = whole.call, whole.call.query.dtype
    if heads.repeated:  # gradients of a key head on several ranks are not to be rounded before they are added up
        whole = whole._replace(call=partial.widened(given))
    # What has a gradient on any rank has one on each: its exchange takes part in the backward of the others.
    inputs: Any = (
        x if x is None or x.requires_grad or not whole.wanted(number) else x.detach().requires_grad_()
        for number, x in enumerate(whole.call[:6])
    )
    query, key, value, bias, slopes, sinks = inputs
    (rows, keys), ranks, own = _lengths(whole), whole.ranks, heads.queries[whole.ranks.rank]
    if bias is not None:
        many = bias.shape[1] > 1
        of = heads.queries if many else [[0]] * ranks.size
        every = bias.expand(-1, -1, query.shape[2], whole.total)
        bias = _Exchange.apply(every, whole, of, rows, bias.shape[1])
    total = query.shape[1]
    local = _masks(whole, heads)._replace(
        query=_Exchange.apply(query, whole, heads.queries, rows, total),
        key=_Exchange.apply(key, whole, heads.keys, keys, key.shape[1]),
        value=_Exchange.apply(value, whole, heads.keys, keys, key.shape[1]),
        bias=bias,
        alibi_slopes=None if slopes is None else _Shared.apply(slopes, ranks)[:, own],
        sinks=None if sinks is None else _Shared.apply(sinks, ranks)[:, own],
        origin=list(Origin(whole.shift, 0, 0, own.start, total)),
    )
    results = backends.choose(local, True, backends.named(backend)).run(local, need_lse, True)
    out, lse, weights = _Back.apply(whole, heads.queries, rows, total, *results)
    return arrange(out.to(dtype), given.query), lse, weights.to(dtype)
