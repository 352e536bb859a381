"""How long attention over the ranks of a group takes, predicted from its cost and the speeds of GPUs and links."""

from collections.abc import Iterable
from typing import NamedTuple

from .cost import BACKWARD, METHODS, Flow, Shape, fits, gradients, keys, operations, traffic, whole_of
from .ranks import Ranks
from .shards import rows_of
from .ulysses import heads_of

# Bytes of memory for an element, in float32, of what a part of the keys adds to a sum: the kernel writes it; for the
# output both are scaled (`partial.add`); sums of the gradients of keys are also set to zero, and added at the owner.
OUT_ADDED, QUERY_ADDED, KEYS_ADDED = 32, 16, 32


class Speeds(NamedTuple):
    """What a GPU does in a second: operations, bytes of its memory, and bytes it sends, to its own node and to others.

    node: how many ranks a node has. Each has links of its own, and receives as fast as it sends.
    """

    operations: float
    memory: float
    inside: float
    between: float
    node: int


class Seconds(NamedTuple):
    """Of the rank that takes longest: computing, links in use, and both together, as far as one hides the other."""

    compute: float
    transfer: float
    total: float


def link(speeds: Speeds, messages: Iterable[tuple[bool, int, int]], gathers: bool = False) -> float:
    """Seconds of messages that are under way at once: (whether inside the node, bytes sent, received).

    gathers: what comes from other nodes comes once to a node, over the links of all its ranks, and goes on inside.
    """
    near, far = [0, 0], [0, 0]
    for inside, *sizes in messages:
        for way, size in enumerate(sizes):
            (near if inside else far)[way] += size
    if gathers:
        return max((max(near) + max(far)) / speeds.inside, max(far) / speeds.node / speeds.between)
    return max(max(near) / speeds.inside, max(far) / speeds.between)


def _messages(speeds: Speeds, rank: int, to: int, of: int, flow: Flow) -> list[tuple[bool, int, int]]:
    node = rank // speeds.node
    return [(to // speeds.node == node, flow[rank][to], 0), (of // speeds.node == node, 0, flow[of][rank])]


def of_rank(speeds: Speeds, rank: int, flow: Flow) -> list[tuple[bool, int, int]]:
    """The messages of a rank, as `link` takes them."""
    return [message for peer in range(len(flow)) for message in _messages(speeds, rank, peer, peer, flow)]


def _added(shape: Shape, rows: int, keys: int, backward: bool) -> int:
    """Bytes of memory for what parts of so many rows and keys, counted once for each part, add to the sums."""
    if not backward:
        return OUT_ADDED * shape.batch * shape.heads * shape.value_width * rows
    of_keys = KEYS_ADDED * shape.key_heads * (shape.width + shape.value_width) * keys
    return shape.batch * (QUERY_ADDED * shape.heads * shape.width * rows + of_keys)


def _computed(products: int, added: int, speeds: Speeds, backward: bool) -> float:
    return products * (BACKWARD if backward else 1) / speeds.operations + added / speeds.memory


def _ring(shape: Shape, speeds: Speeds, rank: int, backward: bool) -> Seconds:
    whole, size, sums = whole_of(shape)._replace(ranks=Ranks(None, rank, shape.world)), shape.world, [0.0] * 3
    there, back = keys("ring", shape), gradients("ring", shape)
    for step in range(size + backward):
        busy, messages, owner = 0.0, [], (rank - step) % size
        if step < size and whole.meet(rank, owner):
            pairs = whole.pairs(owner)
            rows, some = (
                sum(x.stop - x.start for x in every) for every in zip(*((a, b) for a, b, _ in pairs), strict=True)
            )
            added = _added(shape, rows, some, backward)
            busy = _computed(operations(shape, rank, owner), added, speeds, backward)
        if step + 1 < size:  # the next keys come
            messages += _messages(speeds, rank, (rank + step + 1) % size, (rank - step - 1) % size, there)
        if backward and step > 1:  # gradients of the step before go
            messages += _messages(speeds, rank, (rank - step + 1) % size, (rank + step - 1) % size, back)
        moving = link(speeds, messages)
        sums = [a + b for a, b in zip(sums, (busy, moving, max(busy, moving)), strict=True)]
    return Seconds(*sums)


def seconds(method: str, shape: Shape, speeds: Speeds, backward: bool = False) -> Seconds:
    """Of a forward or a backward. Ring sends what the next step needs while it computes; the others first, or then."""
    size = shape.world
    if method == "ring":
        return max((_ring(shape, speeds, rank, backward) for rank in range(size)), key=lambda one: one.total)
    if method == "ulysses":
        of_keys = heads_of(shape.heads, shape.key_heads, size).keys
        own = shape._replace(heads=shape.heads // size, key_heads=len(of_keys[0]), world=1, balance=None)
        products, added = operations(own, 0, 0), _added(own, own.length, own.length, backward)
        flows = [traffic(method, shape, backward)]
    else:
        products = max(sum(operations(shape, rank, owner) for owner in range(size)) for rank in range(size))
        added = _added(shape, max(map(rows_of, whole_of(shape).rows)), shape.length, backward)
        flows = [keys(method, shape), *[gradients(method, shape)] * backward]
    transfer = 0.0
    for flow in flows:
        gathers = method == "gather" and flow is flows[0]
        transfer += max(link(speeds, of_rank(speeds, rank, flow), gathers) for rank in range(size))
    compute = _computed(products, added, speeds, backward)
    return Seconds(compute, transfer, compute + transfer)


def step(method: str, shape: Shape, speeds: Speeds) -> float:
    """Seconds of forward and backward."""
    return sum(seconds(method, shape, speeds, backward).total for backward in (False, True))


def fastest(shape: Shape, speeds: Speeds) -> str:
    """The method whose forward and backward take the least time."""
    return min((method for method in METHODS if fits(method, shape)), key=lambda method: step(method, shape, speeds))


def hiding_rows(shape: Shape, speed: float, link: float, backward: bool = False) -> float:
    """How many rows of a rank it takes until what ring sends hides behind products: operations, and bytes, a second.

    Both are of a step whose owner is seen, a causal one by half.
    """
    sent = shape.key_heads * (shape.element + (shape.wide if backward else 0)) / link
    return sent * (2 if shape.causal else 1) * speed / (2 * shape.heads * (BACKWARD if backward else 1))
