"""Registry of the functions that emit instructions, by PTX name and type."""

import functools
from typing import NamedTuple

_INSTRUCTIONS = {}  # {(name, type): (modifiers, function)}


class Op(NamedTuple):
    """An instruction's name, the modifiers after it, and its type; "" if the name already says the type."""

    name: str
    words: tuple
    kind: str


def instruction(names, types="", modifiers=""):
    """Register a function of (Emitter, Op, *operands) for instructions.

    Args:
        names: instruction names, separated by spaces. The longest name that fits an instruction wins.
        types: types that end the instruction's text.
        modifiers: modifiers allowed between name and type, in any order. Any other makes the instruction unsupported.
    """

    def register(function):
        for name in names.split():
            for kind in types.split() or [""]:
                _INSTRUCTIONS[name, kind] = frozenset(modifiers.split()), function
        return function

    return register


@functools.cache
def lookup(text):
    """Return (function, Op) for the text of an instruction without operands; (None, None) if it is unknown."""
    parts = text.split(".")
    for length in range(len(parts), 0, -1):
        name, rest = ".".join(parts[:length]), tuple(parts[length:])
        for words, kind in ((rest[:-1], "".join(rest[-1:])), (rest, "")):
            modifiers, function = _INSTRUCTIONS.get((name, kind), (frozenset(), None))
            if function is not None and modifiers.issuperset(words):
                return function, Op(name, words, kind)
    return None, None
