"""Translates branches, barriers of a block, and instructions without an effect here."""

from ..ops import U32
from .registry import instruction


@instruction("bra", modifiers="uni")
@instruction("ret")
def branch(e, op, *label):
    guard, target = e.guard(), e.program.labels[label[0]] if op.name == "bra" else -1
    e.go(target if guard is None else f"('br', {guard}, {target}, {e.block + 1})")


@instruction("brx.idx")
def brx(e, op, index, table):
    e.everyone()
    targets = tuple(e.program.labels[label] for label in e.program.tables[table])
    e.go(f"('brx', {e.read(index, U32)}, {targets}, {e.current.line})")


@instruction("bar.sync barrier.sync")
def bar(e, op, number, count=None):
    e.everyone()
    number, count = e.read(number, U32), count and e.read(count, U32)
    e.go(f"('bar', {number}, {count}, {e.block + 1}, {e.current.line})")


@instruction("bar.warp.sync fence.proxy.async.global fence.acq_rel.gpu")
@instruction("setmaxnreg.inc.sync.aligned setmaxnreg.dec.sync.aligned", "u32")
def nothing(e, op, *operands):
    """Emit nothing: each lane sees the writes of all others at once, and registers are not counted."""
