"""Instructions that exchange and reduce values within a warp."""

import numpy as np

from ..ops import U32
from .operands import TYPES, literal
from .registry import instruction


def all_lanes(e, members):
    e.require(literal(members) in (-1, 0xFFFFFFFF))


@instruction("shfl.sync.up shfl.sync.down shfl.sync.bfly shfl.sync.idx", "b32")
def shuffle(e, op, d, a, b, clamp, members):
    """Takes a from another lane, and as a second result whether that lane is there."""
    all_lanes(e, members)
    registers, lane, how = d.split("|"), literal(b), op.name.rpartition(".")[2]
    a, b = e.read(a, e.home(registers[0]), vote=False), e.read(b, U32) if lane is None else lane
    e.write_all(registers, e.call("shuffle", repr(how), a, b, literal(clamp)), None, vote=False)


@instruction("redux.sync", "s32 u32 b32", "add min max")
def redux(e, op, d, a, members):
    dtype = e.integer(d, op.kind) if op.kind == "b32" else TYPES[op.kind]
    e.write(d, e.call("redux", repr(op.words[0]), e.read(a, dtype), e.read(members, U32)), dtype)


@instruction("elect.sync")
def elect(e, op, d, members):
    """Chooses a lane, and says to each whether it is this one; nobody may read its number."""
    all_lanes(e, members)
    number, chosen = d.split("|")
    e.require(number not in e.program.used)
    e.write(chosen, e.call("elect") + "[1]", np.bool_)
