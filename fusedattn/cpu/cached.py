"""Calls to caches: keys are read as far as the lengths reach, and appended where they end."""

from collections.abc import Iterator

import torch
from torch import Tensor

from ..call.cached import Decode, room
from ..call.form import Call
from ..call.layout import dense
from ..naive import cached as naive
from ..naive.formula import without_autocast
from . import flash


def _alike(lengths: list[int]) -> Iterator[tuple[int, int, int]]:
    """(first, last + 1, length) of consecutive sequences of one length."""
    first = 0
    for number, length in enumerate(lengths):
        if number + 1 == len(lengths) or lengths[number + 1] != length:
            yield first, number + 1, length
            first = number + 1


def append(decode: Decode) -> None:
    """Write what is new into the caches."""
    if decode.new_key is None or decode.new_value is None:
        return
    lengths = decode.lengths.tolist()
    fits = lengths and min(lengths) >= 0 and max(lengths) + decode.added <= room(decode)
    if decode.table is not None or decode.cos is not None or not fits:
        naive.append(decode)
        return
    for first, last, length in _alike(lengths):
        for cache, new in ((decode.key_cache, decode.new_key), (decode.value_cache, decode.new_value)):
            cache[first:last, :, length : length + decode.added] = new[first:last]


@without_autocast
def _attend(call: Call, decode: Decode, need_weights: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    most = room(decode)
    after = [min(max(length, 0) + decode.added, most) for length in decode.lengths.tolist()]
    call = naive.turned(decode)
    runs, capacity, results = list(_alike(after)), call.key.shape[2], []
    for first, last, length in runs:
        short = naive.of_length(call, decode, first, last, length)
        out, lse, _ = flash.forward(short, False)
        results.append((out, lse, flash.weights(short, lse, capacity) if need_weights else None))
    if len(results) == 1:
        return results[0]
    out = dense(call.query, (*call.query.shape[:3], call.value.shape[3]))
    lse = out.new_empty(out.shape[:3], dtype=torch.promote_types(out.dtype, torch.float32))
    weights = out.new_empty(*out.shape[:3], capacity) if need_weights else None
    for (first, last, _), result in zip(runs, results, strict=True):
        for x, part in zip((out, lse, weights), result, strict=True):
            if x is not None and part is not None:
                x[first:last] = part
    return out, lse, weights


def attend(decode: Decode, need_weights: bool = False) -> tuple[Tensor, Tensor, Tensor | None]:
    """(output, lse, weights or None) of a call to caches that what is new has been appended to."""
    return _attend(decode.call, decode, need_weights)
