"""Emitter of the Python source of a basic block of PTX: reads of operands, writes of registers, masks.

The functions registered by `registry.instruction` emit each instruction.
"""

import re

import numpy as np

from ..ops import U32
from ..parse import BITS, Unsupported
from .operands import TYPES, UNSIGNED, address, bits, is_float, literal, scalar
from .registry import lookup

SHARED = "global_smem"  # Triton's name for the shared memory of a block
_SPECIAL = re.compile(r"%(tid\.x|n?ctaid\.[xyz])$")


class Emitter:
    """Writes the Python source of one basic block of PTX.

    Args:
        masked: True if some lanes may be inactive. Then the variable m is the mask of active lanes.
    """

    def __init__(self, program, block, masked=False):
        self.program, self.block, self.masked = program, block, masked
        self.lines, self.constants, self.temporaries, self.ended = [], {}, 0, False

    def source(self):
        """Return the Python source of this block, a function `run(S, R, m)` that uses the names in `constants`."""
        for instruction in self.program.blocks[self.block]:
            self.current, self._mask = instruction, None
            function, op = lookup(instruction.op)
            self.require(function is not None and not self.ended)
            try:
                function(self, op, *instruction.args)
            except (KeyError, IndexError, AttributeError, TypeError, ValueError) as error:
                raise Unsupported(f"line {instruction.line}: {instruction.text} ({error!r})") from error
        if not self.ended:
            self.go(self.block + 1)
        return "def run(S, R, m):\n" + "".join(f"    {line}\n" for line in self.lines)

    def require(self, condition):
        """Raise Unsupported for the current instruction if a condition is False."""
        if not condition:
            raise Unsupported(f"line {self.current.line}: {self.current.text}")

    # Lines

    def line(self, source):
        self.lines.append(source)

    def go(self, where):
        """End the block with the number of the next block, or with a tuple that names a method of the machine."""
        self.lines.append(f"return {where}")
        self.ended = True

    def temporary(self, source):
        name = f"t{self.temporaries}"
        self.temporaries += 1
        self.lines.append(f"{name} = {source}")
        return name

    def constant(self, value):
        """Return a name for a NumPy scalar, under which the source can use it."""
        name = f"K{len(self.constants)}"
        self.constants[name] = value
        return name

    def call(self, name, *arguments):
        """Return the source of a call of the machine's method `name` with the mask, the arguments and the line."""
        return f"S.{name}({', '.join(map(str, (self.mask(), *arguments, self.current.line)))})"

    # Masks

    def guard(self):
        """Return the source of the instruction's guard (predicate), or None if it has none."""
        if self.current.guard is None:
            return None
        register, negated = self.current.guard
        return self.read("!" * negated + register, np.bool_)

    def mask(self):
        """Return the source of the mask of active lanes; None stands for all."""
        if self._mask is None:
            guard, self._mask = self.guard(), "m" if self.masked else "None"
            if guard is not None:
                self._mask = self.temporary(f"m & {guard}" if self.masked else guard)
        return self._mask

    def everyone(self):
        """Return the mask of an instruction that must not have a guard."""
        self.require(self.current.guard is None)
        return self.mask()

    # Operands

    def width(self, register):
        return self.program.width[self.program.index[register]]

    def home(self, register):
        """Return the dtype in which a register is stored."""
        return self.program.home[self.program.index[register]]

    def integer(self, register, kind):
        """Return an integer dtype of the width of `kind`: the register's own dtype if that fits."""
        home = self.home(register)
        return UNSIGNED[BITS[kind]] if is_float(home) or bits(home) != BITS[kind] else home

    def read(self, text, dtype):
        """Return the source of an operand as an array of a dtype, or as a scalar if it is a literal.

        An integer dtype takes the lowest bits of a wider register.
        """
        if text.startswith("!"):
            return "~" + self.read(text[1:], dtype)
        if text in self.program.index:
            return self._register(text, dtype)
        if (value := literal(text)) is not None:
            return self.constant(scalar(value, dtype))
        if text == SHARED:
            kept = UNSIGNED[bits(dtype)]
            source = f"S.smem_address({kept.__name__})"
        elif text in self.program.params:
            kept = UNSIGNED[bits(dtype)]
            source = f"S.param_address({text!r}, {kept.__name__})"
        else:
            self.require(_SPECIAL.match(text))
            source, kept = f"S.specials[{text!r}]", U32
        self.require(bits(dtype) == bits(kept))
        return source if dtype == kept else f"{source}.view({dtype.__name__})"

    def _register(self, text, dtype):
        source, home, width = f"R[{self.program.index[text]}]", self.home(text), self.width(text)
        if home == dtype:
            return source
        if bits(dtype) == width:
            return f"{source}.view({dtype.__name__})"
        self.require(1 < bits(dtype) < width and not is_float(dtype))
        return f"{source}.view({UNSIGNED[width].__name__}).astype({dtype.__name__})"

    def read_all(self, texts, dtype):
        """Return the sources of operands. At least one is an array, so that the result is an array."""
        sources = [self.read(text, dtype) for text in texts]
        if all(literal(text) is not None for text in texts):
            sources[0] = f"S.full({sources[0]})"
        return sources

    def array(self, text, dtype):
        """Return the source of an operand as an array over all lanes, even for a literal."""
        source = self.read(text, dtype)
        return source if literal(text) is None else f"S.full({source})"

    def arrays(self, texts, dtype):
        """Return the source of a tuple of arrays, one for each operand."""
        return "(" + "".join(f"{self.array(text, dtype)}, " for text in texts) + ")"

    def pointer(self, text):
        """Return (source of the addresses, offset) of an operand [register + offset]."""
        base, offset = address(text)
        return self.read(base, U32 if base == SHARED else UNSIGNED[self.width(base)]), offset

    def write(self, register, source, dtype):
        """Emit the write of an array to a register. An integer is sign- or zero-extended to a wider register."""
        i, width, home = self.program.index[register], self.width(register), self.home(register)
        if bits(dtype) < width and np.dtype(dtype).kind in "iu":
            dtype = TYPES[("s" if np.dtype(dtype).kind == "i" else "u") + str(width)]
            source = f"({source}).astype({dtype.__name__})"
        self.require(bits(dtype) == width)
        if dtype != home:
            source = f"({source}).view({home.__name__})"
        mask = self.mask()
        self.lines.append(f"R[{i}] = {source if mask == 'None' else f'where({mask}, {source}, R[{i}])'}")

    def write_all(self, registers, source, dtype):
        """Emit the writes of arrays to registers, skipping `_`. A dtype of None is the register's own."""
        results = self.temporary(source)
        for i, register in enumerate(registers):
            if register != "_":
                self.write(register, f"{results}[{i}]", dtype or self.home(register))
