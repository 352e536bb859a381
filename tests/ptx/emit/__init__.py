"""Translation of PTX instructions into lines of Python that act on all lanes (threads) at once; one file per family."""

from . import arithmetic, control, copies, matrices, memory, values, warps
from .emitter import Emitter
from .operands import TYPES, UNSIGNED

FAMILIES = arithmetic, control, copies, matrices, memory, values, warps  # importing them registers their instructions
__all__ = ["FAMILIES", "TYPES", "UNSIGNED", "Emitter"]
