"""Emulates mbarriers: barriers in shared memory that count threads and bytes. Threads wait for a phase by its parity.

The bytes of a copy arrive when a thread waits for the phase and all threads have arrived. A wait lasts until its phase
is complete; hardware may give up earlier. The initialisation of an mbarrier must be ordered before each use, and
fenced before a copy uses it.
"""

import numpy as np

from .ops import S32, S64, U32
from .report import Fault
from .shared import SharedMemory


class Barrier:
    """State of an mbarrier of a block: the threads and bytes that its current phase still waits for.

    copies: (places in `smem`, elements, start time, line) of copies in flight. coming, known: the clocks published by
    the arrivals of this phase, and of the phase before. made: the warp that initialised it, and the time.
    """

    def __init__(self, cta, count, clocks, made):
        self.cta, self.count, self.pending, self.bytes, self.phase, self.made = cta, count, count, 0, 0, made
        self.copies, self.coming, self.known = [], np.zeros(clocks, S32), np.zeros(clocks, S32)


class Mbarriers(SharedMemory):
    """The mbarriers of all blocks, and the lanes that wait at them: (next basic block, mask, line)."""

    def __init__(self, *launch):
        super().__init__(*launch)
        self.barriers, self.sleepers = {}, []

    def barrier(self, gwarp, address, line, fenced=False):
        """Return the Barrier at an address, for warps of one block. If `fenced`, its initialisation must be fenced."""
        cta = int(np.min(gwarp)) // self.W
        if (cta, address) not in self.barriers:
            raise Fault(f"line {line}: there is no mbarrier at {address}")
        found = self.barriers[cta, address]
        self.finds(gwarp, *found.made, "uses the mbarrier", line, fenced)
        return found

    def mbarrier_init(self, m, pointer, offset, count, line):
        """Create a Barrier at which `count` threads arrive in each phase (mbarrier.init)."""
        self.smem_at(self.lanes(m), self.full(pointer), offset, 8, line)
        for lane, address, n in self.each(m, pointer, count):
            cta, made = int(self.cta[lane]), self.now(self.gwarp[lane])
            self.barriers[cta, address + offset] = Barrier(cta, n, self.clocks, made)

    def mbarrier_inval(self, m, pointer, offset, line):
        for lane, address in self.each(m, pointer):
            self.barrier(self.gwarp[lane], address + offset, line)
            del self.barriers[int(self.cta[lane]), address + offset]

    def mbarrier_arrive(self, m, pointer, offset, count, expected, line):
        """Count `count` arrivals at an mbarrier, and expect `expected` more bytes; None is 0."""
        zero = U32(0)
        count, expected = (zero if x is None else x for x in (count, expected))
        for lane, address, arrive, more in self.each(m, pointer, count, expected):
            barrier = self.barrier(self.gwarp[lane], address + offset, line)
            if arrive > barrier.pending:
                raise Fault(f"line {line}: more arrive at an mbarrier than it counts")
            barrier.bytes += more
            barrier.pending -= arrive
            if arrive:
                barrier.coming = np.maximum(barrier.coming, self.publish(self.gwarp[lane]))
            self.complete(barrier)

    def complete(self, barrier):
        """Start the next phase of an mbarrier if its current phase is complete."""
        if barrier.pending == 0 and barrier.bytes == 0:
            barrier.phase += 1
            barrier.pending = barrier.count
            barrier.coming, barrier.known = np.zeros_like(barrier.coming), barrier.coming
            self.wake_up()

    def wake_up(self):
        """Let all lanes that wait at mbarriers test them again."""
        for here, m, _ in self.sleepers:
            self.enter(here, m)
        self.sleepers = []

    def deliver(self, barrier):
        for at, data, begun, _ in barrier.copies:
            self.smem.view(data.dtype)[at // data.itemsize] = data
            self.writes_async(at, data.itemsize, begun)
            barrier.coming[self.W] = max(barrier.coming[self.W], begun)
            barrier.bytes -= data.nbytes
        barrier.copies = []
        self.complete(barrier)

    def at_try(self, m, pointer, offset, parity, result, here, then, line):
        """Let lanes continue if their phase is complete, or make them wait (mbarrier.try_wait)."""
        lanes = np.arange(self.L)[self.lanes(m)]
        keys = np.stack([self.full(x)[lanes].astype(S64) for x in (self.cta, pointer, parity)])
        kinds, kind = np.unique(keys, axis=1, return_inverse=True)
        go = np.zeros(self.L, bool)
        for i, (_, address, waited) in enumerate(kinds.T.tolist()):
            some = lanes[kind.reshape(-1) == i]
            warps = np.unique(self.gwarp[some])
            barrier = self.barrier(warps, address + offset, line)
            if barrier.phase & 1 == waited and barrier.pending == 0:
                self.deliver(barrier)
            if barrier.phase & 1 != waited:
                go[some] = True
                self.learn(warps, barrier.known)
        rest = ~go if m is None else m & ~go
        self.R[result] = self.R[result] | go
        self.enter(then, go)
        if rest.any():
            self.sleepers.append((here, rest, line))
