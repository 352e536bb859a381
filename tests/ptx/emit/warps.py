"""Translates instructions that exchange and reduce values within a warp."""

import numpy as np

from ..ops import U32
from .operands import TYPES, literal
from .registry import instruction


def require_all_lanes(e, members):
    e.require(literal(members) in (-1, 0xFFFFFFFF))


@instruction("shfl.sync.up shfl.sync.bfly shfl.sync.idx", "b32")
def shuffle(e, op, d, a, b, clamp, members):
    """Emit a shuffle within a warp. Its optional second result is True if the source lane exists."""
    require_all_lanes(e, members)
    registers, lane, how = d.split("|"), literal(b), op.name.rpartition(".")[2]
    a, b = e.read(a, e.home(registers[0])), e.read(b, U32) if lane is None else lane
    e.write_all(registers, e.call("shuffle", repr(how), a, b, literal(clamp)), None)


@instruction("redux.sync", "s32", "add min max")
def redux(e, op, d, a, members):
    dtype = TYPES[op.kind]
    e.write(d, e.call("redux", repr(op.words[0]), e.read(a, dtype), e.read(members, U32)), dtype)


@instruction("elect.sync")
def elect(e, op, d, members):
    """Emit the election of one lane of a warp. A kernel must not read the lane's number."""
    require_all_lanes(e, members)
    number, chosen = d.split("|")
    e.require(number not in e.program.used)
    e.write(chosen, e.call("elect") + "[1]", np.bool_)
