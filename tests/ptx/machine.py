"""The machine: executes a Program, each instruction on all lanes that have come to it.

Lanes that part go on as groups. The group that is furthest behind in the code goes first, and one
that loads a number until it is another last; groups that meet become one.
There is no time: whatever is asynchronous arrives as late as the program allows. `setmaxnreg` does nothing.
"""

import warnings
from typing import NamedTuple

import numpy as np

from .boxes import Boxes
from .copies import Copies
from .products import Products
from .report import Fault


class Arrived(NamedTuple):
    """Lanes that have come to a barrier, what their warps had published, and where they go on (-1: nowhere)."""

    number: int
    mask: np.ndarray
    known: np.ndarray  # (C, clocks), by block
    then: int
    line: int


class Machine(Copies, Products, Boxes):
    """Lanes, and all instructions that they may execute; see `Lanes` for the arguments."""

    def __init__(self, *launch):
        super().__init__(*launch)
        self.ready, self.arrived = {0: None}, []  # {block of instructions: mask of the lanes that are there}, [Arrived]
        self.most_steps = 1 << 20
        self.polled = dict.fromkeys(self.program.polls, 0)  # when a block was last done

    def run(self):
        """Execute the program from its first block of instructions until all lanes have ended, in so many steps."""
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for steps in range(self.most_steps):
                if not self.ready:
                    self.finish()
                    return steps
                at = self.next(steps)
                m = self.ready.pop(at)
                found = self.program.function(at, m is not None)(self, self.R, m)
                if isinstance(found, int):
                    self.enter(found, m)
                else:
                    getattr(self, "at_" + found[0])(m, *found[1:])
        raise Fault(f"after {self.most_steps} blocks of instructions it has not ended")

    def next(self, step):
        """The block of instructions that goes on: the first, or, where all wait for numbers, who has waited longest."""
        at = min(self.ready, key=lambda at: (self.polled.get(at, -1), at)) if self.program.polls else min(self.ready)
        if at in self.program.polls:
            self.polled[at] = step
        return at

    def enter(self, at, m):
        """Lanes go on at a block of instructions; -1 is the end."""
        if at < 0 or not (m is None or m.any()):
            return
        there = self.ready.get(at, m)
        m = None if m is None or there is None else m | there
        self.ready[at] = None if m is None or m.all() else m

    def finish(self):
        """No lane can go on: none may wait, and nothing asynchronous may still run but additions to global memory."""
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
        """A conditional branch."""
        self.enter(target, taken if m is None else taken & m)
        self.enter(otherwise, ~taken if m is None else ~taken & m)

    def at_brx(self, m, index, targets, line):
        """A branch by a table."""
        if (self.full(index)[self.lanes(m)] >= len(targets)).any():
            raise Fault(f"line {line}: an index past the table of a branch")
        for number, target in enumerate(targets):
            self.enter(target, index == number if m is None else (index == number) & m)

    def at_bar(self, m, number, count, then, waits, line):
        """bar.sync, or bar.arrive if nobody waits: the barrier of a block opens when `count` threads have come.

        A thread that has ended never comes, where hardware may count it.
        """
        number = self.alike(m, number, line)
        needed = self.T if count is None else self.alike(m, count, line)
        warps = self.converged(m, line)
        if not waits:
            self.enter(then, m)
        mask = np.ones(self.L, bool) if m is None else m
        known = np.zeros((self.C, self.clocks), np.int32)
        np.maximum.at(known, warps // self.W, self.publish(warps))
        self.arrived.append(Arrived(number, mask, known, then if waits else -1, line))
        counts = sum(each.mask.reshape(self.C, self.T).sum(1) for each in self.arrived if each.number == number)
        if (counts > needed).any():
            raise Fault(f"line {line}: barrier {number} has {counts.max()} threads, of {needed}")
        if (counts == needed).any():
            self.open_barrier(number, (counts == needed)[self.cta])

    def open_barrier(self, number, lanes):
        """A barrier opens for the lanes of some blocks. Who waited learns what all had published."""
        here = [each for each in self.arrived if each.number == number]
        self.arrived = [each for each in self.arrived if each.number != number]
        known = np.maximum.reduce([each.known for each in here])
        for each in here:
            if each.then >= 0:
                free = each.mask & lanes
                warps = np.flatnonzero(free[::32])
                self.learn(warps, known[warps // self.W])
                self.enter(each.then, free)
            if (each.mask & ~lanes).any():
                self.arrived.append(each._replace(mask=each.mask & ~lanes))
