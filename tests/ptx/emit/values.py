"""Instructions that move, convert, compare and select values."""

import numpy as np

from ..ops import F32, U32, U64
from .arithmetic import FLOATS, unpack
from .operands import TYPES, UNSIGNED, bits, is_float, vector
from .registry import instruction

NUMBERS = "s8 s16 s32 s64 u8 u16 u32 u64 f16 bf16 f32 f64"
ROUNDINGS = {"rni": "np.rint({})", "rzi": "np.trunc({})", "rmi": "np.floor({})", "rpi": "np.ceil({})"}  # to integers

COMPARISONS = {"eq": "{} == {}", "ne": "{} != {}", "lt": "{} < {}", "le": "{} <= {}", "gt": "{} > {}", "ge": "{} >= {}"}
COMPARISONS |= {"lo": "{} < {}", "ls": "{} <= {}", "hi": "{} > {}", "hs": "{} >= {}"}  # unsigned
FLOAT_COMPARISONS = COMPARISONS | {
    "ne": "({0} < {1}) | ({0} > {1})",  # like the others above, false of a NaN
    "equ": "~(({0} < {1}) | ({0} > {1}))",  # these are true of one
    "neu": "{} != {}",
    "ltu": "~({} >= {})",
    "leu": "~({} > {})",
    "gtu": "~({} <= {})",
    "geu": "~({} < {})",
    "num": "({0} == {0}) & ({1} == {1})",
    "nan": "({0} != {0}) | ({1} != {1})",
}
LOGICAL = {"and": "&", "or": "|", "xor": "^"}  # of a comparison and a predicate


@instruction("mov", "pred b16 b32 b64 u16 u32 u64 s16 s32 s64 f32 f64")
def mov(e, op, d, a):
    """Moves one register, or the parts of a wide one, the lowest first, into it or out of it."""
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
        (source,) = e.read_all([a], e.home(d), vote=False)
        e.write(d, source, e.home(d), vote=False)


@instruction("cvta.param cvta.global cvta.to.global", "u64")
def cvta(e, op, d, a):
    """Addresses of global memory and of parameters are generic ones."""
    e.write(d, e.read(a, U64), U64)


@instruction("cvt", NUMBERS, f"rn {NUMBERS} {' '.join(ROUNDINGS)}")
def cvt(e, op, d, a):
    """Converts a number. On its way to float16 or bfloat16 it is rounded to float32 first."""
    *words, to = op.words
    rounding = next((ROUNDINGS[word] for word in words if word in ROUNDINGS), "{}")
    (x,) = unpack(e, op, [a]) if op.kind in FLOATS else e.read_all([a], TYPES[op.kind])
    x = rounding.format(x)
    if to in FLOATS:
        x = f"{x}.astype({'float64' if to == 'f64' else 'float32'}, copy=False)"
        return e.write(d, FLOATS[to].pack.format(x), FLOATS[to].dtype)
    if op.kind in FLOATS:
        e.require(rounding != "{}")
        return e.write(d, f"to_int({x}, {TYPES[to].__name__})", TYPES[to])
    e.write(d, f"{x}.astype({TYPES[to].__name__}, copy=False)", TYPES[to])


@instruction("cvt.rn.bf16x2 cvt.rn.f16x2", "f32")
def cvt_pair(e, op, d, high, low):
    """Converts two numbers to the halves of a register."""
    low, high = (f"to_{op.name.split('.')[-1][:-2]}({x}).astype(uint32)" for x in e.read_all((low, high), F32))
    e.write(d, f"{low} | ({high} << {e.constant(U32(16))})", U32)


@instruction("selp", "b16 b32 b64 s16 s32 s64 u16 u32 u64 f32 f64")
def selp(e, op, d, a, b, p):
    numbers = is_float(TYPES[op.kind])
    dtype = TYPES[op.kind] if numbers else e.home(d)
    a, b = (e.read(x, dtype, vote=numbers) for x in (a, b))
    e.write(d, f"where({e.read(p, np.bool_)}, {a}, {b})", dtype, vote=numbers)


@instruction("setp", "f16 bf16 f16x2 bf16x2 f32 f64", f"ftz {' '.join((*FLOAT_COMPARISONS, *LOGICAL))}")
@instruction("setp", "b16 b32 b64 s16 s32 s64 u16 u32 u64", " ".join((*COMPARISONS, *LOGICAL)))
def setp(e, op, d, a, b, p=None):
    """Compares. A second result is that of the upper halves, or the negation of the first."""
    if op.kind in FLOATS:
        source = FLOAT_COMPARISONS[op.words[0]].format(*unpack(e, op, (a, b)))
    else:
        source = COMPARISONS[op.words[0]].format(*e.read_all((a, b), TYPES[op.kind]))
    if p is not None:
        source = f"({source}) {LOGICAL[op.words[1]]} {e.read(p, np.bool_)}"
    if "|" in d:
        x = e.temporary(source)
        e.write_all(d.split("|"), f"({x}[0::2], {x}[1::2])" if "x2" in op.kind else f"({x}, ~({x}))", np.bool_)
    else:
        e.write(d, source, np.bool_)
