"""Keys and values of all ranks on each: rows stay, and every option of attention holds for them.

What is gathered is not kept for the backward: it is gathered again. Gradients of keys and values are float32 (float64)
until those of all ranks are added up. Source: Llama 3, arXiv:2407.21783, section 3.3.2; for documents, the cut of
cu_seqlens where a shard ends, pytorch/pytorch #181078.
"""

import bisect
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..api import attention_varlen
from ..call.options import Arguments, Call, Origin, add_batch_dim as one_row, add_head_dim
from ..call.overrides import overridable
from ..call.private import eager
from ..call.rules import Sizes, check_options, check_tensors, fail
from ..call.varlen import VarlenArguments, check_lengths, check_values
from . import ranks as ranks_of
from .global_call import GlobalCall, Piece, agreed, arguments_of, attend_alone
from .parts import attend
from .shards import Chunk, gathered, scattered

_BY_DOCUMENT = "mask", "bias", "alibi_slopes"  # of the whole, not of the rank's rows


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
    arguments = arguments_of(locals())
    whole = agreed("gather_attention", group, balance, arguments, backend, return_lse)
    if whole is None:
        return attend_alone(arguments, return_lse=return_lse, backend=backend)
    out, lse = attend(whole, functools.partial(_Keys, _pieces(whole)))
    return (out, lse) if return_lse else out


def _pieces(whole: GlobalCall) -> list[Piece]:
    """Return a Piece for each Chunk of rows, with the keys that it may see."""
    low, high = whole.sides()
    pieces = []
    for row in whole.rows[whole.ranks.rank]:
        begin = int(min(max(row.first + low, 0), whole.total))
        end = int(max(min(row.last + high, whole.total), begin))
        if row.length:
            pieces.append(Piece(row.here, slice(begin, end), whole.band(row, Chunk(begin, end, begin))))
    return pieces


class _Keys:
    """The keys and values of all ranks at once, for some Pieces. Their gradients are scattered."""

    def __init__(self, pieces: list[Piece], whole: GlobalCall):
        self.pieces, self.whole = pieces, whole
        self.totals: list[Tensor | None] = []

    def __iter__(self) -> Iterator[tuple[int, Call, list[Piece]]]:
        call, ranks, keys = self.whole.call, self.whole.ranks, self.whole.keys
        key, value = (gathered(x, 2, ranks, keys) for x in call[1:3])
        key_mask = None if call.key_mask is None else gathered(call.key_mask, 1, ranks, keys)
        yield ranks.rank, call._replace(key=key, value=value, key_mask=key_mask), self.pieces

    def wanted(self, owner: int) -> set[str]:
        return {name for name in ("key", "value") if self.whole.wanted(name)}

    def give_back(self, owner: int, key: Tensor | None, value: Tensor | None) -> None:
        self.totals = [key, value]

    def gradients(self) -> tuple[Tensor | None, Tensor | None]:
        ranks, keys = self.whole.ranks, self.whole.keys
        key, value = (None if x is None else scattered(x, 2, ranks, keys) for x in self.totals)
        return key, value


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
    arguments = arguments_of(locals())
    pairs: dict[str, Any] = {name: getattr(arguments, name) for name in _BY_DOCUMENT}
    inputs = dict(query=query, key=key, value=value)
    if ranks_of.of(group) is None:
        options = arguments._asdict() | dict(return_lse=return_lse, backend=backend)
        return attention_varlen(**options, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens)
    tensors = {
        name: x.transpose(0, 1)[None] if isinstance(x, Tensor) and x.dim() == 3 else x for name, x in inputs.items()
    }
    arguments = arguments._replace(**tensors)
    offsets: list[int] = []

    def before() -> None:
        check_tensors(**inputs, cu_seqlens=cu_seqlens)
        for name, x in inputs.items():
            if x.dim() != 3:
                fail(ValueError, name, "rank 3, (rows, H, D)", tuple(x.shape))

    def prepare(call: Call, ranks: Any) -> tuple[Call, dict[str, Any]]:
        if key.shape[0] != query.shape[0]:
            fail(ValueError, "key", f"as many rows as query, {query.shape[0]}", key.shape[0])
        packed = VarlenArguments(query, key, value, cu_seqlens, cu_seqlens)
        check_lengths(packed)
        offsets.extend(cu_seqlens.tolist())
        scores = len(offsets) - 1, query.shape[1], *(_longest(offsets),) * 2
        check_options(Arguments(*call[:3], **pairs), Sizes(query.device, query.dtype, *scores))
        mask, bias, slopes = add_head_dim(pairs["mask"]), add_head_dim(pairs["bias"]), one_row(pairs["alibi_slopes"])
        fields = dict(mask=mask, bias=bias, alibi_slopes=slopes, cu_seqlens_q=cu_seqlens)
        return call._replace(**fields), dict(cu_seqlens=tuple(offsets))

    of_rank = arguments._replace(**dict.fromkeys(_BY_DOCUMENT))
    whole = agreed(
        "gather_attention_varlen", group, balance, of_rank, backend, return_lse, prepare=prepare, before=before
    )
    assert whole is not None
    of_all = query.new_empty(()).expand(whole.total, 1, 1)
    packed = VarlenArguments(of_all, of_all, of_all, cu_seqlens, cu_seqlens)
    check_values(packed)
    out, lse = attend(whole, functools.partial(_Keys, _documents(whole, offsets)))
    out = out.squeeze(0).transpose(0, 1)
    return (out, lse.squeeze(0)) if return_lse else out


def _longest(offsets: list[int]) -> int:
    return max([b - a for a, b in itertools.pairwise(offsets)], default=0)


def _documents(whole: GlobalCall, offsets: list[int]) -> list[Piece]:
    """Return up to two Pieces a Chunk of rows: the document that begins before it, and those that begin in it."""
    pieces = []
    for chunk in whole.rows[whole.ranks.rank]:
        inside = bisect.bisect_left(offsets, chunk.first, 0, len(offsets) - 1)  # the first that begins in it
        after = bisect.bisect_left(offsets, chunk.last, 0, len(offsets) - 1)
        if chunk.length and offsets[inside] > chunk.first:
            pieces.append(_piece(whole, chunk, offsets, inside - 1, inside))
        if inside < after:
            pieces.append(_piece(whole, chunk, offsets, inside, after))
    return pieces


def _piece(whole: GlobalCall, chunk: Chunk, offsets: list[int], first: int, last: int) -> Piece:
    """Return the Piece of documents first .. last - 1, with their rows in a Chunk; several begin in it."""
    begin, device, heads = offsets[first], whole.call.query.device, whole.call.query.shape[1]
    before = max(0, chunk.first - begin)  # rows of the document in front of the chunk
    rows = [min(max(x, chunk.first), chunk.last) for x in offsets[first : last + 1]]
    keys = [x - begin for x in offsets[first : last + 1]]
    most_rows, most_keys = _longest(rows), _longest(keys)
    fields = dict(
        cu_seqlens_q=torch.tensor([x - rows[0] for x in rows], dtype=torch.int32, device=device),
        cu_seqlens_k=torch.tensor(keys, dtype=torch.int32, device=device),
        max_seqlen_q=most_rows,
        max_seqlen_k=most_keys,
        origin=list(Origin(before, before, 0, first * heads, heads)),
    )
    here = slice(chunk.at + rows[0] - chunk.first, chunk.at + rows[-1] - chunk.first)
    pair_rows, pair_keys = slice(before, before + most_rows), slice(0, most_keys)
    return Piece(here, slice(begin, offsets[last]), fields, slice(first, last), pair_rows, pair_keys)
