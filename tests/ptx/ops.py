"""Results of arithmetic PTX instructions, on arrays with one element per lane. An operand may be a scalar.

Differences from hardware: `ex2` and `rsqrt` are NumPy's and divisions are exact, while a GPU approximates them. `fma`
rounds twice.
"""

import numpy as np

F16, F32, F64 = np.float16, np.float32, np.float64
S8, S16, S32, S64 = np.int8, np.int16, np.int32, np.int64
U8, U16, U32, U64 = np.uint8, np.uint16, np.uint32, np.uint64
SMALLEST = F32(2.0**-126)  # the smallest normal float32
NAN16 = U16(0x7FFF)  # the only NaN that conversions to float16 and bfloat16 return
where = np.where


# Floating point


def ftz(x):
    """Return float32 x with subnormal numbers replaced by 0 of the same sign."""
    return where(np.abs(x) < SMALLEST, np.copysign(F32(0), x), x)


def fma(a, b, c):
    """Return a * b + c in float32. The sum is rounded twice, first to float64."""
    return (np.multiply(a, b, dtype=F64) + c).astype(F32)


def largest(a, b, *others):
    """Return the maximum of all operands. 0 is above -0, and a number is above NaN."""
    result = np.fmax(a, b)
    zeros = (result == 0) & (a == b)
    result = where(zeros, a + b, result) if zeros.any() else result  # -0 + 0 is 0
    return largest(result, *others) if others else result


def smallest(*operands):
    return -largest(*[-x for x in operands])


def from_bf16(bits):
    return (bits.astype(U32) << U32(16)).view(F32)


def to_bf16(x):
    """Return float32 x as the bits of a bfloat16, rounded to nearest even."""
    bits = x.view(U32)
    rounded = (bits + U32(0x7FFF) + ((bits >> U32(16)) & U32(1))) >> U32(16)
    return where(np.isnan(x), NAN16, rounded.astype(U16))


def from_f16(bits):
    return bits.view(F16).astype(F32)


def to_f16(x):
    """Return float32 x as the bits of a float16, rounded to nearest even."""
    return where(np.isnan(x), NAN16, x.astype(F16).view(U16))


# Integers


def div(a, b):
    """Return a / b rounded towards 0, as in C. A division by 0 gives all ones."""
    zero = b == 0
    safe = where(zero, S32(1), b)
    quotient = a // safe
    quotient = quotient + ((quotient * safe != a) & ((a < 0) != (safe < 0))).astype(S32)
    return where(zero, S32(-1), quotient)


def rem(a, b):
    """Return the remainder of `div`, with the sign of a."""
    return a - div(a, b) * b


def mul_hi(a, b):
    """Return the upper 32 bits of the 64-bit product of a and b."""
    wide = S64 if a.dtype.kind == "i" else U64
    return (a.astype(wide) * b.astype(wide) >> wide(32)).astype(a.dtype)


def shl(x, n):
    """Return x << n; 0 if n, unsigned, is at least the width of x."""
    bits = 8 * x.dtype.itemsize
    return where(n < bits, x << np.minimum(n, bits - 1).astype(x.dtype), x.dtype.type(0))


def shr(x, n):
    """Return x >> n, filled with the sign bit of a signed x. n may exceed the width."""
    bits = 8 * x.dtype.itemsize
    shifted = x >> np.minimum(n, bits - 1).astype(x.dtype)
    return shifted if x.dtype.kind == "i" else where(n < bits, shifted, x.dtype.type(0))


def shf_l_wrap(low, high, n):
    """Return the upper half of (high, low) << (n mod 32)."""
    n = 32 - (n & U32(31))
    return (((high.astype(U64) << U64(32)) | low.astype(U64)) >> n.astype(U64)).astype(U32)


def bfe(x, position, length):
    """Return bits [position, position + length) of x, sign-extended if x is signed."""
    wide = x.astype(S64 if x.dtype.kind == "i" else U64)
    position = np.minimum(position & U32(255), 63).astype(wide.dtype)
    above = (64 - np.clip(length & U32(255), 1, 64)).astype(wide.dtype)
    return where(length & U32(255), (wide >> position) << above >> above, wide.dtype.type(0)).astype(x.dtype)


def prmt(a, b, selector):
    """Return four bytes, each chosen by 4 bits of the selector from the eight of (b, a), or a byte's sign repeated."""
    pool = a.astype(U64) | (b.astype(U64) << U64(32))
    result = U32(0)
    for i in range(4):
        pick = (selector >> U32(4 * i)) & U32(15)
        byte = ((pool >> ((pick & U32(7)).astype(U64) * U64(8))) & U64(255)).astype(U32)
        byte = where(pick & U32(8), where(byte & U32(128), U32(255), U32(0)), byte)
        result = result | (byte << U32(8 * i))
    return result
