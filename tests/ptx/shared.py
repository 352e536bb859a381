"""Emulates shared memory: its bytes, the loads and stores of threads, and asynchronous accesses."""

from typing import NamedTuple

import numpy as np

from .clocks import Clocks
from .lanes import disagree
from .ops import S64, U8
from .report import Fault

SMEM_BASE = 1024  # the first KB of a block's shared memory is the driver's


class Flight(NamedTuple):
    """Asynchronous accesses of one instruction to n addresses in shared memory.

    lane: the lane that began each. group: the number of groups which the lane had committed. data: the bytes of a copy.
    """

    lane: np.ndarray
    group: np.ndarray
    at: np.ndarray
    line: int
    data: np.ndarray | None = None

    def part(self, chosen):
        return Flight(*(x[chosen] if isinstance(x, np.ndarray) else x for x in self))


def waited(flights, limit, m):
    """Return (ended, running) accesses after the lanes of a mask waited for the groups below their limits."""
    done, left = [], []
    for flight in flights:
        ends = flight.group < limit[flight.lane]
        if m is not None:
            ends &= m[flight.lane]
        if ends.any():
            done.append(flight.part(ends))
        if not ends.all():
            left.append(flight.part(~ends))
    return done, left


class SharedMemory(Clocks):
    """Shared memory of all blocks, one after the other. Bytes are NaN until they are written."""

    def __init__(self, *launch):
        super().__init__(*launch)
        self.smem = np.full(self.stride * self.C, 0xFF, U8)

    def smem_address(self, dtype):
        """Return the address at which the kernel's shared memory begins."""
        return self.full(dtype(SMEM_BASE))

    def smem_at(self, lanes, pointer, offset, size, line):
        """Return the indices in `smem` of the bytes where lanes begin to access `size` bytes each."""
        at = (pointer.astype(S64) + (offset - SMEM_BASE))[lanes]
        if (at & (size - 1)).any():
            raise Fault(f"line {line}: misaligned shared access of {size} bytes")
        self.check_bounds(at, size, line)
        return at + self.cta[lanes] * self.stride

    def check_bounds(self, at, size, line):
        """Raise Fault for accesses outside a block's shared memory; `at` are offsets within it."""
        if at.size and (at.min() < 0 or at.max() + size > self.smem_size):
            text = f"shared access [{at.min()}, {at.max() + size}) of {self.smem_size} bytes"
            raise Fault(f"line {line}: {text}")

    def load_shared(self, m, pointer, offset, dtype, n, line):
        """Return the (n, lanes) elements that a load reads (ld.shared)."""
        lanes, size = self.lanes(m), np.dtype(dtype).itemsize
        at = self.smem_at(lanes, pointer, offset, n * size, line)
        self.reads(self.gwarp[lanes], at, n * size, line)
        return self.spread(m, self.smem.view(dtype)[at // size + np.arange(n)[:, None]])

    def store_shared(self, m, pointer, offset, dtype, values, line):
        lanes, given = self.lanes(m), np.stack(values)
        at = self.smem_at(lanes, pointer, offset, given.itemsize * len(given), line)
        self.put(self.gwarp[lanes], at, given[:, lanes], line)

    def put(self, gwarp, at, given, line):
        """Store (n, k) elements: n neighbours at each of k addresses."""
        n, size, view = len(given), given.itemsize, self.smem.view(given.dtype)
        place = at // size + np.arange(n)[:, None]
        self.writes(gwarp, at, n * size, line, (view[place] != given).any(0))
        view[place] = given
        if disagree(view[place], given).any():
            self.report.add("lanes differ", line, "different values are stored at one place of shared memory")
