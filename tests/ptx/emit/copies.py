"""Asynchronous copies, barriers in shared memory, and the groups and fences of copies and products."""

import re

from ..ops import U32, U64
from .operands import literal
from .registry import instruction

SHARED = "shared shared::cta"
GROUPS = {  # the method of the machine
    "cp.async.commit_group": "cp_commit",
    "cp.async.wait_group": "cp_wait",
    "cp.async.bulk.commit_group": "bulk_commit",
    "cp.async.bulk.wait_group": "bulk_wait",
    "cp.async.bulk.wait_group.read": "bulk_wait_read",
    "wgmma.fence.sync.aligned": "wgmma_fence",
    "wgmma.commit_group.sync.aligned": "wgmma_commit",
    "fence.proxy.async": "fence_async",
    "fence.proxy.async.shared::cta": "fence_async",
    "fence.proxy.async.global": "fence_global",
    "fence.acq_rel.gpu": "fence_global",
}
_BOX = re.compile(r"\[\s*([%\w]+)\s*,\s*\{([^}]*)\}\s*\]$")


def _names(pattern):
    """The names of an instruction on tensors of 1 to 5 dimensions."""
    return " ".join(pattern.format(n) for n in range(1, 6))


@instruction("cp.async.ca.shared.global cp.async.cg.shared.global")
def cp_async(e, op, target, source, size, count=None):
    """Copies a few bytes; zeros stand for those beyond `count`."""
    e.line(e.call("cp_async", *e.pointer(target), *e.pointer(source), literal(size), count and e.read(count, U32)))


@instruction(" ".join(GROUPS))
def group(e, op, *count):
    """Ends a group of copies or products, waits until only `count` groups run, or is a fence before them."""
    e.line(f"S.{GROUPS[op.name]}({', '.join((e.everyone(), *count))})")


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


@instruction("mbarrier.init mbarrier.inval", "b64", SHARED)
def mbarrier(e, op, barrier, *count):
    """Makes a barrier that counts to a number, or ends one."""
    e.line(e.call(op.name.replace(".", "_"), *e.pointer(barrier), *(e.read(x, U32) for x in count)))


@instruction("mbarrier.arrive mbarrier.arrive.expect_tx", "b64", SHARED)
def arrive(e, op, state, barrier, number="1"):
    """Arrives so many times, or once and says how many more bytes are to come; nobody may read the state."""
    e.require(state not in e.program.used)
    count, size = ("1", number) if "expect_tx" in op.name else (number, None)
    e.line(e.call("mbarrier_arrive", *e.pointer(barrier), e.read(count, U32), size and e.read(size, U32)))


@instruction("mbarrier.try_wait.parity", "b64", SHARED)
def try_wait(e, op, done, barrier, parity):
    """Lanes whose phase is complete go on. The others do this block again, which begins here."""
    e.everyone()
    arguments = *e.pointer(barrier), e.read(parity, U32), e.program.index[done], e.block, e.block + 1, e.current.line
    e.go(f"('try', {', '.join(map(str, arguments))})")
