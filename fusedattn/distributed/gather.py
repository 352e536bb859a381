"""Keys and values of all ranks on each: rows stay, and every option of attention holds for them.

What is gathered is not kept for the backward: it is gathered again. Gradients of keys and values are float32 (float64)
until those of all ranks are added up. Source: Llama 3, arXiv:2407.21783, section 3.3.2; for documents, the cut of
cu_seqlens where a shard ends, pytorch/pytorch #181078.
"""

import bisect
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..api import attention_varlen
from ..call.form import TENSORS, Arguments, Call, Origin, rank4, rows as one_row, tensors as tensors_of, wide_dtype
from ..call.layout import arrange
from ..call.overrides import overridable
from ..call.packed import Packed, check_lengths, check_values
from ..call.rules import Sizes, check_options, check_tensors, fail
from ..operators import partial
from ..private import eager
from . import ranks as ranks_of
from .eager import as_inputs, without_autocast
from .shards import Chunk, gathered, scattered
from .whole import NEEDS, Whole, agreed, alone, grad_of_out


class Piece(NamedTuple):
    """A part of what a rank computes: rows of its shard, keys of the whole, and the fields of its Call besides.

    bias and slopes say which part of these belongs to it.
    """

    rows: slice
    keys: slice
    fields: dict[str, Any]
    bias: Callable[[Tensor], Tensor] = lambda x: x
    slopes: Callable[[Tensor], Tensor] = lambda x: x


@overridable
@eager
def gather_attention(
    query: Tensor, key: Tensor, value: Tensor, *, group: Any = None, balance: str | None = None,
    mask: Tensor | None = None, bias: Tensor | None = None,
    key_mask: Tensor | None = None, query_mask: Tensor | None = None,
    causal: bool = False, window: tuple[int | None, int | None] | None = None, align: str = "bottom_right",
    scale: float | None = None, softcap: float | None = None,
    alibi_slopes: Tensor | None = None, sinks: Tensor | None = None,
    dropout_p: float = 0.0, seed: int | Tensor | None = None, return_lse: bool = False, backend: str | None = None,
) -> Tensor | Any:  # fmt: skip
    """`ring_attention` with every option of `fusedattn.attention` but returned weights: each rank gets all keys.

    Examples:
        >>> shards = (torch.randn(1, 8, 1000, 64) for _ in range(3))  # of this rank
        >>> fusedattn.distributed.gather_attention(*shards, causal=True).shape
        torch.Size([1, 8, 1000, 64])

    Args:
        mask, bias: of the rank's own rows and all keys, in the order of the whole; they broadcast to
            (B, Hq, rows, Sk). The gradient of a bias is that of the rank's own rows.
        key_mask: (B, rows) of the rank's own keys.
        query_mask: of its own rows.
        All others: as in `ring_attention`, or as in `fusedattn.attention` and the same on all ranks.

    Returns:
        the rank's rows of what `attention` returns.

    Raises:
        TypeError, ValueError, NotImplementedError, RuntimeError: as `ring_attention`.
    """
    arguments = Arguments(
        query, key, value, mask, bias, key_mask, query_mask, causal, window, align, scale, softcap, alibi_slopes, sinks,
        dropout_p, seed,
    )  # fmt: skip
    whole = agreed("gather_attention", group, balance, arguments, return_lse, backend)
    if whole is None:
        return alone(arguments, return_lse=return_lse, backend=backend)
    out, lse = attend(whole, _pieces(whole))
    return (out, lse) if return_lse else out


def _pieces(whole: Whole) -> list[Piece]:
    """One for each Chunk of rows: with the keys that it may see."""
    low, high = whole.sides()
    made = []
    for row in whole.rows[whole.ranks.rank]:
        begin = int(min(max(row.first + low, 0), whole.total))
        end = int(max(min(row.last + high, whole.total), begin))
        if row.first == row.last:
            continue

        def cut(x: Tensor, row: Chunk = row, keys: slice = slice(begin, end)) -> Tensor:
            x = x if x.shape[2] == 1 else x[:, :, row.here]
            return x if x.shape[3] == 1 else x[..., keys]

        call = whole.call
        fields = whole.band(row, Chunk(begin, end, begin)) | dict(
            mask=None if call.mask is None else cut(call.mask),
            query_mask=None if call.query_mask is None else call.query_mask[:, row.here],
        )
        made.append(Piece(row.here, slice(begin, end), fields, cut))
    return made


def attend(whole: Whole, pieces: list[Piece]) -> tuple[Tensor, Tensor]:
    """(output, lse) of the Pieces of a rank."""
    if not whole.differentiated:
        out, rows = _forward(whole, pieces)
        return out, rows.lse
    return _Gather.apply(*tensors_of(whole.call), ranks_of.anchor(whole.call.query), whole, pieces)


def _all_keys(whole: Whole) -> Call:
    """The call with the keys and values of all ranks."""
    call = whole.call
    key, value = (gathered(x, 2, whole.ranks, whole.keys) for x in call[1:3])
    key_mask = None if call.key_mask is None else gathered(call.key_mask, 1, whole.ranks, whole.keys)
    return call._replace(key=key, value=value, key_mask=key_mask)


def _part(call: Call, piece: Piece) -> Call:
    """The partial call of a Piece."""
    return call._replace(
        query=call.query[:, :, piece.rows],
        key=call.key[:, :, piece.keys],
        value=call.value[:, :, piece.keys],
        key_mask=None if call.key_mask is None else call.key_mask[:, piece.keys],
        bias=None if call.bias is None else piece.bias(call.bias),
        alibi_slopes=None if call.alibi_slopes is None else piece.slopes(call.alibi_slopes),
        sinks=None,
        partial=True,
        **piece.fields,
    )


@without_autocast
def _forward(whole: Whole, pieces: list[Piece]) -> tuple[Tensor, partial.Rows]:
    """(the output, in query's dtype; the Rows)."""
    call, rows = _all_keys(whole), None
    for piece in pieces:
        part = _part(call, piece)
        rows = partial.start(call, partial.unit(part, whole.backend)) if rows is None else rows
        out, stats = partial.forward(part, whole.backend)
        partial.add(rows, piece.rows, out, *stats.unbind(-1))
    rows = partial.start(call, 1.0) if rows is None else rows
    if call.sinks is not None:
        partial.add_sinks(rows, call.sinks)
    return arrange(rows.out, call.query), rows


@without_autocast
def _backward(
    whole: Whole, pieces: list[Piece], rows: partial.Rows, out_grad: Tensor, lse_grad: Tensor | None
) -> list[Tensor | None]:
    """Gradients of the first fields of a call."""
    call, own = _all_keys(whole), whole.call
    need = whole.needs[whole.ranks.rank]
    wanted = [need[0], whole.wanted(1), whole.wanted(2), need[3], whole.wanted(4), False]
    totals = [
        x.new_zeros(x.shape, dtype=wide_dtype(call)) if asked and x is not None else None
        for x, asked in zip(call[:6], wanted, strict=True)
    ]
    wanted = [total is not None for total in totals]
    query, key, value, bias, slopes, _ = totals
    for piece in pieces if any(wanted) else ():
        here = piece.rows
        incoming = out_grad[:, :, here], None if lse_grad is None else lse_grad[:, :, here]
        grads = partial.backward(
            _part(call, piece), whole.backend, *incoming, rows.out[:, :, here], rows.stats[:, :, here], wanted
        )
        places = (
            None if query is None else query[:, :, here],
            *(None if x is None else x[:, :, piece.keys] for x in (key, value)),
            None if bias is None else piece.bias(bias),
            None if slopes is None else piece.slopes(slopes),
        )
        for place, grad in zip(places, grads, strict=False):
            if place is not None and grad is not None:
                place += grad
    key, value = (None if x is None else scattered(x, 2, whole.ranks, whole.keys) for x in (key, value))
    sinks = partial.of_sinks(own, rows, out_grad, lse_grad) if own.sinks is not None and whole.wanted(5) else None
    slopes, sinks = (None if x is None else ranks_of.sum_of(whole.ranks, x) for x in (slopes, sinks))
    return as_inputs((query, key, value, bias, slopes, sinks), own[:6])


class _Gather(torch.autograd.Function):
    """`attend`, and its derivative."""

    @staticmethod
    def forward(ctx, *arguments):
        *tensors, _, whole, pieces = arguments
        out, rows = _forward(whole.with_tensors(tensors), pieces)
        ctx.whole, ctx.pieces, ctx.unit = whole.with_tensors(), pieces, rows.unit
        ctx.save_for_backward(*tensors, *rows[:3])
        ctx.set_materialize_grads(False)
        return out, rows.lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, out_grad, lse_grad):
        *tensors, out, largest, log2_sum = ctx.saved_tensors
        rows = partial.Rows(out, largest, log2_sum, ctx.unit)
        incoming = grad_of_out(out_grad, out, tensors[0]), lse_grad
        grads = _backward(ctx.whole.with_tensors(tensors), ctx.pieces, rows, *incoming)
        return *grads, *(None,) * (len(TENSORS) - NEEDS + 3)


@overridable
@eager
def gather_attention_varlen(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, *, group: Any = None, balance: str | None = None,
    mask: Tensor | None = None, bias: Tensor | None = None,
    key_mask: Tensor | None = None, query_mask: Tensor | None = None,
    causal: bool = False, window: tuple[int | None, int | None] | None = None, align: str = "bottom_right",
    scale: float | None = None, softcap: float | None = None,
    alibi_slopes: Tensor | None = None, sinks: Tensor | None = None,
    dropout_p: float = 0.0, seed: int | Tensor | None = None, return_lse: bool = False, backend: str | None = None,
) -> Tensor | Any:  # fmt: skip
    """`fusedattn.attention_varlen` of documents that lie one behind the other, and are cut wherever a shard ends.

    Examples:
        >>> shards = (torch.randn(100, 8, 64) for _ in range(3))  # of this rank
        >>> offsets = torch.tensor([0, 30, 30, 100], dtype=torch.int32)  # of the whole
        >>> fusedattn.distributed.gather_attention_varlen(*shards, offsets, causal=True).shape
        torch.Size([100, 8, 64])

    Args:
        query: (rows, Hq, D).
        key, value: (rows, Hkv, D or Dv). The rows that `shard` gives this rank of all T.
        cu_seqlens: int32 (n + 1,), of the whole: document b is rows cu_seqlens[b] to cu_seqlens[b + 1] of T.
        key_mask, query_mask: bool (rows,).
        mask, bias: of the whole, broadcasting to (n, Hq, longest, longest). The gradient of a bias is that of the
            rank's own rows.
        alibi_slopes: floating (Hq,) or (n, Hq).
        All others: as in `gather_attention`.

    Returns:
        the rank's rows of what `attention_varlen` returns: (rows, Hq, Dv); lse (Hq, rows).

    Raises:
        TypeError, ValueError, NotImplementedError, RuntimeError: as `ring_attention`.
    """
    options: dict[str, Any] = dict(causal=causal, window=window, align=align, scale=scale, softcap=softcap, sinks=sinks)
    options |= dict(dropout_p=dropout_p, seed=seed)
    if ranks_of.of(group) is None:
        options |= dict(mask=mask, bias=bias, alibi_slopes=alibi_slopes, key_mask=key_mask, query_mask=query_mask)
        options |= dict(return_lse=return_lse, backend=backend)
        return attention_varlen(query, key, value, cu_seqlens, cu_seqlens, **options)
    inputs = dict(query=query, key=key, value=value)
    tensors = (x.transpose(0, 1)[None] if isinstance(x, Tensor) and x.dim() == 3 else x for x in inputs.values())
    options |= dict(key_mask=key_mask, query_mask=query_mask)
    arguments = Arguments(*tensors, **options)
    offsets: list[int] = []

    def before() -> None:
        check_tensors(**inputs, cu_seqlens=cu_seqlens)
        for name, x in inputs.items():
            if x.dim() != 3:
                fail(ValueError, name, "rank 3, (rows, H, D)", tuple(x.shape))

    def prepare(call: Call, ranks: Any) -> tuple[Call, dict[str, Any]]:
        if key.shape[0] != query.shape[0]:
            fail(ValueError, "key", f"as many rows as query, {query.shape[0]}", key.shape[0])
        packed = Packed(query, key, value, cu_seqlens, cu_seqlens)
        check_lengths(packed)
        offsets.extend(cu_seqlens.tolist())
        scores = len(offsets) - 1, query.shape[1], *(_longest(offsets),) * 2
        pairs = dict(mask=mask, bias=bias, alibi_slopes=alibi_slopes)
        check_options(Arguments(*call[:3], **pairs), Sizes(query.device, query.dtype, *scores))
        fields = dict(mask=rank4(mask), bias=rank4(bias), alibi_slopes=one_row(alibi_slopes), cu_seqlens_q=cu_seqlens)
        return call._replace(**fields), dict(cu_seqlens=tuple(offsets))

    whole = agreed("gather_attention_varlen", group, balance, arguments, return_lse, backend, prepare, before)
    assert whole is not None
    of_all = query.new_empty(()).expand(whole.total, 1, 1)
    packed = Packed(of_all, of_all, of_all, cu_seqlens, cu_seqlens)
    check_values(packed)
    out, lse = attend(whole, _documents(whole, offsets))
    out = out.squeeze(0).transpose(0, 1)
    return (out, lse.squeeze(0)) if return_lse else out


def _longest(offsets: list[int]) -> int:
    return max([b - a for a, b in itertools.pairwise(offsets)], default=0)


def _documents(whole: Whole, offsets: list[int]) -> list[Piece]:
    """Up to two for each Chunk of rows: of the document that begins before it, and of those that begin in it."""
    made = []
    for chunk in whole.rows[whole.ranks.rank]:
        inside = bisect.bisect_left(offsets, chunk.first, 0, len(offsets) - 1)  # the first that begins in it
        after = bisect.bisect_left(offsets, chunk.last, 0, len(offsets) - 1)
        if chunk.first < chunk.last and offsets[inside] > chunk.first:
            made.append(_document(whole, chunk, offsets, inside - 1, inside))
        if inside < after:
            made.append(_document(whole, chunk, offsets, inside, after))
    return made


def _document(whole: Whole, chunk: Chunk, offsets: list[int], first: int, last: int) -> Piece:
    """Documents first .. last - 1, as far as their rows are in a Chunk; several begin in it."""
    call, begin = whole.call, offsets[first]
    before = max(0, chunk.first - begin)  # rows of the document in front of the chunk
    rows = [min(max(x, chunk.first), chunk.last) for x in offsets[first : last + 1]]
    keys = [x - begin for x in offsets[first : last + 1]]
    most = _longest(rows), _longest(keys)
    here = slice(chunk.at + rows[0] - chunk.first, chunk.at + rows[-1] - chunk.first)

    def cut(x: Tensor) -> Tensor:
        x = x if x.shape[0] == 1 else x[first:last]
        x = x if x.shape[2] == 1 else x[:, :, before : before + most[0]]
        return x if x.shape[3] == 1 else x[..., : most[1]]

    def slopes(x: Tensor) -> Tensor:
        return x if x.shape[0] == 1 else x[first:last]

    def on_device(numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=call.query.device)

    heads = call.query.shape[1]
    fields = dict(
        mask=None if call.mask is None else cut(call.mask),
        query_mask=None if call.query_mask is None else call.query_mask[:, here],
        cu_seqlens_q=on_device([x - rows[0] for x in rows]),
        cu_seqlens_k=on_device(keys),
        max_seqlen_q=most[0],
        max_seqlen_k=most[1],
        origin=list(Origin(before, before, 0, first * heads, heads)),
    )
    return Piece(here, slice(begin, offsets[last]), fields, cut, slopes)
