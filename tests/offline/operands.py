"""Finds operands of mma.sync (in TTGIR) in an unfavourable order, and sums (in PTX) that ptxas may fuse."""

import re

# The dtype of an operand, its bits, and the neighbours along K that a thread holds together.
_OPERAND = re.compile(r"x([a-z]+(\d+)), #ttg\.dot_op<\{opIdx = \d, parent = #\w+, kWidth = (\d+)\}>")
_INSTRUCTION = re.compile(r"^\s*(?:@!?%p\d+\s+)?([a-z][\w.:]*)\s+(%\w+)(?:\|%p\d+)?,([^;]*);", re.MULTILINE)


def disordered(ttgir):
    """Return a text for each operand of which a thread holds more neighbours than fit a 32-bit register of mma.sync.

    Triton chooses that order for narrower loads, at the cost of shared memory (`opaque` in `vocabulary/memory.py`).
    """
    found = {each.groups() for each in _OPERAND.finditer(ttgir)}
    return tuple(sorted(f"{dtype} by {width}" for dtype, bits, width in found if int(bits) * int(width) != 32))


def fusible(ptx):
    """Return the additions in PTX that ptxas may fuse with the multiplication of an operand (PTX ISA, "add").

    Sums between lanes must not be among them: each lane would round differently (`vocabulary/row_sums.py`).
    """
    products, found = set(), []
    for instruction in _INSTRUCTION.finditer(ptx):
        name, result, operands = instruction.groups()
        operands = re.findall(r"%\w+", operands)
        if re.fullmatch(r"(add|sub)(\.ftz)?\.f(32|64)", name) and not products.isdisjoint(operands):
            found.append(instruction[0].strip())
        if re.fullmatch(r"mul(\.ftz)?\.f(32|64)", name) or (
            name.startswith("mov.") and operands[:1] and operands[0] in products
        ):
            products.add(result)
        else:
            products.discard(result)
    return found
