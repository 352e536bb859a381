"""Would anybody see it, if compiled code were wrong?    python -m tests.ptx.mutants [80 90] [--each 3] [--kind barrier]

Breaks the PTX of a kernel in one place at a time, and executes calls of it until one shows it: by an access out of
bounds, a race or hazard that is reported, or a result that differs by more than rounding. The calls have the edges at
which a comparison that is off by one differs: rows and keys at 0 and 1, and around a tile, and windows that end there.
"""

import argparse
import random
import sys
import time

import torch

from . import device
from .edges import CALLS
from .mutations import mutants
from .replay import recorded


class Judge:
    """Says of a mutant of a kernel which call shows it: what is right is computed once."""

    def __init__(self, kernel, capability):
        self.kernel, self.capability = kernel, capability
        self.replays, self.order = {}, list(range(len(CALLS[kernel])))

    def original(self):
        """The PTX of the kernel, as the first call has it."""
        return self._replays(0)[0].kernel.asm["ptx"]

    def _replays(self, number):
        if number not in self.replays:
            name = "forward" if self.kernel == "hopper" else self.kernel
            self.replays[number] = recorded(CALLS[self.kernel][number], self.capability, name)
        return self.replays[number]

    def seen(self, mutant):
        """Why a mutant is seen, or None. The call that has seen the last one is asked first."""
        original = self.original()
        try:
            for number in self.order:
                for replay in self._replays(number):
                    if replay.kernel.asm["ptx"] == original and (why := replay.again(mutant.ptx)) is not None:
                        self.order.remove(number)
                        self.order.insert(0, number)
                        return f"call {number}: {why}"
            return None
        finally:
            device.forget(mutant.ptx)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("capabilities", type=int, nargs="*", default=[80])
    parser.add_argument("--each", type=int, default=3, help="mutants of a kernel by each mutation")
    parser.add_argument("--kind", default="", help="part of the name of a mutation or of its kind")
    parser.add_argument("--kernels", nargs="+", default=list(CALLS), choices=CALLS)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    survivors, tally = [], {}
    for capability in chosen.capabilities:
        for kernel in chosen.kernels:
            if kernel == "hopper" and capability != 90:
                continue
            judge = Judge(kernel, capability)
            original = judge.original()
            for mutant in mutants(original, chosen.each, random.Random(0), chosen.kind):
                began = time.monotonic()
                why = judge.seen(mutant)
                kinds = tally.setdefault(mutant.mutation.kind, [])
                kinds.append(why is not None)
                where = (
                    f"sm_{capability} {kernel:8} {mutant.mutation.name:26} line {mutant.line:5} {mutant.text[:44]:44}"
                )
                where += f" {mutant.loops} {mutant.source[:70]:70}"
                print(f"{where} {why or 'SURVIVED'} ({time.monotonic() - began:.1f} s)", flush=True)
                if why is None:
                    survivors.append(where)
    for kind, seen in tally.items():
        print(f"{kind}: {sum(seen)} of {len(seen)} seen")
    return len(survivors)


if __name__ == "__main__":
    sys.exit(main() > 0)
