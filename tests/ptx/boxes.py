"""Emulates TMA copies (cp.async.bulk.tensor): a box of a global tensor is dense and swizzled in shared memory.

A load reads global memory when it begins, and arrives when a thread waits for its mbarrier. Until then its destination
is NaN. A store writes global memory when it begins; its source must not be overwritten before its group is waited
for. An addition is done when its group is waited for, but not by a wait for reads alone.
"""

import numpy as np

from .mbarriers import Mbarriers
from .memory import GlobalMemory, TensorMap
from .ops import F32, S32, S64
from .products import swizzled
from .report import Fault
from .shared import SMEM_BASE, Flight, waited

SPANS = {0: 16, 1: 32, 2: 64, 3: 128}  # {swizzle mode in a descriptor: bytes of a row that it permutes}
FLOAT32 = 7  # number of the type float32 in a descriptor; only this type can be added


def elements(of, coordinates):
    """Return (mask of the box elements inside the tensor, address of each element) for a box at some coordinates."""
    rows = of.strides[:-1]
    if of.base % 16 or any(step * of.itemsize % 16 for step in rows) or of.strides[-1] != 1 or max(of.block) > 256:
        raise Fault(f"the driver refuses this descriptor: {of}")
    wide = of.block[-1] * of.itemsize
    if wide % 16 or (of.swizzle and wide > SPANS[of.swizzle]):
        raise Fault(f"the driver refuses this box: {of}")
    if of.padding:
        raise NotImplementedError("padding with NaN")
    place = np.indices(of.block).reshape(len(of.block), -1).T + coordinates[::-1]
    return ((place >= 0) & (place < of.shape)).all(1), of.base + (place * of.strides).sum(1) * of.itemsize


class Boxes(GlobalMemory, Mbarriers):
    """TMA copies of a launch: the stores in flight, and the number of groups that each lane (thread) has committed."""

    def __init__(self, *launch):
        super().__init__(*launch)
        self.stores, self.stored = [], np.zeros(self.L, S64)
        self.additions = []  # (lane, groups committed before, float32 memory, places in it, numbers)

    def boxes(self, m, descriptor, coordinates, pointer, offset, line):
        """Yield (lane, TensorMap, mask of elements in the tensor, addresses, indices in `smem`) per active lane."""
        coordinates = [self.full(x).view(S32) for x in coordinates]
        for lane, address, shared, *start in self.each(m, descriptor, pointer, *coordinates):
            encoded = self.param_at(address)
            if not hasattr(encoded, "what"):
                raise Fault(f"line {line}: the parameter is no descriptor")
            of = TensorMap(*encoded.what)
            inside, addresses = elements(of, start)
            if (shared + offset) % 128:
                raise Fault(f"line {line}: a box at {shared + offset}, not a multiple of 128")
            at = shared + offset + np.arange(len(inside)) * of.itemsize
            at = swizzled(at, SPANS[of.swizzle]) - SMEM_BASE
            self.check_bounds(at, of.itemsize, line)
            yield lane, of, inside, addresses, at + self.cta[lane] * self.stride

    def pieces(self, lane, at, size):
        """Return (lane, place) of each 16-byte piece of a box; a swizzle moves such pieces as a whole."""
        at = at[:: 16 // size]
        return np.full(len(at), lane), at

    def bulk_in(self, m, descriptor, coordinates, pointer, offset, barrier, barrier_offset, line):
        """Start a TMA load of a box into shared memory; elements outside the tensor are 0."""
        for lane, of, inside, addresses, at in self.boxes(m, descriptor, coordinates, pointer, offset, line):
            data = np.zeros(len(at), f"u{of.itemsize}")
            if inside.any():
                allocation, places = self._find(addresses[inside], of.itemsize, line)
                self.reads_global(allocation, places, of.itemsize, self.number[lane], line)
                data[inside] = allocation.view(data.dtype)[places // of.itemsize]
            owner, pieces = self.pieces(lane, at, of.itemsize)
            self.writes(self.gwarp[owner], pieces, 16, line)
            self.smem[at[:, None] + np.arange(of.itemsize)] = 0xFF
            address, begun = int(self.full(barrier)[lane]) + barrier_offset, self.begins_async(int(self.cta[lane]))
            self.barrier(self.gwarp[lane], address, line, fenced=True).copies.append((at, data, begun, line))
            self.wake_up()

    def bulk_out(self, m, add, descriptor, coordinates, pointer, offset, line):
        """Start a TMA store of a box, or an addition to global memory."""
        for lane, of, inside, addresses, at in self.boxes(m, descriptor, coordinates, pointer, offset, line):
            owner, pieces = self.pieces(lane, at, of.itemsize)
            self.reads_async(self.gwarp[owner], pieces, 16, "a copy", line)
            self.stores.append(Flight(owner, self.stored[owner], pieces, line))
            if not inside.any():
                continue
            data = self.smem.view(f"u{of.itemsize}")[at[inside] // of.itemsize]
            allocation, places = self._find(addresses[inside], of.itemsize, line)
            if not add:
                self.writes_global(allocation, places, of.itemsize, self.number[lane], line)
                allocation.view(data.dtype)[places // of.itemsize] = data
            elif of.kind == FLOAT32:
                bad = allocation.unwritten(places, of.itemsize)
                self.complain("uninitialised", bad, allocation, places, "was written by nobody", line)
                numbers = data.copy().view(F32)
                self.additions.append((lane, self.stored[lane], allocation.view(F32), places // 4, numbers))
            else:
                raise NotImplementedError(f"line {line}: adds elements of type {of.kind}")

    def _find(self, addresses, size, line):
        allocation = self.memory.find(int(addresses.min()), int(addresses.max()) + size, line)
        return allocation, addresses - allocation.base

    def bulk_commit(self, m):
        self.stored += 1 if m is None else m

    def add_up(self, m=None, limit=None):
        """Do the TMA additions of groups below `limit` in the lanes of m; by default all that are left, last first."""
        left = []
        for lane, group, memory, places, numbers in self.additions if limit is not None else reversed(self.additions):
            if limit is None or (group < limit[lane] and (m is None or m[lane])):
                memory[places] += numbers
            else:
                left.append((lane, group, memory, places, numbers))
        self.additions = left

    def bulk_wait(self, m, count):
        """Wait until at most `count` groups of stores are in flight (cp.async.bulk.wait_group)."""
        self.add_up(m, self.stored - count)
        self.bulk_wait_read(m, count)

    def bulk_wait_read(self, m, count):
        """Wait until at most `count` groups still read shared memory (cp.async.bulk.wait_group.read)."""
        done, self.stores = waited(self.stores, self.stored - count, m)
        for pieces in done:
            self.release(self.gwarp[pieces.lane], pieces.at, 16)
