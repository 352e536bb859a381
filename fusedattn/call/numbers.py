"""Type checks of numbers, which accept NumPy's scalars like Python's numbers."""

import numbers
from typing import Any

import torch

# Types that torch.compile traces. They are in tuples, because torch 2.10 does not trace isinstance of a union.
_INTS = (int, torch.SymInt)
_NUMBERS = (*_INTS, float, torch.SymFloat)


def is_number(x: Any) -> bool:
    return (isinstance(x, _NUMBERS) or isinstance(x, numbers.Real)) and not isinstance(x, bool)


def is_int(x: Any) -> bool:
    return (isinstance(x, _INTS) or isinstance(x, numbers.Integral)) and not isinstance(x, bool)


def as_python(x: Any) -> Any:
    """Convert a NumPy scalar to a Python number, and return anything else unchanged."""
    if type(x).__module__ != "numpy" or not isinstance(x, numbers.Real):
        return x
    return int(x) if isinstance(x, numbers.Integral) else float(x)
