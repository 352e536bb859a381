"""Cuts a call into blocks whose scores fit a cache: some planes (batch and head), rows, and the keys they see."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..call.options import Call, Origin, diagonal, plain, with_dims
from ..call.private import tracing

# Bytes of scores of a block, per core. On an EPYC with 1 MiB L2 and 32 MiB L3 (torch 2.13), blocks of 2**28 took 2 to 3
# times as long, forward and backward. Sizes from 2**20 to 2**23 differed little.
CACHE = 2**21
# Rows of a block: if all rows see all keys, and if a band hides some keys.
ROWS, CUT_ROWS = 256, 128


class Block(NamedTuple):
    """Rows first .. last - 1 of a call, and keys begin .. end - 1, which include all that these rows see."""

    first: int
    last: int
    begin: int
    end: int


class Part(NamedTuple):
    """Some planes of a call as a call of their own, its blocks, and the plane numbers (B, Hq) for dropout, or None."""

    call: Call
    planes: Tensor | None
    blocks: list[Block]


def uncut(call: Call) -> Part:
    """Return a whole call as one Part of one block."""
    (batch, heads, rows, _), device = call.query.shape, call.query.device
    planes = None if call.seed is None else torch.arange(batch * heads, device=device).view(batch, heads)
    if planes is not None and call.origin is not None:
        origin = Origin(*call.origin)
        planes = origin.plane + planes % max(1, heads) + planes // max(1, heads) * origin.heads
    return Part(call, planes, [Block(0, rows, 0, call.key.shape[2])])


def sized(call: Call) -> bool:
    """Return whether sizes are plain numbers. A compiler would guard on them and compile each length anew."""
    if torch.compiler.is_compiling() or tracing():
        return False
    batch, heads, rows, _ = call.query.shape
    return type(batch) is type(heads) is type(rows) is type(call.key.shape[2]) is int


def readable(call: Call) -> bool:
    """Return whether values can be read without a host sync, a graph break, or an error in a transform."""
    return not torch.compiler.is_compiling() and call.query.device.type == "cpu" and plain(call)


def known_diagonal(call: Call) -> int | None:
    """Return the offset of the diagonal; None if sequences differ in it, or sizes are symbolic."""
    if (call.cu_seqlens_q is not None and not call.top_left) or not sized(call):
        return None
    return diagonal(call)


def block(call: Call, first: int, last: int) -> Block:
    """Return the block of some rows, with the keys that causal and window leave them."""
    keys, offset = call.key.shape[2], known_diagonal(call)
    if offset is None:
        return Block(first, last, 0, keys)
    begin = 0 if call.left is None else min(keys, max(0, first + offset - call.left))
    end = keys if call.right is None else min(keys, max(begin, last + offset + call.right))
    return Block(first, last, begin, end)


def spans(rows: int, step: int) -> Iterator[tuple[int, int]]:
    """Yield (first, last + 1) for every `step` rows, and for the rest."""
    step = max(1, step)
    return ((first, min(first + step, rows)) for first in range(0, rows, step))


def parts(call: Call, limit: int, cut_rows: int = CUT_ROWS, all_rows: int = ROWS) -> list[list[Part]]:
    """Return a call cut into Parts, [batches][heads], and those into blocks of at most `limit` bytes of scores.

    A block has at least one row of one key head. cut_rows: most rows of a block if a band hides keys; all_rows: if not.
    """
    whole, (batch, heads, rows, _) = uncut(call), call.query.shape
    if 0 in (batch, heads, rows):
        return [[whole]]
    keys, cut = call.key.shape[2], (call.left, call.right) != (None, None) and known_diagonal(call) is not None
    height = min(rows, cut_rows if cut else all_rows)
    if cut and call.left is not None and call.right is not None:
        keys = min(keys, height + call.left + call.right)
    row_bytes = max(1, keys) * call.query.element_size()
    group = heads // call.key.shape[1]
    count = min(batch * heads, max(group, limit // (height * row_bytes)))  # planes in a block
    step = max(1, limit // (count * row_bytes))
    step = min(step, height) if cut else step
    blocks = [block(call, *span) for span in spans(rows, step)]
    if count == batch * heads:
        return [[Part(_flat(call) if len(blocks) > 1 else call, whole.planes, blocks)]]
    batches, heads = max(1, count // heads), min(heads, count // group * group)
    return [
        [Part(_flat(part), own, blocks) for part, own in _pieces(some, numbers, 1, heads)]
        for some, numbers in _pieces(call, whole.planes, 0, batches)
    ]


def _flat(call: Call) -> Call:
    """Return the call with keys and values whose batches and heads flatten to a view, so that no block copies them."""

    def flat(x: Tensor) -> Tensor:
        return x if 1 in x.shape[:2] or x.stride(0) == x.stride(1) * x.shape[1] else x.contiguous()

    return call._replace(key=flat(call.key), value=flat(call.value))


def _split(x: Tensor | None, size: int, dim: int, length: int) -> list | tuple:
    """Return pieces of x along a dimension of this length, or repeat x if it is broadcast there."""
    count = -(-length // size)
    # By `split`: the gradient of each slice would be as large as the whole tensor.
    return [x] * count if x is None or count == 1 or x.shape[dim] != length else x.split(size, dim)


def _pieces(call: Call, planes: Tensor | None, axis: int, size: int) -> Iterator[tuple[Call, Tensor | None]]:
    """Yield (call, planes) of `size` batches (axis 0) or heads (axis 1) at a time."""
    whole, key_heads = call.query.shape[axis], call.key.shape[1]
    pieces = {name: _split(getattr(call, name), size, axis, whole) for name in with_dims("BH"[axis])}
    if axis == 1:
        own_heads = size * key_heads // whole
        pieces |= {name: _split(getattr(call, name), own_heads, 1, key_heads) for name in with_dims("G")}
    elif call.cu_seqlens_q is not None and call.cu_seqlens_k is not None:
        offsets = dict(cu_seqlens_q=call.cu_seqlens_q, cu_seqlens_k=call.cu_seqlens_k)
        for name, x in offsets.items():
            pieces[name] = [x[first : first + size + 1] for first in range(0, whole, size)]
    for own, *fields in zip(_split(planes, size, axis, whole), *pieces.values(), strict=True):
        yield call._replace(**dict(zip(pieces, fields, strict=True))), own
