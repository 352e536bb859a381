"""Translates PTX instructions into lines of Python for all lanes at once, a file for each family."""

from . import arithmetic, control, copies, matrices, memory, values, warps
from .emitter import Emitter
from .operands import TYPES, UNSIGNED

FAMILIES = arithmetic, control, copies, matrices, memory, values, warps  # imported, they have registered themselves
__all__ = ["FAMILIES", "TYPES", "UNSIGNED", "Emitter"]
