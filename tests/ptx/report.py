"""Errors of an emulated kernel: a Fault ends its run, a Report counts the other errors."""


class Fault(Exception):
    """An error that ends the run: an access out of bounds or misaligned, a deadlock, a warp that is not converged."""


class Report:
    """Counts the errors of a kernel that ran to its end.

    found: {kind: {line of PTX: (count, an example)}}. The kinds:
        uninitialised: a load of bytes of global memory that were never written.
        astray: an access to bytes of global memory between the elements of a tensor.
        race: conflicting accesses of two warps to shared memory, without a barrier between them.
        race between CTAs: a store to, or a load from, global memory that another block stored to.
        lanes differ: different numbers stored at one place by one instruction.
        async: a product or copy without a wait, with unfenced operands, or with operands overwritten meanwhile.
        unfenced mbarrier: a copy to an mbarrier whose initialisation is not fenced.
        unfenced: a register of a product that was written after the last wgmma.fence.
    """

    def __init__(self):
        self.found = {}

    def add(self, kind, line, text, count=1):
        """Add `count` errors of a kind at a line of PTX; the first text is the example."""
        lines = self.found.setdefault(kind, {})
        before, example = lines.get(line, (0, text))
        lines[line] = before + int(count), example

    def count(self, kind):
        return sum(n for n, _ in self.found.get(kind, {}).values())

    def __str__(self):
        return "\n".join(
            f"  {kind}, line {line}, {n} times: {text}"
            for kind, lines in self.found.items()
            for line, (n, text) in lines.items()
        )
