"""Attention with keys and values gathered from all ranks. Rows stay on their rank. It lacks return_weights and plans.

The backward gathers keys and values again instead of saving them. Their gradients are summed over ranks in float32, or
float64 for float64 inputs. Source: Llama 3, arXiv:2407.21783, section 3.3.2. Documents are cut where a shard ends, as
in pytorch/pytorch #181078.
"""

import bisect
import functools
from typing import Any

import torch
from torch import Tensor

from ..api import attention_varlen
from ..call.checks import check_place, check_rank, fail, overridable
from ..call.options import DIMS, Arguments, Call, Lengths, Origin
from ..call.private import eager
from ..call.rules import Sizes
from ..call.varlen import check_lengths
from ..naive.varlen import differences
from .global_call import GlobalCall, Piece, agreed, attend, attend_globally, prepared
from .parts import Compute, in_pieces
from .shards import Chunk, gathered, scattered


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
    """Compute `fusedattn.attention` over a sequence split among ranks, each of which gathers all keys and values.

    Examples:
        >>> shards = (torch.randn(1, 8, 1000, 64) for _ in range(3))  # of this rank
        >>> fusedattn.distributed.gather_attention(*shards, causal=True).shape
        torch.Size([1, 8, 1000, 64])

    Args:
        mask, bias: for this rank's rows and all keys, in the order of the whole sequence. They broadcast to
            (B, Hq, rows, Sk). The gradient of a bias comes from this rank's rows only.
        key_mask: bool (B, rows), for this rank's keys.
        query_mask: bool (B, rows), for this rank's rows.
        All others: as in `ring_attention` or, if it lacks them, in `fusedattn.attention`; the same on all ranks.

    Returns:
        the results of `attention` for this rank's rows.

    Raises:
        TypeError, ValueError, NotImplementedError, RuntimeError: as `ring_attention`.
    """
    return attend(gather_attention, locals(), in_pieces(_gather))


def _gather(whole: GlobalCall, compute: Compute, pieces: list[Piece] | None = None) -> dict[str, Tensor]:
    """Call `compute` with the keys and values of all ranks, and sum the gradients over the ranks."""
    fields = {name: getattr(whole.call, name) for name in ("key", "value", "key_mask")}
    for name, x in fields.items():
        fields[name] = None if x is None else gathered(x, DIMS[name].index("K"), whole.ranks, whole.keys)
    pieces = whole.pieces([Chunk(0, whole.total_keys, 0)]) if pieces is None else pieces
    grads = compute(None, whole.call._replace(**fields), pieces)
    return {name: scattered(x, 2, whole.ranks, whole.keys) for name, x in grads.items()}


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
    """Compute `fusedattn.attention_varlen` of packed documents split among ranks; a shard may end inside a document.

    Examples:
        >>> shards = (torch.randn(100, 8, 64) for _ in range(3))  # of this rank
        >>> offsets = torch.tensor([0, 30, 30, 100], dtype=torch.int32)  # of the whole sequence
        >>> fusedattn.distributed.gather_attention_varlen(*shards, offsets, causal=True).shape
        torch.Size([100, 8, 64])

    Args:
        query: (rows, Hq, D).
        key, value: (rows, Hkv, D or Dv). rows: the number that `shard` gives this rank.
        cu_seqlens: int32 (n + 1,). Document b is rows cu_seqlens[b] to cu_seqlens[b + 1] - 1 of the whole sequence.
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

    def prepare(arguments: Arguments, backend: Any) -> Call:
        inputs = dict(query=query, key=key, value=value)
        check_place("cu_seqlens", cu_seqlens)
        for name, x in inputs.items():
            check_place(name, x)
            check_rank(name, x, "(rows, H, D)")
        if key.shape[0] != query.shape[0]:
            fail(ValueError, "key", f"{query.shape[0]} rows, as query has", key.shape[0])
        check_lengths(Lengths(cu_seqlens, cu_seqlens, query.shape[0], key.shape[0], None, None), query.device)
        longest = max(differences(cu_seqlens.tolist()), default=0)
        sizes = Sizes(query.device, query.dtype, len(cu_seqlens) - 1, query.shape[1], longest, longest)
        batched: dict[str, Any] = {name: x.transpose(0, 1)[None] for name, x in inputs.items()}
        call = prepared(arguments._replace(**batched), backend, ("mask", "bias", "alibi_slopes"), sizes)
        return call._replace(cu_seqlens_q=cu_seqlens)

    if (whole := agreed("gather_attention_varlen", given, prepare)) is None:
        options = {name: x for name, x in given.items() if name not in ("group", "balance", "cu_seqlens")}
        return attention_varlen(**options, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens)
    lengths = Lengths(cu_seqlens, cu_seqlens, whole.total_keys, whole.total_keys, None, None)
    check_lengths(lengths, query.device, values=True)
    pieces = _documents(whole, cu_seqlens.tolist())
    out, lse, _ = attend_globally(whole, in_pieces(functools.partial(_gather, pieces=pieces)))
    assert out is not None
    out = out.squeeze(0).transpose(0, 1)
    return out if lse is None else (out, lse.squeeze(0))


def _documents(whole: GlobalCall, offsets: list[int]) -> list[Piece]:
    """Return up to two Pieces per Chunk of rows: one for a document begun before it, one for all begun in it."""
    pieces = []
    for chunk in whole.rows[whole.ranks.rank]:
        # Documents `inside` .. `after` - 1 begin in the chunk.
        inside, after = (bisect.bisect_left(offsets, row, 0, len(offsets) - 1) for row in chunk[:2])
        if chunk.length and offsets[inside] > chunk.first:
            pieces.append(_piece(whole, chunk, offsets, inside - 1, inside))
        if inside < after:
            pieces.append(_piece(whole, chunk, offsets, inside, after))
    return pieces


def _piece(whole: GlobalCall, chunk: Chunk, offsets: list[int], first: int, last: int) -> Piece:
    """Return the Piece for documents first .. last - 1 in a Chunk. Only the first may begin before the Chunk."""
    begin, device, heads = offsets[first], whole.query.device, whole.query.shape[1]
    before = max(0, chunk.first - begin)  # rows of the first document before the chunk
    rows = [min(max(x, chunk.first), chunk.last) - chunk.first for x in offsets[first : last + 1]]
    keys = [x - begin for x in offsets[first : last + 1]]
    max_rows, max_keys = max(differences(rows)), max(differences(keys))
    cu_q, cu_k = (torch.tensor(each, dtype=torch.int32, device=device) - each[0] for each in (rows, keys))
    fields = dict(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=max_rows, max_seqlen_k=max_keys)
    fields |= dict(origin=list(Origin(before, before, 0, first * heads, heads)))
    in_shard, pair_rows = slice(chunk.at + rows[0], chunk.at + rows[-1]), slice(before, before + max_rows)
    return Piece(in_shard, slice(begin, offsets[last]), fields, slice(first, last), pair_rows, slice(0, max_keys))
