"""Numbers of NumPy, which torch and flash-attn take, where the functions of this package ask for Python's own."""

import numbers
from typing import Any


def as_python(x: Any) -> Any:
    """A number of NumPy as Python's, anything else as it is."""
    return x.item() if type(x).__module__ == "numpy" and isinstance(x, numbers.Real) else x
