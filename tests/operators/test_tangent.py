"""Forward mode: tangents of output, lse and weights, of every option, by every backend."""

import pytest

import fusedattn as fa

from .. import cases
from ..sample import matrix, named
from ..tangents import compare, directions, with_tangents


def _attend(backend):
    return lambda **arguments: fa.attention(**arguments, backend=backend)


def _hold(case, backend, names=None):
    tensors, options = case.draw()
    moved = directions(tensors, options, names)
    found = compare(with_tangents(_attend(backend), tensors, options, moved), tensors, options, moved)
    assert all(verdict.ok for verdict in found.values()), {name: x.why for name, x in found.items()}


CASES = [*named(cases.COVERING), *matrix(*named([*cases.SHAPES, *cases.SINGLE, *cases.OPTION_PAIRS]))]


@pytest.mark.parametrize("case", CASES)
def test_tangents_by_kernels(case, device):
    _hold(case, "triton")


@pytest.mark.parametrize("case", CASES)
def test_tangents_on_a_cpu(case):
    """By "cpu" where it takes the call, else by the formula."""
    _hold(case, None)
