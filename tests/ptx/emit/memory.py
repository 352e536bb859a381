"""Translates loads, stores and additions to memory. Memory order between blocks is not modelled."""

from ..parse import BITS
from .operands import TYPES, UNSIGNED, address, vector
from .registry import instruction

NUMBERS = "b8 b16 b32 b64 s32"
VECTORS = {"v2": 2, "v4": 4}


def _dtype(e, op, register):
    """Return the dtype to load for a register: its own if the loaded width is equal."""
    return e.home(register) if e.width(register) == BITS[op.kind] else TYPES[op.kind]


def _vector(e, op, text):
    """Return the operands of a vector; raise Unsupported if their number contradicts the modifier."""
    operands = vector(text)
    e.require(len(operands) == next((VECTORS[word] for word in op.words if word in VECTORS), 1))
    return operands


@instruction("ld.param", NUMBERS)
def load_param(e, op, register, operand):
    name, offset = address(operand)
    e.require(offset + BITS[op.kind] // 8 <= e.program.params[name])
    dtype = _dtype(e, op, register)
    source = f"S.load_param({name!r}, {offset}, {dtype.__name__})"
    e.write(register, source, dtype)


@instruction("ld.global ld.volatile.global ld.shared", NUMBERS, " ".join(VECTORS))
def load(e, op, registers, operand):
    registers = _vector(e, op, registers)
    dtype = _dtype(e, op, next(register for register in registers if register != "_"))
    name = f"load_{op.name.rpartition('.')[2]}"  # a volatile load is treated like any other load
    source = e.call(name, *e.pointer(operand), dtype.__name__, len(registers))
    e.write_all(registers, source, dtype)


@instruction("st.global st.shared st.shared::cta", NUMBERS, " ".join(VECTORS))
def store(e, op, operand, values):
    dtype = UNSIGNED[BITS[op.kind]]
    values = e.arrays(_vector(e, op, values), dtype)
    e.line(e.call(op.name.removesuffix("::cta").replace("st.", "store_"), *e.pointer(operand), dtype.__name__, values))


@instruction("red.global.gpu", "u32 f32", f"relaxed release add {' '.join(VECTORS)}")
def add(e, op, operand, values):
    e.require("add" in op.words)
    dtype = TYPES[op.kind]
    e.line(e.call("add_global", *e.pointer(operand), dtype.__name__, e.arrays(_vector(e, op, values), dtype)))


@instruction("atom.global.gpu", "u32 f32", f"relaxed release acq_rel add {' '.join(VECTORS)}")
def atom(e, op, results, operand, values):
    """Emit an atomic addition. A kernel may read only the previous value of a u32."""
    if e.program.used.isdisjoint(vector(results)):
        add(e, op, operand, values)
        return
    e.require("add" in op.words and op.kind == "u32")
    source = e.call("take_global", *e.pointer(operand), e.read(values, TYPES[op.kind]))
    e.write(results, source, TYPES[op.kind])
