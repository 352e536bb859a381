"""Emulates wgmma: asynchronous matrix products of a warpgroup (128 lanes).

A product reads its operands when it begins, and its sums arrive when a wait ends its group. Until then the registers of
the sums are NaN, and a write to the operands, in registers or in shared memory, is an error.
"""

import functools

import numpy as np

from .ops import F32, S64, U32, U64
from .report import Fault
from .shared import SMEM_BASE, Flight, waited
from .warp import Warp, floats

SPANS = {0: 16, 1: 128, 2: 64, 3: 32}  # {swizzle mode in a descriptor: bytes of a row that it permutes}


def swizzled(address, span):
    """Return an address with bits 4 to 6 XORed with bits 7 to 9; `span` gives the number of XORed bits."""
    return address ^ (((address >> 7) & (span // 16 - 1)) << 4)


@functools.cache
def layout(descriptor, rows, across, size):
    """Return the byte offsets of the elements of a (rows, 32 bytes) matrix of wgmma, before the swizzle.

    Args:
        across: whether memory is contiguous along the rows (MN-major) or along k (K-major).
    Source: PTX manual, shared memory layout of the matrices of wgmma.
    """
    lead, stride, span = (descriptor >> 16 & 0x3FFF) << 4, (descriptor >> 32 & 0x3FFF) << 4, SPANS[descriptor >> 62]
    r, k = np.indices((rows, 32 // size))
    if across:
        wide = span // size
        per_row, per_k = (stride, lead) if span == 16 else (lead, stride)
        offsets = r % wide * size + r // wide * per_row + k % 8 * span + k // 8 * per_k
    elif span == 16:
        offsets = r % 8 * 16 + r // 8 * stride + k * size // 16 * lead + k * size % 16
    else:
        offsets = r % 8 * span + r // 8 * stride + k * size
    return offsets.reshape(-1)


class Sums:
    """Sums of wgmma products in flight: the values of n registers, and the lanes that add to them."""

    def __init__(self, n, lanes):
        self.values, self.lanes = np.zeros((n, lanes), F32), np.zeros(lanes, bool)
        self.group = np.zeros(lanes, S64)  # group of the last product in each lane
        self.operands = []  # (register, its array, mask of lanes, line) for A in registers


class Products(Warp):
    """The wgmma products in flight: their sums by register number, and their reads of shared memory."""

    def __init__(self, *launch):
        super().__init__(*launch)
        self.sums, self.reading = {}, []
        self.issued = np.zeros(self.L, S64)  # groups that each lane has committed
        self.nan = np.full(self.L, 0xFFFFFFFF, U32).view(F32)
        self.at_fence = list(self.R)

    def wgmma_fence(self, m):
        """Execute wgmma.fence for all registers. The fence of one warpgroup counts for all warpgroups."""
        self.at_fence = list(self.R)

    def wgmma_commit(self, m):
        self.issued += 1 if m is None else m

    def wgmma(self, m, n, kind, d, a, a_names, b, scale, flips, line):
        """Start d = scale * d + a @ b for matrices (64, 32 bytes) and (32 bytes, n) (wgmma.mma_async).

        Args:
            d: register numbers. a: arrays of the registers a_names; the array of a descriptor if a_names is None.
            scale: 1 or 0. flips: whether A and B in shared memory are MN-major.
        """
        groups = self.converged(m, line, 128)
        if a_names is None:
            left, at, rows = self.operand(a[0], 64, flips[0], kind, groups, line)
            self.begin_reading(groups[:, None] * 4 + rows // 16, at, line)
        else:
            left = self.fragment(a, kind, (16, 8 if kind == "tf32" else 16))
            left = left.reshape(self.L // 128, 64, -1)[groups]
        right, at, _ = self.operand(b, n, flips[1], kind, groups, line)
        self.begin_reading(groups[:, None, None] * 4 + np.arange(4)[:, None], at[:, None], line)
        active = np.ones(self.L, bool) if m is None else m
        self.check_fenced(a_names or (), active, line)
        self.accumulate(d, active, (left, right, kind), self.full(scale), line)
        self.sums[d].operands += [(*operand, active, line) for operand in zip(a_names or (), a, strict=False)]

    def operand(self, descriptor, rows, across, kind, groups, line):
        """Return an operand of G warpgroups: (G, rows, k) elements, (G, n) places of 16 bytes in `smem`, their rows."""
        by_group = self.full(descriptor).view(U64).reshape(-1, 128)[groups]
        if (by_group != by_group[:, :1]).any():
            raise Fault(f"line {line}: lanes of a warpgroup have different descriptors")
        start, rest = (by_group[:, :1] & U64(0x3FFF)).astype(S64) << 4, by_group[:, 0] & ~U64(0x3FFF)
        if (rest != rest[0]).any() or int(rest[0]) >> 49 & 7:
            raise NotImplementedError(f"line {line}: descriptors of different layouts, or a base offset")
        size = 4 if kind == "tf32" else 2
        offsets = layout(int(rest[0]), rows, across, size)
        at = swizzled(start + offsets, SPANS[int(rest[0]) >> 62]) - SMEM_BASE
        self.check_bounds(at, size, line)
        at += (groups * 128 // self.T * self.stride)[:, None]
        raw = self.smem.view(f"u{size}")[at // size].reshape(len(groups), rows, 32 // size)
        pieces = np.flatnonzero(offsets % 16 == 0)
        return floats(raw, kind), at[:, pieces], pieces // (32 // size)

    def begin_reading(self, gwarp, at, line):
        """Record reads of 16-byte pieces of shared memory by wgmma, which last until a wait for its group."""
        gwarp, at = (x.reshape(-1) for x in np.broadcast_arrays(gwarp, at))
        self.reads_async(gwarp, at, 16, "a product", line)
        self.reading.append(Flight(gwarp * 32, self.issued[gwarp * 32], at, line))

    def accumulate(self, d, active, factors, scale, line):
        """Add a matrix product to its sums, and set the registers of the sums to NaN."""
        if d not in self.sums:
            if any(set(other) & set(d) for other in self.sums):
                raise NotImplementedError(f"line {line}: sums overlap with sums in flight")
            self.sums[d] = Sums(len(d), self.L)
        sums = self.sums[d]
        fresh = active & ~sums.lanes
        if fresh.any():
            self.check_fenced(d, fresh, line)
            chosen = self.lanes(None if fresh.all() else fresh)
            sums.values[:, chosen] = np.stack([self.R[i][chosen] for i in d])
            for i in d:
                self.R[i] = self.nan if fresh.all() else np.where(fresh, self.nan, self.R[i])
        lanes = self.lanes(None if active.all() else active)
        sums.values[:, lanes] = self.plus(np.where(scale[lanes], sums.values[:, lanes], F32(0)), *factors)
        sums.group[lanes] = self.issued[lanes]
        sums.lanes |= active

    def check_fenced(self, names, mask, line):
        """Report registers of a wgmma that were written after the last wgmma.fence."""
        for i in names:
            if self.differs(i, self.at_fence[i], mask):
                self.report.add("unfenced", line, "a register that a product uses was written after wgmma.fence")
                return

    def differs(self, i, then, mask):
        """Return True if a register differs from an array in any lane of a mask."""
        now = self.R[i]
        return now is not then and (now.view(U32)[mask] != then.view(U32)[mask]).any()

    def wgmma_wait(self, m, count, line):
        """Complete all but the last `count` groups of wgmma (wgmma.wait_group)."""
        limit = self.issued - count
        for d, sums in list(self.sums.items()):
            done = sums.lanes & (sums.group < limit)
            if m is not None:
                done &= m
            if done.any():
                self.finish_sums(d, sums, done, line)
        done, self.reading = waited(self.reading, limit, m)
        for pieces in done:
            self.release(pieces.lane // 32, pieces.at, 16)

    def finish_sums(self, d, sums, done, line):
        """Write finished sums to the registers of some lanes. Report registers of sums or A that changed meanwhile."""
        if any(self.differs(i, self.nan, done) for i in d):
            self.report.add("async", line, "a register was written while a product adds to it")
        for i, values in zip(d, sums.values, strict=True):
            self.R[i] = values.copy() if done.all() else np.where(done, values, self.R[i])
        for i, array, mask, at in sums.operands:
            if self.differs(i, array, mask & done):
                self.report.add("async", at, "a register was written while a product reads it")
        sums.operands = [(i, x, mask & ~done, at) for i, x, mask, at in sums.operands if (mask & ~done).any()]
        sums.lanes &= ~done
        if not sums.lanes.any():
            del self.sums[d]
