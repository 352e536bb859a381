"""Attention to key-value caches: only to the filled part of each."""

from torch import Tensor

from ..call.decode import Decode, capacity_of
from ..call.layout import arrange, dense
from ..call.options import Call, wide_dtype
from ..naive import decode as naive
from ..naive.formula import without_autocast
from ..naive.varlen import joined
from . import flash
from .small_k import is_few


@without_autocast
def _of_call(call: Call) -> tuple[Tensor, Tensor]:
    if (everything := flash.at_once(call)) is None:
        result = flash.forward(call, False)
        return result.out, result.lse + result.less
    return flash.attend(*call[:3], everything, None, call.scale, is_few(call))


def attend(decode: Decode) -> tuple[Tensor, Tensor]:
    """Return (output, lse) of attention to the caches. Append new keys first (`naive.decode.append`)."""
    most = capacity_of(decode)
    after = [min(max(length, 0) + decode.added, most) for length in decode.lengths.tolist()]
    call = naive.rotated_query(decode)
    if not after:
        out = dense(call.query, (*call.query.shape[:3], call.value.shape[3]))
        return out, out.new_empty(out.shape[:3], dtype=wide_dtype(call.query.dtype))
    results = [(*_of_call(naive.of_length(call, decode, *run)), None) for run in _runs(decode, after)]
    out, lse, _ = joined(results, 0)
    return arrange(out, call.query), lse


def _runs(decode: Decode, lengths: list[int]) -> list[tuple]:
    """Return the arguments of `naive.of_length` for each run of sequences that are computed together."""
    runs: list[tuple] = list(naive.alike(lengths))
    table, (pages, heads, _, columns) = decode.table, decode.key_cache.shape
    if table is None or table.shape[1] != 1 or pages == 0:
        return runs
    # Sequences of one page are read in place. A call for each takes as long as a gather of 4 * WORTH elements.
    numbers = table[:, 0].clamp(0, pages - 1).tolist()
    found = naive.alike([(length, page - b) for b, (length, page) in enumerate(zip(lengths, numbers, strict=True))])
    views = [(first, last, length, numbers[first]) for first, last, (length, _) in found]
    return views if sum(lengths) * heads * columns > 4 * naive.WORTH * (len(views) - len(runs)) else runs
