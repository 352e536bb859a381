"""Finds operands of mma.sync, in TTGIR, whose order in registers is unfavourable."""

import re

# The dtype of an operand, its bits, and the neighbours along K that a thread holds together.
_OPERAND = re.compile(r"x([a-z]+(\d+)), #ttg\.dot_op<\{opIdx = \d, parent = #\w+, kWidth = (\d+)\}>")


def disordered(ttgir):
    """Return a text for each operand of which a thread holds more neighbours than fit a 32-bit register of mma.sync.

    Triton chooses that order for narrower loads, at the cost of shared memory (`opaque` in `vocabulary/memory.py`).
    """
    found = {each.groups() for each in _OPERAND.finditer(ttgir)}
    return tuple(sorted(f"{dtype} by {width}" for dtype, bits, width in found if int(bits) * int(width) != 32))
