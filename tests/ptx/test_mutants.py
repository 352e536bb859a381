"""Compiled code that is broken on purpose, in one place: what executes it sees it."""

import pathlib
import random

import pytest

pytest.importorskip("triton", reason="kernels need Triton")

from fusedattn import kernels

from ..sample import matrix
from . import equivalent, mutants, mutations

FIRST, *REST = (
    pytest.param(*each, id="-".join(map(str, each)).replace(" ", "_"))
    for each in (
        ("forward", 80, "barrier left out"),
        ("decode", 80, "negated branch"),
        ("forward", 90, "proxy fence left out"),
        ("hopper", 90, "product not waited for"),
        ("hopper", 90, "mbarrier not waited for"),
    )
)


@pytest.mark.parametrize("kernel, capability, name", [FIRST, *matrix(*REST)])
def test_a_planted_mistake_is_seen(kernel, capability, name):
    judge = mutants.Judge(kernel, capability)
    original = judge.original()
    (mutant,) = mutants.mutants(original, 1, random.Random(0), name)
    assert judge.seen(mutant), f"line {mutant.line}: {mutant.text}"


UNBROKEN = pytest.param("decode", 80), *matrix(pytest.param("hopper", 90))


@pytest.mark.parametrize("kernel, capability", UNBROKEN)
def test_the_original_is_not_taken_for_a_mutant(kernel, capability):
    judge = mutants.Judge(kernel, capability)
    judge.order = judge.order[:3]
    unbroken = mutations.Mutant(mutations.MUTATIONS[0], 1, "", "", "", judge.original() + "\n// the same")
    assert judge.seen(unbroken) is None


def test_what_is_called_equivalent_is_of_lines_that_there_are():
    paths = pathlib.Path(kernels.__file__).parent.rglob("*.py")
    lines = [f"{path.name}: {line.strip()}" for path in paths for line in path.read_text().splitlines()]
    gone = {each.source for each in equivalent.EQUIVALENT if not any(line.startswith(each.source) for line in lines)}
    assert not gone
