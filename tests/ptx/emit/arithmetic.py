"""Translates arithmetic and logic instructions: each is a formula, with {} for each operand.

float16 and bfloat16 are converted to float32 first.
"""

from typing import NamedTuple

from ..ops import F32, F64, U16, U32, U64
from ..parse import BITS
from .operands import TYPES, literal
from .registry import instruction

INTEGERS = "s16 s32 s64 u16 u32 u64"
DOUBLED = {"s16": "s32", "s32": "s64", "u16": "u32", "u32": "u64"}


class Format(NamedTuple):
    """Conversions of a register's bits to float32 or float64 for a formula, and of the formula's result back."""

    dtype: type  # NumPy type of the register's bits
    unpack: str = "{}"
    pack: str = "{}"


FLOATS = {"f32": Format(F32), "f64": Format(F64)}
FLOATS["f32x2"] = Format(U64, "S.full({}).view(float32)", "({}).view(uint64)")
for _half in ("f16", "bf16"):
    FLOATS[_half] = Format(U16, f"from_{_half}({{}})", f"to_{_half}({{}})")
    FLOATS[f"{_half}x2"] = Format(U32, f"from_{_half}(S.full({{}}).view(uint16))", f"to_{_half}({{}}).view(uint32)")

FLOATING = {  # types, modifiers, formula
    "add": ("f32 f32x2", "rn", "{} + {}"),
    "sub": ("f32 f32x2", "rn", "{} - {}"),
    "mul": ("f32 f32x2", "rn", "{} * {}"),
    "fma": ("f32 f32x2", "rn ftz", "fma({}, {}, {})"),
    "neg": ("f32", "", "-{}"),
    "abs": ("f32 f16 bf16 f16x2 bf16x2", "", "np.abs({})"),
    "min": ("f32 f64", "", "smallest({}, {})"),
    "max": ("f32 f64", "", "largest({}, {})"),
    "div.full": ("f32", "", "{} / {}"),
    "div.approx": ("f32", "", "{} / {}"),
    "ex2.approx": ("f32", "ftz", "np.exp2({})"),
    "rsqrt.approx": ("f32", "ftz", "1 / np.sqrt({})"),
}
SIGNED = {
    "min": "np.minimum({}, {})",
    "max": "np.maximum({}, {})",
    "min.relu": "np.maximum(np.minimum({}, {}), 0)",
    "neg": "-{}",
    "abs": "np.abs({})",
}
SIGNLESS = {  # signed and unsigned results have the same bits
    "add": "{} + {}",
    "sub": "{} - {}",
    "mul.lo": "{} * {}",
    "mad.lo": "{} * {} + {}",
}
UNSIGNED_OPERANDS = "prmt", "shf.l.wrap", "bfe"  # all their operands but the first are unsigned
LOGIC = {"and": "{} & {}", "or": "{} | {}", "xor": "{} ^ {}", "not": "~{}"}


def fill(formula, sources):
    """Return a formula with {} replaced by the sources of its operands."""
    if formula.count("{}") != len(sources):
        raise ValueError(f"{len(sources)} operands")
    return formula.format(*sources)


def unpack(e, op, operands):
    """Return the Python sources of floating-point operands, converted for use in a formula."""
    form = FLOATS[op.kind]
    return [form.unpack.format(source) for source in e.read_all(operands, form.dtype)]


def floating(e, op, d, *operands):
    """Emit a floating-point operation. `ftz` replaces subnormal operands and results by 0."""
    form, flush = FLOATS[op.kind], "ftz({})" if "ftz" in op.words else "{}"
    e.require("ftz" not in op.words or op.kind == "f32")
    formula = FLOATING[op.name][-1]
    if op.name in ("min", "max") and len(operands) == 3:  # from compute capability 10.0 on
        formula = formula.replace("{})", "{}, {})")
    source = fill(formula, [flush.format(source) for source in unpack(e, op, operands)])
    e.write(d, form.pack.format(flush.format(source)), form.dtype)


for _name, (_types, _modifiers, _) in FLOATING.items():
    instruction(_name, _types, _modifiers)(floating)


@instruction(" ".join(SIGNED), INTEGERS)
def signed(e, op, d, *operands):
    e.write(d, fill(SIGNED[op.name], e.read_all(operands, TYPES[op.kind])), TYPES[op.kind])


@instruction(" ".join(SIGNLESS), INTEGERS)
@instruction(" ".join(LOGIC), "pred b16 b32 b64")
def signless(e, op, d, *operands):
    dtype = e.integer(d, op.kind)
    e.write(d, fill((SIGNLESS | LOGIC)[op.name], e.read_all(operands, dtype)), dtype)


@instruction("prmt shf.l.wrap", "b32")
@instruction("bfe", "s32 s64 u32")
@instruction("mul.hi", "s32 u32")
@instruction("div rem", "s32")
def by_function(e, op, d, a, *operands):
    """Emit a call of the function in `ops` that has the instruction's name."""
    dtype = TYPES[op.kind]
    sources = e.array(a, dtype), *(e.read(x, U32 if op.name in UNSIGNED_OPERANDS else dtype) for x in operands)
    e.write(d, f"{op.name.replace('.', '_')}({', '.join(sources)})", dtype)


@instruction("mul.wide mad.wide", " ".join(DOUBLED))
def wide(e, op, d, a, b, *addend):
    """Emit a product twice as wide as its operands, plus an optional addend."""
    large = DOUBLED[op.kind]
    dtype = e.integer(d, large)
    source = f"np.multiply({', '.join(e.read_all((a, b), TYPES[op.kind]))}, dtype={TYPES[large].__name__})"
    if dtype != TYPES[large]:
        source += f".view({dtype.__name__})"
    for c in addend:
        source += f" + {e.read(c, dtype)}"
    e.write(d, source, dtype)


@instruction("shl shr", "b16 b32 b64 s16 s32 s64 u16 u32 u64")
def shift(e, op, d, x, n):
    """Emit a shift: by NumPy's operator for a literal below the width, otherwise by the function in `ops`."""
    dtype = TYPES[op.kind] if op.name == "shr" else e.integer(d, op.kind)
    (x,), by = e.read_all([x], dtype), literal(n)
    if by is not None and 0 <= by < BITS[op.kind]:
        source = f"{x} {'<<' if op.name == 'shl' else '>>'} {e.constant(dtype(by))}"
    else:
        source = f"{op.name}({x}, {e.read(n, U32)})"
    e.write(d, source, dtype)
