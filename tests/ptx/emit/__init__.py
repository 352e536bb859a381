"""Translation of PTX instructions into lines of Python for all lanes at once. Each family has a file."""

from . import arithmetic, control, copies, matrices, memory, values, warps
from .emitter import Emitter
from .operands import TYPES, UNSIGNED

FAMILIES = arithmetic, control, copies, matrices, memory, values, warps  # importing them registers their instructions
__all__ = ["FAMILIES", "TYPES", "UNSIGNED", "Emitter"]
