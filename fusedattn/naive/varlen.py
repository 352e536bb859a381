"""Splits a packed call into parts of similar lengths, pads each part to a batch, and unpads and joins the results."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..call.options import DIMS, WITH_DIM, Call, is_known, origin_of, sliced
from ..call.padding import Padding, padding

WASTE = 2  # maximum ratio of scores in a padded call to scores of its sequences
SLACK = 2**14  # wasted scores of one head that are cheaper than another call


def padded(call: Call) -> tuple[Call, Padding]:
    """Pad a packed call to a batch of its sequences. Return (padded call, still with offsets; Padding of its rows)."""
    assert call.cu_seqlens_q is not None and call.cu_seqlens_k is not None
    rows = padding(call.cu_seqlens_q, call.query.shape[2], call.max_seqlen_q, "max_seqlen_q")
    keys = padding(call.cu_seqlens_k, call.key.shape[2], call.max_seqlen_k, "max_seqlen_k")

    def pad(where, x):
        return where.pad(x.squeeze(0).transpose(0, 1)).transpose(1, 2)

    def real(where, mask):
        return where.exists if mask is None else where.exists & where.pad(mask[0])

    batch = call._replace(query=pad(rows, call.query), key=pad(keys, call.key), value=pad(keys, call.value))
    masks = dict(query_mask=real(rows, call.query_mask), key_mask=real(keys, call.key_mask))
    return batch._replace(**masks, cu_seqlens_q=rows.offsets, cu_seqlens_k=keys.offsets), rows


def packed(rows: Padding, out: Tensor, lse: Tensor | None, weights: Tensor | None) -> tuple:
    """Convert the results of a padded call back to packed sequences. rows: the Padding from `padded`."""

    def unpad(x, nothing=0.0):  # rows outside of all sequences become `nothing`
        return rows.unpad(x.transpose(1, 2), nothing).transpose(0, 1)[None]

    lse = None if lse is None else unpad(lse, float("-inf")).contiguous()
    return unpad(out), lse, None if weights is None else unpad(weights).contiguous()


def runs(lengths: list[tuple[int, int]], waste: float, slack: float) -> Iterator[tuple[int, int]]:
    """Yield (first, last + 1) of each run of sequences to pad to one length. lengths: (rows, keys) of each sequence."""
    # A padded run has at most `waste` times the scores of its sequences, plus `slack`.
    first, real, max_seqlen_q, max_seqlen_k = 0, 0, 0, 0
    for b, (rows, keys) in enumerate(lengths):
        larger = max(max_seqlen_q, rows), max(max_seqlen_k, keys)
        if (b + 1 - first) * larger[0] * larger[1] > waste * (real + rows * keys) + slack:
            yield first, b
            first, real, larger = b, 0, (rows, keys)
        real += rows * keys
        max_seqlen_q, max_seqlen_k = larger
    yield first, len(lengths)


def sequences(call: Call) -> list[Call]:
    """Split a packed call into runs of sequences of similar lengths, so that padding wastes little."""
    # A call of unknown lengths is not split.
    assert call.cu_seqlens_q is not None and call.cu_seqlens_k is not None
    known = is_known(call.cu_seqlens_q) and is_known(call.cu_seqlens_k)
    if not known or len(call.cu_seqlens_q) == 1:
        return [call]
    rows, keys = call.cu_seqlens_q.tolist(), call.cu_seqlens_k.tolist()
    lengths = list(zip(differences(rows), differences(keys), strict=True))
    return parts_of(call, rows, keys, [first for first, _ in runs(lengths, WASTE, SLACK)] + [len(lengths)])


def of_batches(call: Call, **slices: slice) -> Call:
    """Slice the tensors of a call that have a batch dimension (see `sliced`): B=slice(2, 4) keeps batches 2 and 3."""
    present = {name: x for name in WITH_DIM["B"] if (x := getattr(call, name)) is not None}
    fields: dict[str, Any] = {name: sliced(name, x, None, **slices) for name, x in present.items()}
    return call._replace(**fields)


def differences(offsets: list[int]) -> list[int]:
    return [after - before for before, after in itertools.pairwise(offsets)]


def parts_of(call: Call, rows: list[int], keys: list[int], starts: list[int]) -> list[Call]:
    """Split a packed call before each sequence in `starts`, from 0 to the number of sequences. rows, keys: offsets."""
    assert call.cu_seqlens_q is not None and call.cu_seqlens_k is not None
    sizes = {"B": differences(starts)}
    for letter, offsets, x in (("Q", rows, call.query), ("K", keys, call.key)):
        sizes[letter] = differences([0, *(offsets[b] for b in starts), x.shape[2]])  # first and last: tokens of no part

    def cut(name: str, x: Tensor) -> Sequence[Tensor]:
        letters = DIMS[name]
        letter = next((x for x in "QK" if x in letters), None) if letters != "BHQK" else None
        # Use `split`, not slices: the gradient of each slice would be as large as x.
        if letter is not None:
            return x.split(sizes[letter], letters.index(letter))[1:-1]
        return x.split(sizes["B"]) if x.shape[0] > 1 else [x] * len(sizes["B"])

    fields = {name: cut(name, x) for name in WITH_DIM["B"] if (x := getattr(call, name)) is not None}
    origin, parts = origin_of(call), []
    for (first, last), *values in zip(itertools.pairwise(starts), *fields.values(), strict=True):
        max_seqlen_q, max_seqlen_k = (max(differences(x[first : last + 1])) for x in (rows, keys))
        own: dict[str, Any] = dict(zip(fields, values, strict=True))
        for name in own.keys() & {"mask", "bias"}:  # these count from the start of each sequence
            own[name] = sliced(name, own[name], Q=slice(max_seqlen_q), K=slice(max_seqlen_k))
        own |= dict(cu_seqlens_q=call.cu_seqlens_q[first : last + 1] - rows[first], max_seqlen_q=max_seqlen_q)
        own |= dict(cu_seqlens_k=call.cu_seqlens_k[first : last + 1] - keys[first], max_seqlen_k=max_seqlen_k)
        parts.append(call._replace(**own, origin=origin._replace(plane=origin.plane + first * origin.heads)))
    return parts


def joined(results: list[tuple], axis: int, columns: int | None = None) -> tuple:
    """Concatenate the (output, lse, weights) of a call's parts; pad weights to `columns`. Any result may be None."""
    outs, lses, weights = zip(*results, strict=True)
    assert weights[0] is None or columns is not None or len(weights) == 1, "weights of parts differ in width"
    if weights[0] is not None and columns is not None:
        weights = tuple(torch.nn.functional.pad(x, (0, columns - x.shape[3])) for x in weights)
    return join(outs, axis), join(lses, axis), join(weights, axis)


def join(parts: Sequence[Any], axis: int) -> Any:
    """Concatenate tensors along an axis, or return None if the first is None."""
    return parts[0] if len(parts) == 1 or parts[0] is None else torch.cat(list(parts), axis)
