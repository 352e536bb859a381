"""Copies that go on by themselves, the barriers in shared memory that know of them, and fences before them."""

import re

from ..ops import U32, U64
from .operands import literal
from .registry import instruction

SHARED = "shared shared::cta"
_BOX = re.compile(r"\[\s*([%\w]+)\s*,\s*\{([^}]*)\}\s*\]$")


def _names(pattern):
    """The names of an instruction on tensors of 1 to 5 dimensions."""
    return " ".join(pattern.format(n) for n in range(1, 6))


@instruction("cp.async.ca.shared.global cp.async.cg.shared.global")
def cp_async(e, op, target, source, size, count=None):
    """Copies a few bytes; zeros stand for those beyond `count`."""
    count = None if count is None else e.read(count, U32)
    e.line(e.call("cp_async", *e.pointer(target), *e.pointer(source), literal(size), count))


@instruction("cp.async.commit_group cp.async.bulk.commit_group")
def commit(e, op):
    e.line(f"S.{_prefix(op)}_commit({e.everyone()})")


@instruction("cp.async.wait_group cp.async.bulk.wait_group", modifiers="read")
def wait(e, op, count):
    """Waits for all groups of copies but the newest."""
    e.line(f"S.{_prefix(op)}_wait({e.everyone()}, {literal(count)})")


def _prefix(op):
    return "bulk" if "bulk" in op.name else "cp"


def _box(e, text):
    """(source of a tensor's descriptor, source of a tuple of coordinates) of an operand [descriptor, {..}]."""
    descriptor, coordinates = _BOX.match(text).groups()
    return e.read(descriptor, U64), "(" + "".join(f"{e.read(x.strip(), U32)}, " for x in coordinates.split(",")) + ")"


@instruction(_names("cp.async.bulk.tensor.{}d.shared::cta.global.mbarrier::complete_tx::bytes"))
@instruction(_names("cp.async.bulk.tensor.{}d.shared::cluster.global.mbarrier::complete_tx::bytes"))
def bulk_in(e, op, target, box, barrier):
    """Begins to load a box of a tensor; the barrier is told when it is there."""
    e.line(e.call("bulk_in", *_box(e, box), *e.pointer(target), *e.pointer(barrier)))


@instruction(_names("cp.async.bulk.tensor.{}d.global.shared::cta.bulk_group"))
@instruction(_names("cp.reduce.async.bulk.tensor.{}d.global.shared::cta.add.bulk_group"))
def bulk_out(e, op, box, source):
    """Begins to store a box of a tensor, or to add it."""
    e.line(e.call("bulk_out", "reduce" in op.name, *_box(e, box), *e.pointer(source)))


@instruction("fence.proxy.async", modifiers=SHARED)
def fence(e, op):
    """What was written to shared memory is there for products and copies."""
    e.line(f"S.fence_async({e.everyone()})")


@instruction("mbarrier.init mbarrier.inval", "b64", SHARED)
def mbarrier(e, op, barrier, *count):
    """Makes a barrier that counts to a number, or ends one."""
    e.line(e.call(op.name.replace(".", "_"), *e.pointer(barrier), *(e.read(x, U32) for x in count)))


@instruction("mbarrier.arrive mbarrier.arrive.expect_tx", "b64", SHARED)
def arrive(e, op, state, barrier, number="1"):
    """Arrives so many times, or once and says how many more bytes are to come; nobody may read the state."""
    e.require(state not in e.program.used)
    count, size = ("1", number) if "expect_tx" in op.name else (number, None)
    size = None if size is None else e.read(size, U32)
    e.line(e.call("mbarrier_arrive", *e.pointer(barrier), e.read(count, U32), size))


@instruction("mbarrier.expect_tx.relaxed.cta", "b64", SHARED)
def expect(e, op, barrier, size):
    """Says how many more bytes are to come."""
    e.line(e.call("mbarrier_arrive", *e.pointer(barrier), None, e.read(size, U32)))


@instruction("mbarrier.try_wait.parity", "b64", SHARED)
def try_wait(e, op, done, barrier, parity):
    """Lanes whose phase is complete go on. The others do this block again, which begins here."""
    e.everyone()
    arguments = *e.pointer(barrier), e.read(parity, U32), e.program.index[done], e.block, e.block + 1, e.current.line
    e.go(f"('try', {', '.join(map(str, arguments))})")
