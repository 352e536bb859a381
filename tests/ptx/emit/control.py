"""Branches, barriers of a block, and what needs no action here."""

from ..ops import U32
from .registry import instruction


@instruction("bra", modifiers="uni")
def bra(e, op, label):
    branch(e, e.program.labels[label])


@instruction("ret exit")
def ret(e, op):
    branch(e, -1)


def branch(e, target):
    guard = e.guard()
    e.go(target if guard is None else f"('br', {guard}, {target}, {e.block + 1})")


@instruction("brx.idx", modifiers="uni")
def brx(e, op, index, table):
    """Branches to one of a table's labels."""
    e.everyone()
    targets = tuple(e.program.labels[label] for label in e.program.tables[table])
    e.go(f"('brx', {e.read(index, U32)}, {targets}, {e.current.line})")


@instruction("bar.sync bar.arrive bar.cta.sync bar.cta.arrive")
@instruction("barrier.sync barrier.arrive barrier.cta.sync barrier.cta.arrive", modifiers="aligned")
def bar(e, op, number, count=None):
    """Threads meet at a barrier of a number; those that only arrive go on."""
    e.everyone()
    number, count = e.read(number, U32), count and e.read(count, U32)
    e.go(f"('bar', {number}, {count}, {e.block + 1}, {op.name.endswith('sync')}, {e.current.line})")


@instruction("bar.warp.sync")
@instruction("setmaxnreg.inc.sync.aligned setmaxnreg.dec.sync.aligned", "u32")
def nothing(e, op, *operands):
    """Lanes see each other's writes at once, and registers are not counted."""
