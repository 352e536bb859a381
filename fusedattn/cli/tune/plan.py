"""What there is to prove and to time: candidates, the most telling first, and the cases that they are timed on."""

import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence

import torch

from ...bench.cases import TOKENS, WIDTH, Case
from ...launch import tiles, tuned
from ...launch.tuned import Candidate

WIDTHS = (128, 64, 256)
LENGTHS = (4096, 1024)
# {load: (causal, options) of its cases}
OPTIONS = {"plain": ((False, ""), (True, "")), "masked": ((False, "documents=8"),), "rich": ((True, "dropout=0.1"),)}
WAITING = "waiting"  # the status of what nobody has tried


def candidates(
    capability: int | None, dtypes: Sequence[str], loads: Sequence[str], widths: Collection[int] = WIDTHS
) -> Iterator[list[Candidate]]:
    """Groups of candidates: those of one dtype, load and width, in the order in which they are tried."""
    for dtype, load, width in itertools.product(dtypes, loads, (width for width in WIDTHS if width in widths)):
        itemsize = getattr(torch, dtype).itemsize
        group: list[Candidate] = []
        for kernel in tuned.FORMS:
            forms: Iterable = (None,)
            if kernel in tuned.KERNELS:
                usable = kernel != "one_pass" or width <= tiles.ONE_PASS
                forms = tiles.candidates(kernel, capability, itemsize, width, load) if usable else ()
            elif kernel in tiles.ON_HOPPER:
                forms = (
                    tiles.ON_HOPPER[kernel].get(width, ()) if (capability, itemsize, load) == (90, 2, "plain") else ()
                )
            group += [Candidate(kernel, dtype, width, load, form and tiles.same(form), WAITING) for form in forms]
        yield group


def width_of(case: Case) -> int:
    """The width of the candidates that a case is of."""
    return tiles.row_width(max(case.D, case.Dv))


def cases(candidate: Candidate, shapes: Sequence[Case], lengths: Sequence[int]) -> dict[str, tuple]:
    """{name: fields of a Case} that a candidate is timed on: shapes of its width, or else the usual ones.

    Source of the usual sizes: FlashAttention's paper, whose tokens and width are the same for each length.
    """
    heads = WIDTH // candidate.width
    usual = [Case(TOKENS // n, heads, heads, n, n, candidate.width, candidate.width, False, "") for n in lengths]
    fitting = [shape for shape in shapes if width_of(shape) == candidate.width]
    named = {}
    for shape, (causal, options) in itertools.product(fitting if shapes else usual, OPTIONS[candidate.load]):
        case = shape._replace(causal=causal, dtype=candidate.dtype, options=options)
        sizes = ",".join(map(str, case[:6]))
        named[" ".join([sizes, *options.split(), *["causal"] * causal])] = tuple(case)
    return named
