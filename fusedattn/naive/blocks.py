"""Cuts a call into blocks (rows, and the keys they see) whose scores fit a cache. A plane is one head of one batch."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..call.checks import plain
from ..call.options import WITH_DIM, Call, diagonal, origin_of
from ..call.private import tracing

# Bytes of a block's scores, per core. On an EPYC with 1 MiB L2 and 32 MiB L3 (torch 2.13), blocks of 2**28 took 2 to 3
# times as long, forward and backward. Sizes from 2**20 to 2**23 differed little.
CACHE = 2**21
ROWS, CUT_ROWS = 256, 128  # intended rows of a block; maximum rows with causal or window


class Block(NamedTuple):
    """Rows first .. last - 1 of a call, and keys begin .. end - 1, which include all keys that these rows see."""

    first: int
    last: int
    begin: int
    end: int


def whole_block(call: Call) -> Block:
    return Block(0, call.query.shape[2], 0, call.key.shape[2])


def sized(call: Call) -> bool:
    """Return whether a call's sizes are Python ints. Compiled code that reads sizes is recompiled for each length."""
    if torch.compiler.is_compiling() or tracing():
        return False
    batch, heads, rows, _ = call.query.shape
    return type(batch) is type(heads) is type(rows) is type(call.key.shape[2]) is int


def readable(call: Call) -> bool:
    """Return whether a call's values can be read without a host sync, a graph break, or an error in a transform."""
    return not torch.compiler.is_compiling() and call.query.device.type == "cpu" and plain(call)


def known_diagonal(call: Call) -> int | None:
    """Return the position of the key aligned with row 0; None if it differs by sequence, or if sizes are symbolic."""
    if (call.cu_seqlens_q is not None and not call.top_left) or not sized(call):
        return None
    return diagonal(call)


def block(call: Call, first: int, last: int) -> Block:
    """Return the block of rows first .. last - 1, with the keys that causal and window leave visible."""
    keys, offset = call.key.shape[2], known_diagonal(call)
    if offset is None:
        return Block(first, last, 0, keys)
    begin = 0 if call.left is None else min(keys, max(0, first + offset - call.left))
    end = keys if call.right is None else min(keys, max(begin, last + offset + call.right))
    return Block(first, last, begin, end)


def spans(rows: int, step: int) -> Iterator[tuple[int, int]]:
    """Yield (first, last + 1) of spans of `step` rows; the last span may be shorter."""
    step = max(1, step)
    return ((first, min(first + step, rows)) for first in range(0, rows, step))


def parts(call: Call, limit: int) -> tuple[list[list[Call]], list[Block]]:
    """Return (a list for each span of batches, with a Call for each span of heads; the blocks of each Call)."""
    # A block has at most `limit` bytes of scores, but at least one row of the query heads of one key head.
    batch, heads, rows, _ = call.query.shape
    if 0 in (batch, heads, rows):
        return [[call]], [whole_block(call)]
    keys, cut = call.key.shape[2], (call.left, call.right) != (None, None) and known_diagonal(call) is not None
    height = min(rows, CUT_ROWS if cut else ROWS)
    if cut and call.left is not None and call.right is not None:
        keys = min(keys, height + call.left + call.right)
    row_bytes = max(1, keys) * call.query.element_size()
    group = heads // call.key.shape[1]
    count = min(batch * heads, max(group, limit // (height * row_bytes)))  # planes in a block
    step = max(1, limit // (count * row_bytes))
    step = min(step, height) if cut else step
    blocks = [block(call, *span) for span in spans(rows, step)]
    if count == batch * heads:
        return [[_flat(call) if len(blocks) > 1 else call]], blocks
    batches, heads = max(1, count // heads), min(heads, count // group * group)
    return [[_flat(part) for part in _cut(some, 1, heads)] for some in _cut(call, 0, batches)], blocks


def _flat(call: Call) -> Call:
    """Copy keys and values whose batches and heads do not flatten to a view. Otherwise each block would copy them."""

    def flat(x: Tensor) -> Tensor:
        return x if 1 in x.shape[:2] or x.stride(0) == x.stride(1) * x.shape[1] else x.contiguous()

    return call._replace(key=flat(call.key), value=flat(call.value))


def _split(x: Tensor | None, size: int, dim: int, length: int) -> list | tuple:
    """Split x into pieces of `size` along a dimension. Repeat x if it is None or has a length other than `length`."""
    count = -(-length // size)
    # Use `split`, not slices: the gradient of each slice would be as large as x.
    return [x] * count if x is None or count == 1 or x.shape[dim] != length else x.split(size, dim)


def _cut(call: Call, axis: int, size: int) -> Iterator[Call]:
    """Split a call by batches (axis 0) or heads (axis 1), and yield a call of `size` of them at a time."""
    whole, kv_heads, origin = call.query.shape[axis], call.key.shape[1], origin_of(call)
    fields: dict[str, Any] = {name: _split(getattr(call, name), size, axis, whole) for name in WITH_DIM["BH"[axis]]}
    if axis == 1:
        fields |= {name: _split(getattr(call, name), size * kv_heads // whole, 1, kv_heads) for name in WITH_DIM["G"]}
    elif call.cu_seqlens_q is not None and call.cu_seqlens_k is not None:
        for name, x in dict(cu_seqlens_q=call.cu_seqlens_q, cu_seqlens_k=call.cu_seqlens_k).items():
            fields[name] = [x[first : first + size + 1] for first in range(0, whole, size)]
    step = 1 if axis == 1 else origin.heads
    fields["origin"] = [origin._replace(plane=origin.plane + first * step) for first in range(0, whole, size)]
    for values in zip(*fields.values(), strict=True):
        yield call._replace(**dict(zip(fields, values, strict=True)))
