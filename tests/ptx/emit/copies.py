"""Translates asynchronous copies, mbarriers, and the groups and fences of copies and wgmma."""

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
    "fence.proxy.async.shared::cta": "fence_async",
}
_BOX = re.compile(r"\[\s*([%\w]+)\s*,\s*\{([^}]*)\}\s*\]$")


@instruction("cp.async.ca.shared.global cp.async.cg.shared.global")
def cp_async(e, op, target, source, size, count=None):
    """Emit a copy of `size` bytes in each lane; bytes from `count` on are zeros."""
    e.line(e.call("cp_async", *e.pointer(target), *e.pointer(source), literal(size), count and e.read(count, U32)))


@instruction(" ".join(GROUPS))
def group(e, op, *count):
    """Emit a commit of a group of copies or wgmma, a wait until only `count` groups run, or a fence."""
    e.line(f"S.{GROUPS[op.name]}({', '.join((e.everyone(), *count))})")


def _box(e, text):
    """Return the sources of a TMA descriptor and its coordinates, from the operand [descriptor, {..}]."""
    descriptor, coordinates = _BOX.match(text).groups()
    return e.read(descriptor, U64), "(" + "".join(f"{e.read(x.strip(), U32)}, " for x in coordinates.split(",")) + ")"


@instruction("cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes")
@instruction("cp.async.bulk.tensor.4d.shared::cta.global.mbarrier::complete_tx::bytes")
@instruction("cp.async.bulk.tensor.5d.shared::cta.global.mbarrier::complete_tx::bytes")
@instruction("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes")
@instruction("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes")
@instruction("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes")
def bulk_in(e, op, target, box, barrier):
    """Emit the start of a TMA load of a box; its bytes arrive at an mbarrier."""
    e.line(e.call("bulk_in", *_box(e, box), *e.pointer(target), *e.pointer(barrier)))


@instruction("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group")
@instruction("cp.async.bulk.tensor.5d.global.shared::cta.bulk_group")
@instruction("cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.bulk_group")
@instruction("cp.reduce.async.bulk.tensor.5d.global.shared::cta.add.bulk_group")
def bulk_out(e, op, box, source):
    """Emit the start of a TMA store or addition of a box."""
    e.line(e.call("bulk_out", "reduce" in op.name, *_box(e, box), *e.pointer(source)))


@instruction("mbarrier.init mbarrier.inval", "b64", SHARED)
def mbarrier(e, op, barrier, *count):
    e.line(e.call(op.name.replace(".", "_"), *e.pointer(barrier), *(e.read(x, U32) for x in count)))


@instruction("mbarrier.arrive mbarrier.arrive.expect_tx", "b64", SHARED)
def arrive(e, op, state, barrier, number="1"):
    """Emit `number` mbarrier arrivals, or one that expects `number` more bytes. No instruction may read `state`."""
    e.require(state not in e.program.used)
    count, size = ("1", number) if "expect_tx" in op.name else (number, None)
    e.line(e.call("mbarrier_arrive", *e.pointer(barrier), e.read(count, U32), size and e.read(size, U32)))


@instruction("mbarrier.try_wait.parity", "b64", SHARED)
def try_wait(e, op, done, barrier, parity):
    """Emit a wait for an mbarrier's phase. Lanes whose phase is not complete repeat this block, which begins here."""
    e.everyone()
    arguments = *e.pointer(barrier), e.read(parity, U32), e.program.index[done], e.block, e.block + 1, e.current.line
    e.go(f"('try', {', '.join(map(str, arguments))})")
