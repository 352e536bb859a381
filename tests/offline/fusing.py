"""Finds multiplications and additions of PTX that ptxas may fuse, because neither has a rounding mode."""

import re

_INSTRUCTION = re.compile(r"^\s*(?:@!?%p\d+\s+)?([a-z][\w.:]*)\s+(%\w+)(?:\|%p\d+)?,([^;]*);", re.MULTILINE)


def left(ptx):
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
