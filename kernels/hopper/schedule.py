"""Order in which the programs of a persistent grid process blocks of rows or keys, several blocks each."""

from typing import NamedTuple

import triton
import triton.language as tl

from ..vocabulary import span


class Schedule(NamedTuple):
    """Order in which programs process blocks of rows or keys, longest first. A plane is one head of one batch.

    blocks: number in each plane. planes: number of planes. section: number of planes that share L2; a section is done
    before the next begins. paired: 1 if programs take pairs, a long block of one plane and a short block of the next.
    Then planes is even, and under a causal mask with Sq = Sk all pairs have equal work.
    """

    blocks: tl.tensor
    planes: tl.tensor
    section: tl.tensor
    paired: tl.tensor


@triton.jit
def _at(n, program, programs):
    """Return the index, in the Schedule's order, of a program's n-th block.

    The order of programs alternates (0, 1, 2, 2, 1, 0), so that programs get nearly equal work from shrinking blocks.
    """
    return n * programs + program + (n % 2) * (programs - 1 - 2 * program)


@triton.jit
def share(schedule, program, programs):
    """Return how many blocks of the Schedule a program processes."""
    total = schedule.blocks * schedule.planes >> schedule.paired
    whole = total // programs
    return whole + (_at(whole, program, programs) < total).to(tl.int32) << schedule.paired


@triton.jit
def take(schedule, n, program, programs, heads, BLOCK: tl.constexpr, first_plane=0):
    """Return (first row, batch and head as a Plane) of a program's n-th block; planes count from first_plane."""
    paired, is_second = schedule.paired, n & schedule.paired
    at = _at(n >> paired, program, programs)
    section = tl.maximum(schedule.section >> paired, 1)
    before = at // (schedule.blocks * section) * section
    together = tl.minimum(section, (schedule.planes >> paired) - before)
    within = at - before * schedule.blocks
    index = first_plane + (before + within % together << paired) + is_second
    from_last = within // together
    block = tl.where(is_second == 0, schedule.blocks - 1 - from_last, from_last)
    return block * BLOCK, span.Plane(index // heads, index % heads, index, ())
