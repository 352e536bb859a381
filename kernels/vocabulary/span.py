"""The rows, keys and blocks of a program, and the band: the stripe of pairs that causal and window leave visible."""

from typing import NamedTuple

import triton
import triton.language as tl


class Sequences(NamedTuple):
    """Tables of packed sequences: slots (sequence, block), and extents (first row, rows, first key, keys) of each."""

    slots: tl.tensor
    extents: tl.tensor


class Packed(NamedTuple):
    """Position of a packed sequence: its first row and key, the total rows and keys, and the program's slot or ()."""

    row: tl.tensor
    key: tl.tensor
    rows: tl.tensor
    keys: tl.tensor
    slot: tl.tensor


class Plane(NamedTuple):
    """One head of one batch, and its index among all (batch, head) planes.

    `packed` is () if nothing is packed, not None: Triton 3.6 makes tensors of the constants that a function returns.
    """

    batch: tl.tensor
    head: tl.tensor
    index: tl.tensor
    packed: Packed


class Band(NamedTuple):
    """Visible pairs of rows x keys: row r sees keys r + low .. r + high, and has the position of key r + diagonal."""

    rows: tl.tensor
    keys: tl.tensor
    low: tl.tensor
    high: tl.tensor
    diagonal: tl.tensor


@triton.jit
def place(pid, length, heads, BLOCK: tl.constexpr):
    """Return (block of rows, Plane) of a program. Grids use only axis x, because y and z are limited to 65,535."""
    blocks = tl.cdiv(length, BLOCK)
    index = pid // blocks
    return pid % blocks, Plane(index // heads, index % heads, index, ())


@triton.jit
def within(extents, plane, q_len, k_len, slot):
    """Return (Plane with offsets, rows, keys) of a packed sequence. If extents is None, return the arguments."""
    if extents is None:
        return plane, q_len, k_len
    else:
        extent = extents + tl.cast(plane.batch, tl.int64) * 4
        packed = Packed(tl.load(extent), tl.load(extent + 2), q_len, k_len, slot)
        return Plane(plane.batch, plane.head, plane.index, packed), tl.load(extent + 1), tl.load(extent + 3)


@triton.jit
def locate(sequences, q_len, k_len, heads, BLOCK: tl.constexpr, BY_KEYS: tl.constexpr, across=1, number=None):
    """Return (block of rows or keys, Plane, number of rows, number of keys) of program `number`; None is this one."""
    # `across` programs share a block. Programs of packed sequences take all slots of one head before the next head, to
    # read the same keys. An unused slot has no rows and no keys. Its block of rows is -1; `latest_first` maps it to 0.
    pid, programs = tl.program_id(0) // across, tl.num_programs(0) // across
    if number is not None:
        pid = number
    if sequences is None:
        block, plane = place(pid, k_len if BY_KEYS else q_len, heads, BLOCK)
        return block, plane, q_len, k_len
    else:
        slots = programs // heads
        slot, head = pid % slots, pid // slots
        entry = sequences.slots + slot.to(tl.int64) * 2
        batch, block = tl.load(entry), tl.load(entry + 1)
        none, batch = block < 0, tl.maximum(batch, 0)
        if BY_KEYS:
            block = tl.maximum(block, 0)
        plane = Plane(batch, head, batch * heads + head, ())
        plane, rows, keys = within(sequences.extents, plane, q_len, k_len, slot)
        return block, plane, tl.where(none, 0, rows), tl.where(none, 0, keys)


@triton.jit
def padded(plane, block, ROWS: tl.constexpr):
    """Return (batch, block) of a block of rows in a buffer where each packed sequence starts with a new block."""
    # Sequence i begins at block (its first row) // ROWS + i. All earlier sequences end before that block.
    if len(plane.packed) == 0:
        return plane.batch, block
    else:
        return plane.batch * 0, plane.packed.row // ROWS + plane.batch + block


@triton.jit
def place_tile(rows, keys, heads, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return (block of rows, block of keys, Plane) of a program in a grid of one program per tile."""
    pid, across = tl.program_id(0), tl.cdiv(keys, BLOCK_N)
    block, plane = place(pid // across, rows, heads, BLOCK_M)
    return block, pid % across, plane


@triton.jit
def latest_first(block, length, BLOCK: tl.constexpr):
    """Return the first row of block number `block` from the end: causal grids begin with the most work."""
    return (tl.cdiv(length, BLOCK) - 1 - block) * BLOCK


@triton.jit
def query_head(plane, i, GROUP: tl.constexpr):
    """Return the Plane (batch and head) of query head i of the GROUP heads that share the kv head of `plane`."""
    return Plane(plane.batch, plane.head * GROUP + i, plane.index * GROUP + i, plane.packed)


@triton.jit
def kv_head(plane, GROUP: tl.constexpr):
    return Plane(plane.batch, plane.head // GROUP, plane.index // GROUP, plane.packed)


@triton.jit
def band(rows, keys, left, right, TOP_LEFT: tl.constexpr):
    """Return the Band of a window of `left` and `right` keys; None is unbounded, causal is right = 0."""
    # With TOP_LEFT row 0 has the position of key 0, otherwise the last row has the position of the last key.
    diagonal = 0 if TOP_LEFT else keys - rows
    low = -rows if left is None else diagonal - left
    high = keys if right is None else diagonal + right
    return Band(rows, keys, low, high, diagonal)


@triton.jit
def flip(b):
    """Return the transposed band, with rows and keys swapped: key c is seen by rows c + low .. c + high."""
    return Band(b.keys, b.rows, -b.high, -b.low, -b.diagonal)


@triton.jit
def inside(b, r, c):
    """Return True for pairs within the band. r and c are [n, 1] and [1, m], or the reverse."""
    # Rows past the end need no test: they load as zeros, contribute nothing and are not stored.
    return (c >= r + b.low) & (c <= tl.minimum(r + b.high, b.keys - 1))


@triton.jit
def first_to_see(b, c):
    """Return the first row that sees key c, c - high (may be negative), or 2**31 - 1 for a key past the end."""
    return tl.where(c < b.keys, c - b.high, 0x7FFFFFFF)


@triton.jit
def blocks(b, first, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Return (begin, full, full_end, end) of the key blocks that rows first .. first + ROWS - 1 see.

    Every row sees every key of blocks [full, full_end), which need no mask. [begin, full) and [full_end, end) need one:

                 begin    full       full_end   end
        first      |  . x x|x x x x x x x|x .     |
                   |    . x|x x x x x x x|x x .   |
        last       |      .|x x x x x x x|x x x . |
    """
    last = tl.minimum(first + ROWS, b.rows) - 1
    begin = tl.maximum(first + b.low, 0) // BLOCK
    end = tl.cdiv(tl.maximum(tl.minimum(last + b.high + 1, b.keys), 0), BLOCK)
    full = tl.cdiv(tl.maximum(last + b.low, 0), BLOCK)
    full_end = tl.maximum(tl.minimum(first + b.high + 1, b.keys), 0) // BLOCK
    full = tl.minimum(tl.maximum(full, begin), end)
    return begin, full, tl.minimum(tl.maximum(full_end, full), end), end


@triton.jit
def masked_past(ranges, n, length):
    """Return the ranges of `blocks`, with a mask for every block if n, the end of the tile, is past `length`."""
    # Without a mask a key past the end has score 0 and weight exp(-lse). If this weight is inf, dq gets inf * 0.
    begin, full, full_end, end = ranges
    return begin, full, tl.where(n <= length, full_end, full), end
