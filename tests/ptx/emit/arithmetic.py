"""Arithmetic and logic: each instruction is a formula, with {} for each operand.

float16 and bfloat16 are computed in float32, so their results are rounded twice.
"""

from typing import NamedTuple

from ..ops import F32, F64, U16, U32, U64
from ..parse import BITS
from .operands import TYPES, literal
from .registry import instruction

INTEGERS = "s16 s32 s64 u16 u32 u64"
DOUBLED = {"s16": "s32", "s32": "s64", "u16": "u32", "u32": "u64"}


class Format(NamedTuple):
    """Conversions of a register's bits to float32 or float64 for a formula, and of its result back."""

    dtype: type  # of the register's bits
    unpack: str = "{}"
    pack: str = "{}"


FLOATS = {"f32": Format(F32), "f64": Format(F64)}
FLOATS["f32x2"] = Format(U64, "S.full({}).view(float32)", "({}).view(uint64)")
for _half in ("f16", "bf16"):
    FLOATS[_half] = Format(U16, f"from_{_half}({{}})", f"to_{_half}({{}})")
    FLOATS[f"{_half}x2"] = Format(U32, f"from_{_half}(S.full({{}}).view(uint16))", f"to_{_half}({{}}).view(uint32)")

_ALL = " ".join(FLOATS)
FLOATING = {  # types, modifiers, formula
    "add": (_ALL, "rn ftz", "{} + {}"),
    "sub": (_ALL, "rn ftz", "{} - {}"),
    "mul": (_ALL, "rn ftz", "{} * {}"),
    "fma": (_ALL, "rn ftz", "fma({}, {}, {})"),
    "neg": (_ALL, "ftz", "-{}"),
    "abs": (_ALL, "ftz", "np.abs({})"),
    "min": (_ALL, "NaN ftz", "smallest({}, {}, {nan})"),
    "max": (_ALL, "NaN ftz", "largest({}, {}, {nan})"),
    "div": ("f32 f64", "rn full approx ftz", "{} / {}"),
    "ex2": ("f32", "approx ftz", "np.exp2({})"),
}
SIGNED = {
    "div": "truncated_div({}, {})",
    "rem": "truncated_rem({}, {})",
    "min": "np.minimum({}, {})",
    "max": "np.maximum({}, {})",
    "min.relu": "np.maximum(np.minimum({}, {}), 0)",
    "neg": "-{}",
    "abs": "np.abs({})",
    "mul.hi": "mul_hi({}, {})",
}
SIGNLESS = {  # whose result has the same bits for signed and unsigned numbers
    "add": "{} + {}",
    "sub": "{} - {}",
    "mul.lo": "{} * {}",
    "mad.lo": "{} * {} + {}",
}
LOGIC = {"and": "{} & {}", "or": "{} | {}", "xor": "{} ^ {}", "not": "~{}"}


def fill(formula, sources, **named):
    """A formula with its operands."""
    if formula.count("{}") != len(sources):
        raise ValueError(f"{len(sources)} operands")
    return formula.format(*sources, **named)


def flush(e, op, source):
    """A source with its subnormal numbers replaced by 0, if a modifier says so."""
    if "ftz" not in op.words:
        return source
    e.require(op.kind in ("f32", "f32x2"))
    return f"ftz({source})"


def unpack(e, op, operands):
    """Sources of floating-point operands as formulas take them."""
    form = FLOATS[op.kind]
    return [flush(e, op, form.unpack.format(source)) for source in e.read_all(operands, form.dtype)]


def floating(e, op, d, *operands):
    form, formula, nan = FLOATS[op.kind], FLOATING[op.name][-1], "NaN" in op.words
    a, *rest = unpack(e, op, operands)
    if op.name in ("min", "max") and len(rest) == 2:
        a = fill(formula, (a, rest.pop(0)), nan=nan)
    e.write(d, form.pack.format(flush(e, op, fill(formula, (a, *rest), nan=nan))), form.dtype)


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
def field(e, op, d, a, *operands):
    """Calls the function in ops of the same name."""
    sources = e.array(a, TYPES[op.kind]), *(e.read(x, U32) for x in operands)
    e.write(d, f"{op.name.replace('.', '_')}({', '.join(sources)})", TYPES[op.kind])


@instruction("mul.wide mad.wide", " ".join(DOUBLED))
def wide(e, op, d, a, b, *addend):
    """A product, and what is added to it, of twice the width of its operands."""
    large = DOUBLED[op.kind]
    dtype = e.integer(d, large)
    source = f"np.multiply({', '.join(e.read_all((a, b), TYPES[op.kind]))}, dtype={TYPES[large].__name__})"
    if dtype != TYPES[large]:
        source += f".view({dtype.__name__})"
    for c in addend:
        source += f" + {e.read(c, dtype, vote=False)}"
    e.write(d, source, dtype)


@instruction("shl shr", "b16 b32 b64 s16 s32 s64 u16 u32 u64")
def shift(e, op, d, x, n):
    """Shifts by a literal below the width as Python does, and by anything else as PTX does."""
    dtype = TYPES[op.kind] if op.name == "shr" else e.integer(d, op.kind)
    (x,), by = e.read_all([x], dtype), literal(n)
    if by is not None and 0 <= by < BITS[op.kind]:
        source = f"{x} {'<<' if op.name == 'shl' else '>>'} {e.constant(dtype(by))}"
    else:
        source = f"{op.name}({x}, {e.read(n, U32)})"
    e.write(d, source, dtype)
