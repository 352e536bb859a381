"""Ways through compiled code: its blocks, the loops that they make, and one step of a loop that multiplies."""

import itertools
import re
from typing import NamedTuple

from .sass import kind, operation

_JUMPS = re.compile(r"BRA|JMP|CALL")
_ANYWHERE = re.compile(r"BRX|JMX")
_ENDS = re.compile(r"EXIT|RET|KILL|BRX|JMX")
_LEAVES = re.compile(r"EXIT|RET|KILL|BRX|JMX|BRA|JMP")  # unless under a condition
_PRODUCTS = "HGMMA", "HMMA", "FFMA"  # the first of them that there is multiplies the matrices
_EFFECTS = {"tensor", "load", "store", "barrier"}  # kinds of what is not there for a mask, but for what a mask reads
_READS = re.compile(r"LD[SL]\b")  # of one place a lane


class Block(NamedTuple):
    """Instructions that run one after the other, and the indices of the blocks that may follow them."""

    code: tuple
    after: tuple


def _conditional(text):
    """Return whether a jump is conditional: a predicate before it, or operands before its target."""
    return text.startswith("@") or "," in text


def _linked(code):
    """Blocks of [(address, instruction)], less what follows a jump to an address that a table holds."""
    index = {at: i for i, (at, _) in enumerate(code)}
    targets = {
        i: index[int(re.findall(r"0x([0-9a-f]+)", text)[-1], 16)]
        for i, (_, text) in enumerate(code)
        if _JUMPS.match(operation(text))
    }
    last = [i for i, (_, text) in enumerate(code) if i in targets or _ENDS.match(operation(text))]
    starts = sorted({0, *(i + 1 for i in last), *targets.values()} - {len(code)})
    number = {start: n for n, start in enumerate(starts)}
    for start, stop in zip(starts, [*starts[1:], len(code)], strict=True):
        text = code[stop - 1][1]
        goes_on = not _LEAVES.match(operation(text)) or _conditional(text)
        after = [number[stop]] if goes_on and stop < len(code) else []
        after += [number[targets[stop - 1]]] if stop - 1 in targets else []
        yield Block(tuple(text for _, text in code[start:stop]), tuple(after))


def _unled(blocks):
    """First blocks of what no way from the first block leads to, in their order."""
    found, reached = [], set()
    for n in range(len(blocks)):
        if n not in reached:
            found.append(n)
            left = [n]
            while left:
                each = left.pop()
                if each not in reached:
                    reached.add(each)
                    left += blocks[each].after
    return tuple(found[1:])


def blocks(sass):
    """The Blocks of a kernel, the first is where it begins; () of text without instructions.

    A jump to an address that a table holds may lead to whatever else nothing leads to. A call leads to its function,
    and on.
    """
    code = [(int(at, 16), text) for at, text in re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", sass, re.M)]
    if any(at >= following for (at, _), (following, _) in zip(code, code[1:], strict=False)):
        raise ValueError("more than one function in the compiled code, so addresses do not tell where a jump leads")
    if not code:
        return ()
    found = tuple(_linked(code))
    unled = _unled(found)
    return tuple(
        block._replace(after=block.after + unled) if _ANYWHERE.match(operation(block.code[-1])) else block
        for block in found
    )


def _before(blocks):
    """For each block, those that it may follow."""
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
    previous = _before(blocks)
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


def _acts(instruction):
    return kind(instruction) in _EFFECTS and not _READS.match(operation(instruction))


def _turn(blocks, head, body, inner):
    """Instructions of the way once around a loop that has the most effects outside of `inner`, then the shortest."""
    best = {}

    def find(n):
        """(less the effects, instructions, next block) of the best way from a block to the head; None without one."""
        if n not in best:
            best[n] = None  # while it is being found: a way through it again is no way
            ways = [
                (*((0, 0) if follower == head else find(follower)[:2]), follower)
                for follower in blocks[n].after
                if follower == head or (follower in body and find(follower) is not None)
            ]
            if ways:
                effects, length, follower = min(ways)
                if n not in inner:
                    effects -= sum(map(_acts, blocks[n].code))
                best[n] = effects, length + len(blocks[n].code), follower
        return best[n]

    find(head)
    step, n = list(blocks[head].code), best[head][2]
    while n != head:
        step += blocks[n].code
        n = best[n][2]
    return tuple(step)


def steps(sass):
    """One step of each loop that multiplies matrices and has none inside that does, but for those with few products.

    Where masks are a matter of a branch it is a step without, and what only some of the warps store, or wait for in all
    steps but the last, is in it: of the ways around that store, copy, wait and multiply the most, it is the shortest.
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
