"""Emulator of a GPU: executes a Program, each instruction for all lanes (threads) that have reached it.

Lanes that diverge continue as groups. The group furthest behind in the code runs first, one that polls memory last.
Groups at the same instruction are merged. There is no time: asynchronous results arrive as late as the program allows.
With a random `order`, partitions of warps take turns by chance, and copies may arrive earlier.
"""

import warnings
from typing import NamedTuple

import numpy as np

from .boxes import Boxes
from .copies import Copies
from .products import Products
from .report import Fault


class Arrived(NamedTuple):
    """Lanes that wait at a barrier, the clocks that their warps passed to it, and the basic block that follows."""

    number: int
    mask: np.ndarray
    known: np.ndarray  # (C, clocks), by block
    then: int
    line: int


class Machine(Copies, Products, Boxes):
    """Emulator with the instructions of all base classes; see `Lanes` for the arguments."""

    def __init__(self, *launch, order=None):
        super().__init__(*launch)
        self.order, thread = order, np.arange(self.L) % self.T
        # A specialised kernel has more than 8 warps, and single warps in its last warpgroup; partitions share no code.
        self.partition = np.where(thread < (self.T - 128 if self.T > 256 else self.T), thread // 128, thread // 32)
        self.ready, self.arrived = {0: None}, []  # {block of instructions: mask of its lanes}, [Arrived]
        self.most_steps = 1 << 20
        self.polled = dict.fromkeys(self.program.polls, 0)  # step at which a block last ran
        self.moved = 0  # step at which a block that does not poll was last ready

    def run(self):
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for step in range(self.most_steps):
                if not self.ready:
                    self.finish()
                    return
                at = self.next(step)
                m = self.ready.pop(at)
                found = self.program.function(at, m is not None)(self, self.R, m)
                if isinstance(found, int):
                    self.enter(found, m)
                else:
                    getattr(self, "at_" + found[0])(m, *found[1:])
        raise Fault(f"the program has not ended after {self.most_steps} blocks of instructions")

    def next(self, step):
        """Return the basic block to run: the first or, if all poll memory, the one that has waited longest."""
        ready = self.ready.keys() if self.order is None else self.of_one()
        at = min(ready, key=lambda at: (self.polled.get(at, -1), at)) if self.program.polls else min(ready)
        # LLVM may place a block before one that jumps to it, but lanes of both go on together.
        at = min((each for each in ready if self.program.jumps.get(each) == at), default=at)
        if at in self.program.polls:
            self.polled[at] = step
        if not self.ready.keys() <= self.polled.keys():
            self.moved = step
        if step - self.moved > 100 * len(self.polled):
            raise Fault("deadlock: all threads poll memory")
        return at

    def of_one(self):
        """Return the blocks at which lanes of a random partition are ready. At random, also deliver a copy."""
        flying = [barrier for barrier in self.barriers.values() if barrier.copies]
        if flying and self.order.random() < 0.3:
            self.deliver(self.order.choice(flying))
        mine = self.partition == self.order.choice(self.partition[: self.T])
        return [at for at, m in self.ready.items() if m is None or m[mine].any()] or self.ready.keys()

    def enter(self, at, m):
        """Let lanes continue at a basic block of instructions; -1 is the end."""
        if at < 0 or not (m is None or m.any()):
            return
        there = self.ready.get(at, m)
        m = None if m is None or there is None else m | there
        self.ready[at] = None if m is None or m.all() else m

    def finish(self):
        """Check the end of a launch: no lane may wait, and only additions to global memory may still be in flight."""
        self.add_up()
        waiting = [(each.mask, f"barrier {each.number}, line {each.line}") for each in self.arrived]
        waiting += [(m, f"an mbarrier, line {line}") for _, m, line in self.sleepers]
        if waiting:
            raise Fault("deadlock: " + "; ".join(f"{m.sum()} threads wait at {what}" for m, what in waiting))
        left = [(copy.line, "a copy to shared memory goes on") for copy in self.copies]
        left += [(copy[-1], "a load of a box goes on") for each in self.barriers.values() for copy in each.copies]
        left += [(pieces.line, "a product runs") for pieces in self.reading]
        left += [(pieces.line, "a store of a box reads shared memory") for pieces in self.stores]
        for line, what in left:
            self.report.add("async", line, f"a block ends while {what}")

    def at_br(self, m, taken, target, otherwise):
        self.enter(target, taken if m is None else taken & m)
        self.enter(otherwise, ~taken if m is None else ~taken & m)

    def at_brx(self, m, index, targets, line):
        if (self.full(index)[self.lanes(m)] >= len(targets)).any():
            raise Fault(f"line {line}: the index is past the table")
        for number, target in enumerate(targets):
            self.enter(target, index == number if m is None else (index == number) & m)

    def at_bar(self, m, number, count, then, line):
        """Make lanes wait at a barrier, which opens when `count` threads have arrived (bar.sync).

        A thread that has ended never arrives; hardware may count it.
        """
        number = self.alike(m, number, line)
        needed = self.T if count is None else self.alike(m, count, line)
        warps = self.converged(m, line)
        mask = np.ones(self.L, bool) if m is None else m
        known = np.zeros((self.C, self.clocks), np.int32)
        np.maximum.at(known, warps // self.W, self.publish(warps))
        self.arrived.append(Arrived(number, mask, known, then, line))
        counts = sum(each.mask.reshape(self.C, self.T).sum(1) for each in self.arrived if each.number == number)
        if (counts > needed).any():
            raise Fault(f"line {line}: barrier {number} has {counts.max()} threads, of {needed}")
        if (counts == needed).any():
            self.open_barrier(number, (counts == needed)[self.cta])

    def open_barrier(self, number, lanes):
        """Let the threads of `lanes` that wait at a barrier continue. Their warps learn of all accesses before it."""
        here = [each for each in self.arrived if each.number == number]
        self.arrived = [each for each in self.arrived if each.number != number]
        known = np.maximum.reduce([each.known for each in here])
        for each in here:
            free = each.mask & lanes
            warps = np.flatnonzero(free[::32])
            self.learn(warps, known[warps // self.W])
            self.enter(each.then, free)
            if (each.mask & ~lanes).any():
                self.arrived.append(each._replace(mask=each.mask & ~lanes))
