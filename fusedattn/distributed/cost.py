"""What attention over the ranks of a group costs: the bytes that go from one to another, and operations.

Of calls whose query, key and value want gradients, whose keys are as many as rows, and without masks, sinks and slopes.
"""

import functools
from typing import NamedTuple

import torch

from ..call.form import Call
from .ranks import WORDS, Ranks
from .shards import Chunk, chunks, rows_of
from .ulysses import heads_of
from .whole import Whole

METHODS = "ring", "gather", "ulysses"
BACKWARD = 2.5  # five products where the forward has two


class Shape(NamedTuple):
    """A call of `world` ranks: sizes of the whole, and the bytes of an element."""

    batch: int
    length: int
    heads: int
    key_heads: int
    width: int
    value_width: int
    element: int
    world: int
    balance: str | None = None
    causal: bool = False
    window: tuple[int | None, int | None] | None = None

    @property
    def wide(self) -> int:
        """Bytes of an element of what is not rounded yet: float32, or float64."""
        return max(4, self.element)


Flow = list[list[int]]  # bytes from each rank to each other


def fits(method: str, shape: Shape) -> bool:
    """Whether a method takes a call: ulysses wants heads that the ranks divide."""
    return method != "ulysses" or shape.heads % shape.world == 0


@functools.lru_cache(64)
def whole_of(shape: Shape) -> Whole:
    """The Whole of a call, of tensors without rows; as rank 0 has it."""
    left, right = shape.window or (None, None)

    def empty(heads: int, width: int) -> torch.Tensor:
        return torch.empty(shape.batch, heads, 0, width, device="meta")

    key, value = (empty(shape.key_heads, width) for width in (shape.width, shape.value_width))
    query, right = empty(shape.heads, shape.width), 0 if shape.causal else right
    call = Call(query, key, value, left=left, right=right, top_left=True)
    every = chunks(shape.length, shape.world, shape.balance)
    return Whole("cost", Ranks(None, 0, shape.world), call, every, every, 0, [])


@functools.lru_cache(64)
def keys(method: str, shape: Shape) -> Flow:
    """Bytes of keys and values that ring and gather send, once in the forward and once more in the backward."""
    rows = [rows_of(some) for some in whole_of(shape).keys]
    rows = [max(rows)] * shape.world if method == "gather" else rows  # all_gather has one size
    return _by_owner(method, shape, [n * shape.element for n in rows])


@functools.lru_cache(64)
def gradients(method: str, shape: Shape) -> Flow:
    """Bytes of the gradients of keys and values that ring and gather send to their owners."""
    there = _by_owner(method, shape, [rows_of(some) * shape.wide for some in whole_of(shape).keys])
    return [list(column) for column in zip(*there, strict=True)]


def _by_owner(method: str, shape: Shape, rows: list[int]) -> Flow:
    """What owners send of their rows, each of so many bytes for an element: to all, or to those that see them."""
    whole, ranks, row = whole_of(shape), range(shape.world), shape.batch * shape.key_heads
    row *= shape.width + shape.value_width
    return [
        [row * n * (owner != rank and (method == "gather" or whole.meet(rank, owner))) for rank in ranks]
        for owner, n in enumerate(rows)
    ]


def _exchanged(shape: Shape, backward: bool) -> Flow:
    """Of ulysses: what goes to heads, and what comes back to rows, the lse among it."""
    heads, own, element = heads_of(shape.heads, shape.key_heads, shape.world), shape.heads // shape.world, shape.element
    both = [len(some) * (shape.width + shape.value_width) for some in heads.keys]
    if backward:
        there = [own * shape.value_width * element] * shape.world
        back = [own * shape.width * element + n * (shape.wide if heads.repeated else element) for n in both]
    else:
        there = [own * shape.width * element + n * element for n in both]
        back = [own * (shape.value_width * element + shape.wide)] * shape.world
    rows, ranks = [rows_of(some) for some in chunks(shape.length, shape.world, None)], range(shape.world)
    return [[shape.batch * (there[b] * rows[a] + back[a] * rows[b]) * (a != b) for b in ranks] for a in ranks]


def traffic(method: str, shape: Shape, backward: bool = False) -> Flow:
    """Bytes of tensors from each rank, the first index, to each other. Before a forward there is an `agreement`."""
    if method == "ulysses":
        return _exchanged(shape, backward)
    every = [keys(method, shape), *[gradients(method, shape)] * backward]
    return [[sum(some) for some in zip(*rows, strict=True)] for rows in zip(*every, strict=True)]


def agreement(world: int) -> Flow:
    """Bytes of what the ranks of a call agree on: what each says to rank 0, and the table of all back."""
    return [[8 * WORDS * (a != b) * (world * (a == 0) + (b == 0)) for b in range(world)] for a in range(world)]


@functools.lru_cache(4096)
def _pairs(rows: Chunk, keys: Chunk, low: float, high: float) -> int:
    """How many pairs of a row i and a key j with i + low <= j <= i + high."""
    count = keys.last - keys.first

    def before(row: int) -> int:
        """Of all rows before one: keys in front of each."""
        seen = min(max(row - keys.first, 0), count)
        return seen * (seen - 1) // 2 + max(row - keys.first - count, 0) * count

    def up_to(side: float) -> int:
        if abs(side) == float("inf"):
            return count * (rows.last - rows.first) * (side > 0)
        return before(rows.last + int(side) + 1) - before(rows.first + int(side) + 1)

    return up_to(high) - up_to(low - 1)


def operations(shape: Shape, rank: int, owner: int) -> int:
    """Operations of the products of a forward: of the rows of a rank and the keys of an owner that they see."""
    whole = whole_of(shape)
    pairs = sum(_pairs(row, key, *whole.sides()) for row in whole.rows[rank] for key in whole.keys[owner])
    return 2 * shape.batch * shape.heads * (shape.width + shape.value_width) * pairs
