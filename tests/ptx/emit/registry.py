"""Registry of the functions that emit instructions."""

import functools
from typing import NamedTuple

_INSTRUCTIONS = {}  # {(name, type): (modifiers, function)}


class Op(NamedTuple):
    """An instruction's name, the modifiers behind it, and its type, or "" where its name says it all."""

    name: str
    words: tuple
    kind: str


def instruction(names, types="", modifiers=""):
    """Registers what emits instructions: a function of the Emitter, the Op and the operands.

    Args:
        names: all that the function emits, separated by spaces. Of two that fit, the longer counts.
        types: those that end the instruction's text.
        modifiers: those that may be between its name and its type, in any order. With any other it is unsupported.
    """

    def register(function):
        for name in names.split():
            for kind in types.split() or [""]:
                _INSTRUCTIONS[name, kind] = frozenset(modifiers.split()), function
        return function

    return register


@functools.cache
def lookup(text):
    """(function, Op) of an instruction without its operands, or (None, None)."""
    parts = text.split(".")
    for length in range(len(parts), 0, -1):
        name, rest = ".".join(parts[:length]), tuple(parts[length:])
        for words, kind in ((rest[:-1], "".join(rest[-1:])), (rest, "")):
            modifiers, function = _INSTRUCTIONS.get((name, kind), (frozenset(), None))
            if function is not None and modifiers.issuperset(words):
                return function, Op(name, words, kind)
    return None, None
