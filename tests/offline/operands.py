"""Order of mma.sync operands in registers, from TTGIR."""

import re

# A tensor that is an operand; its width in bits, and how many neighbours along K a thread holds together.
_OPERAND = re.compile(r"x([a-z]+(\d+)), #ttg\.dot_op<\{opIdx = \d, parent = #\w+, kWidth = (\d+)\}>")


def disordered(ttgir):
    """Operands of which a thread holds more neighbours than the 32 bits that one register of mma.sync takes, in words.

    Triton orders them so for the sake of narrower loads (`vocabulary/memory.py`, opaque), by way of shared memory.
    """
    found = {each.groups() for each in _OPERAND.finditer(ttgir)}
    return tuple(sorted(f"{dtype} by {width}" for dtype, bits, width in found if int(bits) * int(width) != 32))
