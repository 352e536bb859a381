"""Ways through compiled code: its blocks, the loops that they make, and one turn of a loop that multiplies."""

import itertools
import re
from typing import NamedTuple

from .sass import operation

_ENDS = re.compile(r"EXIT|RET|KILL")
_ANYWHERE = re.compile(r"BRX|JMX")
_JUMPS = re.compile(r"BRA|JMP|CALL")
_PRODUCTS = "HGMMA", "HMMA", "FFMA"  # the first of them that there is multiplies the matrices
_WAIT = "SYNCS.PHASECHK"  # on a barrier in shared memory


class Block(NamedTuple):
    """Instructions that run one after the other, and the indices of the blocks that may follow them."""

    code: tuple
    after: tuple


def _conditional(text):
    """Whether a jump may not be taken: it has a predicate before it, or operands before its target."""
    return text.startswith("@") or "," in text


def blocks(sass):
    """The Blocks of a kernel, the first is where it begins; () of text without instructions.

    A jump to an address that a table holds may lead to whatever nothing else leads to. A call may lead to its function,
    and on.
    """
    code = [(int(at, 16), text) for at, text in re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", sass, re.M)]
    if any(at >= following for (at, _), (following, _) in zip(code, code[1:], strict=False)):
        raise ValueError("more than one function in the compiled code, so addresses do not tell where a jump leads")
    ends, targets = set(), {}  # by index of the instruction: after which a block ends, and where it may jump
    index = {at: i for i, (at, _) in enumerate(code)}
    for i, (_, text) in enumerate(code):
        name = operation(text)
        if _JUMPS.match(name):
            targets[i] = index[int(re.findall(r"0x([0-9a-f]+)", text)[-1], 16)]
        if _JUMPS.match(name) or _ENDS.match(name) or _ANYWHERE.match(name):
            ends.add(i)
    starts = sorted({0} | {i + 1 for i in ends if i + 1 < len(code)} | set(targets.values())) if code else []
    number = {start: n for n, start in enumerate(starts)}
    found = []
    for start, stop in zip(starts, [*starts[1:], len(code)], strict=True):
        text, name = code[stop - 1][1], operation(code[stop - 1][1])
        goes_on = stop - 1 not in ends or name.startswith("CALL") or _conditional(text)
        after = [number[stop]] if goes_on and stop < len(code) else []
        after += [number[targets[stop - 1]]] if stop - 1 in targets else []
        found.append(Block(tuple(text for _, text in code[start:stop]), tuple(after)))
    free, reached = [], set()
    for n in range(len(found)):
        if n not in reached:
            free.append(n)
            left = [n]
            while left:
                each = left.pop()
                if each not in reached:
                    reached.add(each)
                    left += found[each].after
    unled = tuple(free[1:])
    return tuple(
        block._replace(after=block.after + unled) if _ANYWHERE.match(operation(block.code[-1])) else block
        for block in found
    )


def before(blocks):
    """For each of the Blocks, the indices of those that it may follow."""
    found = [[] for _ in blocks]
    for n, block in enumerate(blocks):
        for follower in block.after:
            found[follower].append(n)
    return found


def _dominators(blocks, before):
    """For each block, as bits, those that every way to it passes."""
    everything = (1 << len(blocks)) - 1
    found = [1, *[everything] * (len(blocks) - 1)]
    changed = True
    while changed:
        changed = False
        for n in range(1, len(blocks)):
            bits = everything if before[n] else 0
            for previous in before[n]:
                bits &= found[previous]
            bits |= 1 << n
            changed |= bits != found[n]
            found[n] = bits
    return found


def loops(blocks):
    """{first block: all blocks} of each loop, by index: those that a way back to the first leads through."""
    if not blocks:
        return {}
    previous = before(blocks)
    dominators, found = _dominators(blocks, previous), {}
    for n, block in enumerate(blocks):
        for head in block.after:
            if dominators[n] >> head & 1:
                body, left = found.setdefault(head, {head}), [n]
                while left:
                    each = left.pop()
                    if each not in body:
                        body.add(each)
                        left += previous[each]
    return found


def _turn(blocks, head, body, inner):
    """Instructions of the way once around a loop that has the most waits outside of `inner`, then the shortest.

    Nothing is masked on it, and a wait for what comes next is not skipped as it is in the last turn.
    """
    best = {}

    def find(n):
        """(waits less, instructions, next block) of the best way from a block to the head; None if there is none."""
        if n not in best:
            best[n] = None  # while it is being found: a way through it again is no way
            ways = [
                (*((0, 0) if follower == head else find(follower)[:2]), follower)
                for follower in blocks[n].after
                if follower == head or (follower in body and find(follower) is not None)
            ]
            if ways:
                waits, length, follower = min(ways)
                if n not in inner:
                    waits -= sum(operation(text).startswith(_WAIT) for text in blocks[n].code)
                best[n] = waits, length + len(blocks[n].code), follower
        return best[n]

    find(head)
    turn, n = list(blocks[head].code), best[head][2]
    while n != head:
        turn += blocks[n].code
        n = best[n][2]
    return tuple(turn)


def turns(sass):
    """One turn of each loop that multiplies matrices and has none inside that does, but for those with few products.

    Where masks are a matter of a branch it is a turn without: the shortest way through the loop, though not past a wait
    on a barrier.
    """
    code = blocks(sass)
    names = [[operation(text) for text in block.code] for block in code]
    product = next((each for each in _PRODUCTS if any(name.startswith(each) for name in itertools.chain(*names))), "-")
    products = [sum(name.startswith(product) for name in each) for each in names]
    found = loops(code)

    def inside(head):
        return [other for other in found if other != head and other in found[head]]

    count = {head: sum(products[n] for n in body) for head, body in found.items()}
    innermost = [head for head in found if count[head] and not any(count[other] for other in inside(head))]
    most = max((count[head] for head in innermost), default=0)
    return tuple(
        _turn(code, head, found[head], set().union(*(found[other] for other in inside(head))))
        for head in innermost
        if 2 * count[head] >= most
    )
