"""Errors of a kernel: a Fault ends its run, a Report counts the others."""


class Fault(Exception):
    """An error that no GPU lets pass: an access out of bounds or misaligned, a deadlock, a warp that acts in parts."""


class Report:
    """The errors of a kernel that ran to its end.

    found: {kind: {line of PTX: (count, an example)}}, of these kinds:
        uninitialised: a lane loads bytes of global memory that nobody wrote.
        astray: a lane accesses bytes of global memory that no tensor has, but what lies between elements of one.
        race: two warps access one place of shared memory, and no barrier puts them in order.
        race between CTAs: a block stores to global memory where another block stored, or loads from there.
        lanes differ: one instruction stores different numbers at one place.
        async: nobody waits for a product or a copy, nobody fences what it reads, or somebody overwrites what it uses.
        unfenced mbarrier: a copy uses an mbarrier, and nobody has fenced what initialised it.
        unfenced: a register that a product uses was written after the last wgmma.fence.
    """

    def __init__(self):
        self.found = {}

    def add(self, kind, line, text, count=1):
        """Count errors of a line; its first text is the example."""
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
