"""Attention with keys and values gathered from all ranks: rows stay, and all options of attention apply.

The backward gathers keys and values again, so that they are not kept. Their gradients are float32 (float64) until they
are summed over ranks. Source: Llama 3, arXiv:2407.21783, section 3.3.2. Cutting documents where a shard ends:
pytorch/pytorch #181078.
"""

import bisect
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..api import attention_varlen
from ..call.options import DIMS, Arguments, Call, Origin, in_full
from ..call.overrides import overridable
from ..call.private import eager
from ..call.rules import Sizes, check_options, check_tensors, fail
from ..call.varlen import VarlenArguments, check_lengths, check_values
from . import ranks as ranks_of
from .global_call import GlobalCall, Piece, agreed, prepared
from .parts import attend, attend_pieces
from .ranks import Ranks
from .shards import Chunk, gathered, scattered

_BY_DOCUMENT = "mask", "bias", "alibi_slopes"  # given for whole documents


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
    """Compute `ring_attention` with all options of `fusedattn.attention` but return_weights. Each rank gets all keys.

    Examples:
        >>> shards = (torch.randn(1, 8, 1000, 64) for _ in range(3))  # of this rank
        >>> fusedattn.distributed.gather_attention(*shards, causal=True).shape
        torch.Size([1, 8, 1000, 64])

    Args:
        mask, bias: for this rank's rows and all keys, in the order of the whole sequence. They broadcast to
            (B, Hq, rows, Sk). The gradient of a bias comes from this rank's rows only.
        key_mask: (B, rows), for this rank's keys.
        query_mask: (B, rows), for this rank's rows.
        All others: as in `ring_attention`; options that it lacks as in `fusedattn.attention`, the same on all ranks.

    Returns:
        the results of `attention` for this rank's rows.

    Raises:
        TypeError, ValueError, NotImplementedError, RuntimeError: as `ring_attention`.
    """
    return attend("gather_attention", locals(), lambda whole: _Keys(_pieces(whole), whole))


def _pieces(whole: GlobalCall) -> list[Piece]:
    """Return a Piece for each Chunk of rows, with the keys that it may see."""
    low, high = whole.sides()
    pieces = []
    for row in whole.rows[whole.ranks.rank]:
        begin = int(min(max(row.first + low, 0), whole.total_keys))
        end = int(max(min(row.last + high, whole.total_keys), begin))
        if row.length:
            pieces.append(Piece(row.in_shard, slice(begin, end), whole.band(row, Chunk(begin, end, begin))))
    return pieces


class _Keys:
    """The keys and values of all ranks, gathered at once, and the Pieces. Gradients return to their ranks."""

    def __init__(self, pieces: list[Piece], whole: GlobalCall):
        self.pieces, self.whole = pieces, whole
        self.totals: list[Tensor | None] = []

    def __iter__(self) -> Iterator[tuple[None, Call, list[Piece]]]:
        fields = {name: getattr(self.whole.call, name) for name in ("key", "value", "key_mask")}
        ranks, keys = self.whole.ranks, self.whole.keys
        fields = {name: gathered(x, DIMS[name].index("K"), ranks, keys) for name, x in fields.items() if x is not None}
        yield None, self.whole.call._replace(**fields), self.pieces

    def give_back(self, owner: int | None, key: Tensor | None, value: Tensor | None) -> None:
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
    """Compute `fusedattn.attention_varlen` of packed documents, which are cut wherever a shard ends.

    Examples:
        >>> shards = (torch.randn(100, 8, 64) for _ in range(3))  # of this rank
        >>> offsets = torch.tensor([0, 30, 30, 100], dtype=torch.int32)  # of the whole
        >>> fusedattn.distributed.gather_attention_varlen(*shards, offsets, causal=True).shape
        torch.Size([100, 8, 64])

    Args:
        query: (rows, Hq, D).
        key, value: (rows, Hkv, D or Dv). The rows that `shard` gives this rank, of all T.
        cu_seqlens: int32 (n + 1,). Document b is rows cu_seqlens[b] to cu_seqlens[b + 1] of all T.
        key_mask, query_mask: bool (rows,).
        mask, bias: for all documents, broadcasting to (n, Hq, longest, longest). The gradient of a bias comes from this
            rank's rows only.
        alibi_slopes: floating (Hq,) or (n, Hq).
        All others: as in `gather_attention`.

    Returns:
        the results of `attention_varlen` for this rank's rows: output (rows, Hq, Dv), lse (Hq, rows).

    Raises:
        TypeError, ValueError, NotImplementedError, RuntimeError: as `ring_attention`.
    """
    given = locals()
    if ranks_of.of(group) is None:
        options = {name: x for name, x in given.items() if name not in ("group", "balance", "cu_seqlens")}
        return attention_varlen(**options, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens)
    offsets: list[int] = []

    def prepare(arguments: Arguments, backend: Any, ranks: Ranks) -> tuple[Call, dict[str, Any]]:
        inputs = dict(query=query, key=key, value=value)
        check_tensors(**inputs, cu_seqlens=cu_seqlens)
        for name, x in inputs.items():
            if x.dim() != 3:
                fail(ValueError, name, "rank 3, (rows, H, D)", x.shape)
        batched: dict[str, Any] = {name: x.transpose(0, 1)[None] for name, x in inputs.items()}
        call, _ = prepared(arguments._replace(**batched, **dict.fromkeys(_BY_DOCUMENT)), backend, ranks)
        if key.shape[0] != query.shape[0]:
            fail(ValueError, "key", f"{query.shape[0]} rows, as query has", key.shape[0])
        check_lengths(VarlenArguments(query, key, value, cu_seqlens, cu_seqlens))
        offsets.extend(cu_seqlens.tolist())
        by_document = {name: getattr(arguments, name) for name in _BY_DOCUMENT}
        sizes = Sizes(query.device, query.dtype, len(offsets) - 1, query.shape[1], *(_longest(offsets),) * 2)
        check_options(Arguments(call.query, call.key, call.value, **by_document), sizes)
        fields: dict[str, Any] = {name: in_full(name, x) for name, x in by_document.items()}
        return call._replace(**fields, cu_seqlens_q=cu_seqlens), dict(cu_seqlens=tuple(offsets))

    whole = agreed("gather_attention_varlen", given, prepare)
    assert whole is not None
    of_all = query.new_empty(()).expand(whole.total_keys, 1, 1)
    check_values(VarlenArguments(of_all, of_all, of_all, cu_seqlens, cu_seqlens))
    out, lse = attend_pieces(whole, functools.partial(_Keys, _documents(whole, offsets)))
    out = out.squeeze(0).transpose(0, 1)
    return (out, lse.squeeze(0)) if return_lse else out


def _longest(offsets: list[int]) -> int:
    return max([b - a for a, b in itertools.pairwise(offsets)], default=0)


def _documents(whole: GlobalCall, offsets: list[int]) -> list[Piece]:
    """Return up to two Pieces for each Chunk of rows: the document that begins before it, and all that begin in it."""
    pieces = []
    for chunk in whole.rows[whole.ranks.rank]:
        inside = bisect.bisect_left(offsets, chunk.first, 0, len(offsets) - 1)  # the first document that begins in it
        after = bisect.bisect_left(offsets, chunk.last, 0, len(offsets) - 1)
        if chunk.length and offsets[inside] > chunk.first:
            pieces.append(_piece(whole, chunk, offsets, inside - 1, inside))
        if inside < after:
            pieces.append(_piece(whole, chunk, offsets, inside, after))
    return pieces


def _piece(whole: GlobalCall, chunk: Chunk, offsets: list[int], first: int, last: int) -> Piece:
    """Return the Piece of documents first .. last - 1, with their rows in a Chunk. Several all begin in it."""
    begin, device, heads = offsets[first], whole.query.device, whole.query.shape[1]
    before = max(0, chunk.first - begin)  # rows of the document in front of the chunk
    rows = [min(max(x, chunk.first), chunk.last) for x in offsets[first : last + 1]]
    keys = [x - begin for x in offsets[first : last + 1]]
    max_rows, max_keys = _longest(rows), _longest(keys)
    fields = dict(
        cu_seqlens_q=torch.tensor([x - rows[0] for x in rows], dtype=torch.int32, device=device),
        cu_seqlens_k=torch.tensor(keys, dtype=torch.int32, device=device),
        max_seqlen_q=max_rows,
        max_seqlen_k=max_keys,
        origin=list(Origin(before, before, 0, first * heads, heads)),
    )
    in_shard = slice(chunk.at + rows[0] - chunk.first, chunk.at + rows[-1] - chunk.first)
    pair_rows, pair_keys = slice(before, before + max_rows), slice(0, max_keys)
    return Piece(in_shard, slice(begin, offsets[last]), fields, slice(first, last), pair_rows, pair_keys)
