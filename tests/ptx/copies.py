"""Emulates cp.async: threads copy bytes from global to shared memory, and wait for groups of their copies.

A copy reads global memory when it begins, and arrives when its thread waits for its group. Until then its destination
is NaN, and a write there is an error.
"""

import numpy as np

from .memory import GlobalMemory
from .ops import S64, U32
from .shared import Flight, SharedMemory, waited


class Copies(GlobalMemory, SharedMemory):
    """Copies by cp.async: those in flight, and the number of groups that each lane (thread) has committed."""

    def __init__(self, *launch):
        super().__init__(*launch)
        self.copies, self.committed = [], np.zeros(self.L, S64)

    def cp_async(self, m, target, target_offset, source, source_offset, size, given, line):
        """Copy `size` bytes in each active lane, or write zeros where `given` is 0."""
        lanes = np.arange(self.L)[self.lanes(m)]
        at = self.smem_at(lanes, target, target_offset, size, line)
        count = self.full(U32(size) if given is None else given)
        if not np.isin(count[lanes], (0, size)).all():
            raise NotImplementedError(f"line {line}: copies of other than {size} bytes, or none")
        reading = count > 0 if m is None else (count > 0) & m
        data = self.load_global(reading, source, source_offset, U32, size // 4, line)[:, lanes]
        self.writes(self.gwarp[lanes], at, size, line)
        self.use(self.cells(at, size), 1)
        self._fill(at, np.full_like(data, 0xFFFFFFFF))
        self.copies.append(Flight(lanes, self.committed[lanes], at, line, data.T))

    def cp_commit(self, m):
        self.committed += 1 if m is None else m

    def cp_wait(self, m, count):
        """Complete all but the last `count` groups of copies (cp.async.wait_group)."""
        done, self.copies = waited(self.copies, self.committed - count, m)
        for copy in done:
            size = 4 * copy.data.shape[1]
            self.use(self.cells(copy.at, size), -1)
            self.writes(self.gwarp[copy.lane], copy.at, size, copy.line)
            self._fill(copy.at, copy.data.T)

    def _fill(self, at, words):
        self.smem.view(U32)[at // 4 + np.arange(len(words))[:, None]] = words
