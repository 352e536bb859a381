"""Numbers of NumPy, which torch and flash-attn take, where the functions of this package ask for Python's own."""

import numbers
from typing import Any


def as_python(x: Any) -> Any:
    """A number of NumPy as Python's, anything else as it is."""
    if type(x).__module__ != "numpy" or not isinstance(x, numbers.Real):
        return x
    return int(x) if isinstance(x, numbers.Integral) else float(x)
