"""Types of PTX operands, and operands that are literals, vectors or addresses."""

import functools
import re

import numpy as np

from ..ops import F16, F32, F64, S8, S16, S32, S64, U8, U16, U32, U64
from ..parse import BITS, split

UNSIGNED = {1: np.bool_, 8: U8, 16: U16, 32: U32, 64: U64}  # {bits: type}; 1 is a predicate
TYPES = {kind: UNSIGNED[bits] for kind, bits in BITS.items()}
TYPES |= dict(s8=S8, s16=S16, s32=S32, s64=S64, f16=F16, f32=F32, f64=F64)

_FLOAT = {"f": (U32, F32), "d": (U64, F64)}  # 0f and 0d are followed by the bits of a number
_INTEGER = re.compile(r"-?(\d+|0[xX][0-9a-fA-F]+)U?$")
_ADDRESS = re.compile(r"\[\s*([%$\w.]+)\s*(?:\+\s*(-?\w+)\s*)?\]$")


@functools.cache
def bits(dtype):
    """Return the width in bits of a register that holds a dtype."""
    return 1 if dtype is np.bool_ else 8 * np.dtype(dtype).itemsize


@functools.cache
def is_float(dtype):
    return np.dtype(dtype).kind == "f"


@functools.cache
def literal(text):
    """Return a literal operand as np.float32, np.float64 or int; None if it is no literal."""
    if digits := re.match(r"0([fFdD])([0-9a-fA-F]+)$", text):
        unsigned, dtype = _FLOAT[digits[1].lower()]
        return unsigned(int(digits[2], 16)).view(dtype)
    return int(text.rstrip("U"), 0) if _INTEGER.match(text) else None


def scalar(value, dtype):
    """Return a literal's value as a dtype: floats are converted, other dtypes get the same bits."""
    if dtype is np.bool_ or (is_float(dtype) and isinstance(value, np.floating)):
        return dtype(value)
    if isinstance(value, np.floating):
        value = int(value.view(UNSIGNED[bits(value.dtype)]))
    unsigned = UNSIGNED[bits(dtype)]
    return unsigned(value & np.iinfo(unsigned).max).view(dtype)


def vector(text):
    """Return the operands of a vector in braces; for a single operand a tuple of one."""
    return split(text[1:-1]) if text.startswith("{") else (text,)


def address(text):
    """Return (base, offset) of an operand [base + offset]."""
    base, offset = _ADDRESS.match(text).groups()
    return base, int(offset or "0", 0)
