"""Would anybody see it, if compiled code were wrong?    python -m tests.ptx.mutants [80 90] [--each 3] [--kind barrier]

Breaks the PTX of a kernel in one place at a time, and executes calls of it until one shows it: by an access out of
bounds, a race or hazard that is reported, or a result that differs by more than rounding. The calls have the edges at
which a comparison that is off by one differs: rows and keys at 0 and 1, and around a tile, and windows that end there.
"""

import argparse
import functools
import itertools
import os
import random
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

import torch

from fusedattn.launch import run

from . import device, equivalent, tally
from .edges import CALLS
from .mutations import Mutant, mutants
from .replay import recorded

ENOUGH = 0.95  # of the mutants that are not equivalent


class Judge:
    """Says of a mutant of a kernel which call shows it: what is right is computed once."""

    def __init__(self, kernel, capability):
        self.kernel, self.capability = kernel, capability
        self.replays, self.order = {}, list(range(len(CALLS[kernel])))

    def original(self):
        """The PTX of the kernel, as the first call has it, whose last one is that for dq where there are two."""
        return self._replays(0)[-1 if self.kernel == "hopper_dq" else 0].ptx

    def _replays(self, number):
        if number not in self.replays:
            kernel = run.KERNELS[self.kernel].__name__ if self.kernel in run.KERNELS else self.kernel
            self.replays[number] = recorded(CALLS[self.kernel][number], self.capability, kernel)
        return self.replays[number]

    def seen(self, mutant):
        """Why a mutant is seen, or None. The call that has seen the last one is asked first."""
        original = self.original()
        try:
            for number in self.order:
                for replay in self._replays(number):
                    if replay.ptx == original and (why := replay.again(mutant.ptx)) is not None:
                        self.order.remove(number)
                        self.order.insert(0, number)
                        return f"call {number}: {why}"
            return None
        finally:
            device.forget(mutant.ptx)


class Verdict(NamedTuple):
    """What became of a mutant: seen, equivalent or survived, and why."""

    kernel: str
    capability: int
    mutant: Mutant
    result: str
    why: str


def verdicts(kernel, capability, each, kind):
    """The Verdict of each mutant of a kernel, which are the same in every run."""
    torch.set_num_threads(1)
    judge, found = Judge(kernel, capability), []
    for mutant in mutants(judge.original(), each, random.Random(0), kind):
        result, why = "seen", judge.seen(mutant)
        if why is None:
            why = equivalent.reason(kernel, mutant)
            result = "survived" if why is None else "equivalent"
        told = mutant._replace(mutation=mutant.mutation._replace(becomes=""), ptx="")  # no code, nor functions
        found.append(Verdict(kernel, capability, told, result, why or ""))
        print(tally.line(found[-1]), flush=True)
    return found


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("capabilities", type=int, nargs="*", default=[80])
    parser.add_argument("--each", type=int, default=3, help="mutants of a kernel by each mutation")
    parser.add_argument("--kind", default="", help="part of the name of a mutation or of its kind")
    parser.add_argument("--kernels", nargs="+", default=list(CALLS), choices=CALLS)
    parser.add_argument("--report", action="store_true", help=f"write {tally.REPORT.name}")
    chosen = parser.parse_args(arguments)
    began = time.monotonic()
    work = [(kernel, on) for on in chosen.capabilities for kernel in chosen.kernels]
    work = [(kernel, on) for kernel, on in work if on == 90 or not kernel.startswith("hopper")]
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        parts = pool.map(functools.partial(verdicts, each=chosen.each, kind=chosen.kind), *zip(*work, strict=True))
        found = list(itertools.chain.from_iterable(parts))
    print(f"{tally.summary(found)}, in {time.monotonic() - began:.0f} s")
    if chosen.report:
        tally.write(found, sys.argv[1:] if arguments is None else arguments)
    return tally.share(found) < ENOUGH


if __name__ == "__main__":
    sys.exit(main())
