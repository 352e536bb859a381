"""Vector clocks that find races in shared memory: the accesses that each warp knows of, and the bytes still in use.

A warp learns of another's accesses only by barriers and mbarriers. An access is a race if it conflicts with an unknown
access of another warp, whichever was executed first. The lanes of a warp are always in order, so `bar.warp.sync` does
nothing.

Shared memory is divided into cells of the size of the kernel's smallest access. A block has one clock for each warp and
one for its copy engine. knows[row, other] is the latest time on clock `other` that a warp or the engine knows of.
"""

import numpy as np

from .lanes import Lanes
from .ops import S32


class Clocks(Lanes):
    """Vector clocks of all warps. Methods take numbers of warps, `gwarp`, and bytes [at, at + size), at most 16."""

    def __init__(self, *launch):
        super().__init__(*launch)
        self.grain, self.clocks = self.program.grain, self.W + 1
        cells, warps = self.stride * self.C // self.grain, np.arange(self.W * self.C)
        self.row = warps // self.W * self.clocks + warps % self.W  # the row of each warp in `knows`
        self.knows = np.tile(np.eye(self.clocks, dtype=S32), (self.C, 1))
        self.fenced = np.zeros_like(self.knows)  # known at the last fence of the async proxy
        self.wrote, self.wrote_at = np.zeros(cells, S32), np.zeros(cells, S32)  # the last writer, and its time
        self.read_at = np.zeros((self.W, cells), S32)  # the last read of each warp
        self.used = np.zeros(cells, S32)  # how many products and copies use each cell

    def cells(self, at, size):
        """Return the indices of the cells that each of n byte ranges covers, as (cells per range, n)."""
        return at // self.grain + np.arange(max(1, size // self.grain))[:, None]

    def publish(self, gwarp):
        """Return the vector clocks of warps, which a barrier passes on. Later accesses get a later time."""
        rows = self.row[gwarp]
        known = self.knows[rows].copy()
        self.knows[rows, rows % self.clocks] += 1
        return known

    def learn(self, gwarp, published):
        """Merge the vector clocks of other warps, `published` at a barrier, into those of warps `gwarp`."""
        rows = self.row[gwarp]
        self.knows[rows] = np.maximum(self.knows[rows], published)

    def hazard(self, kind, bad, cells, gwarp, access, other, why, line):
        if bad.any():
            first = np.unravel_index(bad.argmax(), bad.shape)
            byte = int(cells[first]) * self.grain % self.stride
            text = f"warp {gwarp[first[-1]] % self.W} {access} of warp {other[first]} {why}, at byte {byte}"
            self.report.add(kind, line, text, bad.sum())

    def reads(self, gwarp, at, size, line):
        """Record reads of shared memory, and report a race if the reader does not know of the last write.

        Return (the cells of the reads, the last writer of each, the times of these writes).
        """
        cells, row, warp = self.cells(at, size), self.row[gwarp], gwarp % self.W
        other, when = self.wrote[cells], self.wrote_at[cells]
        late = when > self.knows[row, other]
        self.hazard("race", late, cells, gwarp, "reads a store", other, "with no barrier between", line)
        self.read_at[warp, cells] = self.knows[row, warp]
        return cells, other, when

    def writes(self, gwarp, at, size, line, changed=True):
        """Record writes; report a race if a warp changes bytes whose last write or reads it does not know of."""
        cells, row, warp = self.cells(at, size), self.row[gwarp], gwarp % self.W
        other = self.wrote[cells]
        late = (self.wrote_at[cells] > self.knows[row, other]) & changed
        self.hazard("race", late, cells, gwarp, "overwrites a store", other, "with no barrier between", line)
        late = (self.read_at[:, cells] > self.knows[row, : self.W].T[:, None]) & changed  # warp, cell, access
        other = late.argmax(0)
        self.hazard("race", late.any(0), cells, gwarp, "overwrites a load", other, "with no barrier between", line)
        self.wrote[cells], self.wrote_at[cells] = warp, self.knows[row, warp]
        used = (self.used[cells] > 0).sum()
        if used:
            self.report.add("async", line, "overwrites what a product or a copy still uses", used)

    # The async proxy: wgmma and TMA copies

    def fence_async(self, m):
        """Make the writes that the active warps know of visible to wgmma and TMA (fence.proxy.async)."""
        warps = np.arange(self.L // 32) if m is None else np.flatnonzero(m.reshape(-1, 32).any(1))
        self.fenced[self.row[warps]] = self.publish(warps)

    def reads_async(self, gwarp, at, size, what, line):
        """Record reads by wgmma or TMA, which use the bytes until `release`.

        The writer or the reader must have fenced each write. The writer's fence counts once it is executed, even
        without a barrier between it and the read.
        """
        cells, other, when = self.reads(gwarp, at, size, line)
        row = self.row[gwarp]
        bad = (when > self.fenced[row, other]) & (other != self.W)
        if bad.any():
            bad &= when > self.fenced[row // self.clocks * self.clocks + other, other]
            self.hazard("async", bad, cells, gwarp, f"has {what} read a store", other, "that nobody fenced", line)
        self.use(cells, 1)

    def begins_async(self, cta):
        """Return the time at which a block's TMA copy begins; to know of a copy is to know of all earlier copies."""
        row = cta * self.clocks + self.W
        self.knows[row, self.W] += 1
        return int(self.knows[row, self.W]) - 1

    def writes_async(self, at, size, begun):
        """Record writes of the copy engine (TMA), for a copy that began at time `begun`."""
        cells = self.cells(at, size)
        self.wrote[cells], self.wrote_at[cells] = self.W, begun

    # Objects other than bytes

    def now(self, gwarp):
        """Return (a warp's number in its block, the current time on the warp's clock)."""
        warp = int(gwarp) % self.W
        return warp, int(self.knows[self.row[gwarp], warp])

    def finds(self, gwarp, other, when, what, line, fenced=False):
        """Report a race if a warp uses an object that warp `other` made, without a barrier or (`fenced`) a fence."""
        row = self.row[gwarp]
        maker = row // self.clocks * self.clocks + other
        if (when > self.knows[row, other]).any():
            self.report.add("race", line, f"{what} of warp {other} with no barrier between")
        if fenced and ((when > self.fenced[row, other]) & (when > self.fenced[maker, other])).any():
            self.report.add("unfenced mbarrier", line, f"{what} of warp {other} that nobody fenced")

    def use(self, cells, by):
        """Count the wgmma and TMA accesses that use cells: by = 1 begins one, by = -1 ends one."""
        np.add.at(self.used, cells.reshape(-1), S32(by))  # equal dtypes are 40 times as fast

    def release(self, gwarp, at, size):
        """End the use of byte ranges by wgmma or TMA, which read them until now."""
        cells, warp = self.cells(at, size), gwarp % self.W
        self.use(cells, -1)
        self.read_at[warp, cells] = self.knows[self.row[gwarp], warp]
