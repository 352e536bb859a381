"""Translates instructions that move, convert, compare and select values."""

import numpy as np

from ..ops import F32, U32
from .arithmetic import FLOATS, unpack
from .operands import TYPES, UNSIGNED, bits, is_float, vector
from .registry import instruction

NUMBERS = "s8 s16 s32 s64 u8 u16 u32 u64 f16 bf16 f32 f64"
COMPARISONS = {"eq": "{} == {}", "ne": "{} != {}", "lt": "{} < {}", "le": "{} <= {}", "gt": "{} > {}", "ge": "{} >= {}"}
FLOAT_COMPARISONS = COMPARISONS | {
    "ne": "({0} < {1}) | ({0} > {1})",  # false for NaN, like the other comparisons
    "neu": "{} != {}",  # true for NaN
}


@instruction("mov", "pred b16 b32 b64 u16 u32 u64")
@instruction("cvta.param", "u64")  # the address of a parameter is already a generic one
def mov(e, op, d, a):
    """Emit a move of a register, or of the parts of a wide register, lowest part first."""
    if d.startswith("{"):
        parts, whole = vector(d), UNSIGNED[e.width(a)]
        part, x = UNSIGNED[bits(whole) // len(parts)], e.temporary(e.read(a, whole))
        shifted = (f"({x} >> {e.constant(whole(bits(part) * i))}).astype({part.__name__})" for i in range(len(parts)))
        e.write_all(parts, f"({', '.join(shifted)})", part)
    elif a.startswith("{"):
        parts, whole = vector(a), UNSIGNED[e.width(d)]
        part = UNSIGNED[bits(whole) // len(parts)]
        wide = (f"S.full({e.read(x, part)}).astype({whole.__name__})" for x in parts)
        source = " | ".join(f"({x} << {e.constant(whole(bits(part) * i))})" for i, x in enumerate(wide))
        e.write(d, source, whole)
    else:
        (source,) = e.read_all([a], e.home(d))
        e.write(d, source, e.home(d))


@instruction("cvt", NUMBERS, f"rn {NUMBERS}")
def cvt(e, op, d, a):
    """Emit a conversion, except from float to integer. Conversions to float16 and bfloat16 go through float32."""
    to, floats = op.words[-1], op.kind in FLOATS
    (x,) = unpack(e, op, [a]) if floats else e.read_all([a], TYPES[op.kind])
    if to in FLOATS:
        x = f"{x}.astype({'float64' if to == 'f64' else 'float32'}, copy=False)"
        return e.write(d, FLOATS[to].pack.format(x), FLOATS[to].dtype)
    e.require(not floats)
    e.write(d, f"{x}.astype({TYPES[to].__name__}, copy=False)", TYPES[to])


@instruction("cvt.rn.bf16x2 cvt.rn.f16x2", "f32")
def cvt_pair(e, op, d, high, low):
    """Emit a conversion of two float32 numbers to the two halves of a register."""
    low, high = (f"to_{op.name.split('.')[-1][:-2]}({x}).astype(uint32)" for x in e.read_all((low, high), F32))
    e.write(d, f"{low} | ({high} << {e.constant(U32(16))})", U32)


@instruction("selp", "b16 b32 b64 f32 f64")
def selp(e, op, d, a, b, p):
    numbers = is_float(TYPES[op.kind])
    dtype = TYPES[op.kind] if numbers else e.home(d)
    a, b = (e.read(x, dtype) for x in (a, b))
    e.write(d, f"where({e.read(p, np.bool_)}, {a}, {b})", dtype)


@instruction("setp", "f16 bf16 f16x2 bf16x2 f32 f64", " ".join(FLOAT_COMPARISONS))
@instruction("setp", "b16 b32 b64 s16 s32 s64 u16 u32 u64", " ".join(COMPARISONS))
def setp(e, op, d, a, b):
    """Emit a comparison. Pairs of 16-bit floats have two results, first that of the lower halves."""
    (comparison,) = op.words
    if op.kind in FLOATS:
        source = FLOAT_COMPARISONS[comparison].format(*unpack(e, op, (a, b)))
    else:
        source = COMPARISONS[comparison].format(*e.read_all((a, b), TYPES[op.kind]))
    if "x2" in op.kind:
        x = e.temporary(source)
        e.write_all(d.split("|"), f"({x}[0::2], {x}[1::2])", np.bool_)
    else:
        e.write(d, source, np.bool_)
