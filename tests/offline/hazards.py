"""Finds hazards of wgmma (asynchronous matrix products) and copies in SASS, the machine code of NVIDIA GPUs.

A wgmma reads its left operand from registers while it runs. ptxas before 13.3 may overwrite them before the wait that
ends it (triton-lang/triton#9433). Operands must be written before the fence of the product. Triton 3.6 and 3.7 move
left operands behind that fence (fixed by triton-lang/triton#9530), and ptxas moves them back.
"""

import re

from . import flow
from .sass import operation

_LEFT = re.compile(r"HGMMA\S* R\d+, R(\d+), gdesc")
_LEFT_REGISTERS = 4  # 64 rows x 32 bytes, over 128 threads
_COMMIT = re.compile(r"\bgsb0$")
_WAIT = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x([0-9a-f]+)$")
_OPEN = -1  # age of a product whose group is not committed
_OLDEST = 63  # no wait allows so many groups in flight

# Instructions without a result in registers: their first register, if any, is read.
_NO_RESULT = re.compile(
    r"ST|RED|BRX|JMX|CALL|RET|BAR|NANOSLEEP|WARPSYNC|BMOV|R2P|FCHK|CCTL|DEPBAR|[A-Z]*SETP|UTMA|LDGSTS|R2UR"
)
_PREDICATE = re.compile(r"!?U?P(\d|T|R)$")


def _width(name):
    """Return the number of registers that hold an instruction's result, or an upper bound."""
    matrix = re.match(r"HGMMA\.\d+x(\d+)x", name)
    if matrix:
        return int(matrix[1]) // (2 if ".F32" in name else 4)
    if name.startswith(("HMMA", "IMMA", "DMMA")):
        return 4
    if name.startswith("LDSM"):
        return int(name[-1]) if name[-1] in "24" else 1
    if name.startswith("CS2R"):
        return 1 if ".32" in name else 2
    wide = re.search(r"[.FSU](64|128)\b", name)
    if wide and not name.startswith("SHF"):
        return int(wide[1]) // 32
    return 2 if ".WIDE" in name or re.match(r"D(ADD|MUL|FMA|MNMX)", name) else 1


def written(instruction):
    """Return the numbers of the registers that an instruction writes."""
    name = operation(instruction)
    if not name or _NO_RESULT.match(name):
        return range(0)
    operands = instruction.partition(name)[2].strip().split(", ")
    first = next((text for text in operands if not _PREDICATE.match(text)), "")
    register = re.match(r"R(\d+)$", first)
    return range(int(register[1]), int(register[1]) + _width(name)) if register else range(0)


def _merged(*states):
    """Return the union of states {register: (age, wgmma)}, with the youngest wgmma that reads each register."""
    found = {}
    for state in states:
        for register, reader in state.items():
            found[register] = min(found.get(register, reader), reader)
    return found


def _after(state, instruction):
    """Return {register: (age, wgmma)} of what wgmma may still read after an instruction; age counts later groups."""
    left, wait, name = _LEFT.search(instruction), _WAIT.search(instruction), operation(instruction)
    if not name.startswith(("HGMMA", "WARPGROUP.DEPBAR")):
        return state
    found = dict(state)
    if left:
        found |= {int(left[1]) + i: (_OPEN, instruction) for i in range(_LEFT_REGISTERS)}
    if name.startswith("HGMMA") and _COMMIT.search(instruction):
        found = {register: (min(age + 1, _OLDEST), product) for register, (age, product) in found.items()}
    if wait:
        found = {register: reader for register, reader in found.items() if reader[0] < int(wait[1], 16)}
    return _merged(state, found) if instruction.startswith("@") else found


def _over_all_ways(code, start, merged, after):
    """Follow all paths through basic blocks: `after` updates a state, `merged` joins states where paths meet."""
    starts, left = [None] * len(code), list(range(min(1, len(code))))
    starts[:1] = [start] * len(left)
    while left:
        n = left.pop()
        state = starts[n]
        for instruction in code[n].code:
            state = after(state, instruction)
        for follower in code[n].after:
            both = state if starts[follower] is None else merged(starts[follower], state)
            if both != starts[follower]:
                starts[follower] = both
                left.append(follower)


def overwritten(sass):
    """Return a text for each register that is overwritten while wgmma may still read it, on any path."""
    found = {}

    def after(state, instruction):
        for register in written(instruction):
            if register in state:
                found[instruction, register] = (
                    f"'{instruction}' writes R{register}, which '{state[register][1]}' may still read"
                )
        return _after(state, instruction)

    _over_all_ways(flow.blocks(sass), {}, _merged, after)
    return tuple(found.values())


def _read(product):
    """Return the registers that a wgmma instruction reads: its sums, and its left operand if it is in registers."""
    left, sums = _LEFT.search(product), re.search(r"HGMMA\S* R\d+, .*gdesc\S*, (R\d+|!UPT|RZ)", product)
    registers = list(range(int(left[1]), int(left[1]) + _LEFT_REGISTERS)) if left else []
    if sums and sums[1][1:].isdigit():
        first = int(sums[1][1:])
        registers += range(first, first + _width(operation(product)))
    return registers


def unfenced(sass):
    """Return a text for each register of a wgmma that is written after the wgmma's fence, on any path.

    Source: PTX ISA, "wgmma.fence".
    """
    found = {}

    def after(state, instruction):  # state: registers written since the last fence
        name = operation(instruction)
        if name == "WARPGROUP.ARRIVE" and not instruction.startswith("@"):
            return frozenset()
        if name.startswith("HGMMA"):
            for register in state.intersection(_read(instruction)):
                found[instruction, register] = (
                    f"'{instruction}' reads R{register}, which was written after the fence before it"
                )
            return state
        return state.union(written(instruction))

    _over_all_ways(flow.blocks(sass), frozenset(), frozenset.union, after)
    return tuple(found.values())


# A barrier of all warps, at the start and end of a warp-specialised partition.
_ALL_MEET = re.compile(r"BAR\.SYNC\S* 0x1$")


def _repeated(code):
    """Return the instructions that a thread may execute again within a partition of a warp-specialised kernel."""
    found = set()
    within = [not any(map(_ALL_MEET.match, block.code)) for block in code]
    for n, block in enumerate(code):
        seen, left = set(), list(block.after)
        while left:
            follower = left.pop()
            if within[follower] and follower not in seen:
                seen.add(follower)
                left += code[follower].after
        found.update(block.code if n in seen else ())
    return found


RUNNING = ("a product of these warps may be running", (), False)


def given_back(sass):
    """Return a text for each load that may read a tile of shared memory after the tile was released, on any path.

    On an H200 such a load caused wrong gradients.

    A load waits in a queue, behind products among others. An arrival does not wait for it; only a use of its result
    does, even one that a predicate skips. Once all have arrived, the copy engine may overwrite the place.
    Loads of operands (LDSM) outside loops do not count, and loads of a partition's arguments, before its first barrier
    of all warps: their place is not in a ring and is never overwritten. An arrival that expects bytes starts a copy,
    which takes longer than a load unless a product delays the load.
    """
    found, code = {}, flow.blocks(sass)
    again = _repeated(code)

    def is_load(instruction, name):
        return name.startswith("LDSM") and instruction in again or re.match(r"LDS\b", name)

    def after(state, instruction):  # state: unused loads with their registers, and whether a product was running
        if _ALL_MEET.match(instruction):
            return state & {RUNNING}
        name, new = operation(instruction), written(instruction)
        used = {int(number) for number in re.findall(r"\bR(\d+)\b", instruction)}.union(new)
        state = frozenset(each for each in state if used.isdisjoint(each[1]))
        if name.startswith("SYNCS.ARRIVE"):
            gives = ".A1T0" in name
            loads = {load for load, _, waits in state - {RUNNING} if gives or waits}
            for load in loads:
                found[instruction, load] = f"'{instruction}' gives memory back that '{load}' may not have read"
        if name.startswith("HGMMA"):
            return state | {RUNNING}
        wait = _WAIT.match(instruction)
        if wait and int(wait[1], 16) == 0:
            return state - {RUNNING}
        return state | {(instruction, new, RUNNING in state)} if new and is_load(instruction, name) else state

    _over_all_ways(code, frozenset(), frozenset.union, after)
    return tuple(found.values())


def overlapped(step):
    """Return (number of exponentials that run during a wgmma, number of exponentials) in one step of a loop.

    A product runs from its first instruction to a wait after its last one, which commits it.
    """
    running, begun, counted = 0, False, (0, 0)
    for _ in range(2):  # the first pass finds the products that run when a step begins
        under = total = 0
        for instruction in step:
            name, wait = operation(instruction), _WAIT.search(instruction)
            if name.startswith("HGMMA"):
                begun = not _COMMIT.search(instruction)
                running += not begun
            running = min(running, int(wait[1], 16)) if wait else running
            if name == "MUFU.EX2":
                total += 1
                under += begun or running > 0
        counted = under, total
    return counted
