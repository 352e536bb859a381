"""The order in which programs take blocks of rows, or of keys, several each."""

from typing import NamedTuple

import triton
import triton.language as tl

from ..vocabulary import span


class Schedule(NamedTuple):
    """Blocks of rows of so many planes, ordered so that the longest come first, in sections of planes.

    The keys and values of a section are few enough to stay in L2 while its blocks are worked on. paired is 1 where two
    blocks are dealt at once, a long one and a short one of neighbouring planes, of which there are an even number, and
    0 elsewhere. Under a causal mask all such pairs are equally long.
    """

    blocks: tl.tensor
    planes: tl.tensor
    section: tl.tensor
    paired: tl.tensor


@triton.jit
def _at(n, program, programs):
    """Where in the order the n-th block of a program stands: they are dealt back and forth.

    So the blocks of each come to nearly the same length, though they shrink from one deal to the next.
    """
    return n * programs + program + (n % 2) * (programs - 1 - 2 * program)


@triton.jit
def share(schedule, program, programs):
    """How many blocks a program takes."""
    total = schedule.blocks * schedule.planes >> schedule.paired
    whole = total // programs
    return whole + (_at(whole, program, programs) < total).to(tl.int32) << schedule.paired


@triton.jit
def take(schedule, n, program, programs, heads, BLOCK: tl.constexpr, first_plane=0):
    """(first row, Plane) of the n-th block of a program, of planes from first_plane on."""
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
