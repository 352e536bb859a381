"""Control flow of SASS: basic blocks, loops, and one step of each loop that multiplies matrices."""

import itertools
import re
from typing import NamedTuple

from .sass import kind, operation

_JUMPS = re.compile(r"BRA|JMP|CALL")
_ANYWHERE = re.compile(r"BRX|JMX")
_ENDS = re.compile(r"EXIT|RET|KILL|BRX|JMX")
_LEAVES = re.compile(r"EXIT|RET|KILL|BRX|JMX|BRA|JMP")  # each ends its block, unless it has a predicate
_PRODUCTS = "HGMMA", "HMMA", "FFMA"  # the first of them that occurs multiplies the matrices
_EFFECTS = {"tensor", "load", "store", "barrier"}  # kinds of instructions that masks lack, except _MASKING
_MASKING = re.compile(r"(LD[SL]|STL)\b")  # not LDSM, which loads matrices. Masks may spill: STL, LDL


class Block(NamedTuple):
    """A basic block: its instructions, and the indices of the blocks that may follow."""

    code: tuple
    after: tuple


def _linked(code):
    """Yield the basic Blocks of [(address, instruction)], with their successors, except those of a jump by a table."""
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
        # A conditional jump has a predicate before it, or operands before its target.
        goes_on = not _LEAVES.match(operation(text)) or text.startswith("@") or "," in text
        after = [number[stop]] if goes_on and stop < len(code) else []
        after += [number[targets[stop - 1]]] if stop - 1 in targets else []
        yield Block(tuple(text for _, text in code[start:stop]), tuple(after))


def _unled(blocks):
    """Return, in order, the first block of each piece of code that only a jump by a table can lead to."""
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
    """Return the basic Blocks of a kernel's SASS, entry first; () for text without instructions.

    A jump by a table may lead to any code that nothing else leads to. A call leads to its function and to the next
    block.
    """
    code = [(int(at, 16), text) for at, text in re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", sass, re.M)]
    if any(at >= following for (at, _), (following, _) in zip(code, code[1:], strict=False)):
        raise ValueError("more than one function in the compiled code: targets of jumps are ambiguous")
    if not code:
        return ()
    found = tuple(_linked(code))
    unled = _unled(found)
    return tuple(
        block._replace(after=block.after + unled) if _ANYWHERE.match(operation(block.code[-1])) else block
        for block in found
    )


def _dominators(blocks, before):
    """Return the dominators of each block, as a bit mask of block indices."""
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
    """Return {first block: all blocks} of each natural loop, by block index."""
    if not blocks:
        return {}
    previous = [[] for _ in blocks]
    for n, block in enumerate(blocks):
        for follower in block.after:
            previous[follower].append(n)
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
    """Return one step of a loop: the path with the most effects (such as loads) outside `inner`, then the shortest."""
    best = {}

    def find(n):
        """Return (minus effects, length, next block) of the best path from block n to the loop's head, or None."""
        if n not in best:
            best[n] = None  # None until a path is found, so that paths through this block again do not count
            ways = [
                (*((0, 0) if follower == head else find(follower)[:2]), follower)
                for follower in blocks[n].after
                if follower == head or (follower in body and find(follower) is not None)
            ]
            if ways:
                effects, length, follower = min(ways)
                if n not in inner:
                    effects -= sum(kind(x) in _EFFECTS and not _MASKING.match(operation(x)) for x in blocks[n].code)
                best[n] = effects, length + len(blocks[n].code), follower
        return best[n]

    find(head)
    step, n = list(blocks[head].code), best[head][2]
    while n != head:
        step += blocks[n].code
        n = best[n][2]
    return tuple(step)


def steps(sass):
    """Return one step of each innermost loop of matrix products, except for loops with few products.

    Of the paths around a loop that store, copy, wait and multiply the most, the step is the shortest. So it has no
    masks that a branch skips, but stores of some warps, and waits of all steps but the last.
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
