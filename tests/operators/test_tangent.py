"""Forward mode: tangents of output, lse and weights, of every option, by every backend."""

import weakref

import pytest
import torch

import fusedattn as fa
from fusedattn.naive import formula, tangent

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


def test_no_block_leaves_anything_between_blocks(monkeypatch):
    """glibc would not reuse what they have freed: a tangent of 12288 rows then took 1130 MiB, or 21, as it happened."""
    by_definition, before = tangent._block, []

    def block(*arguments):
        assert all(x() is None for x in before)
        made = by_definition(*arguments)
        before[:] = [weakref.ref(x) for x in made[:2]]
        return made

    monkeypatch.setattr(tangent, "_block", block)
    monkeypatch.setattr(formula, "CACHE", 1)
    x = torch.randn(1, 2, 40, 16)
    moved = torch.func.jvp(lambda x: fa.attention(x, x, x, backend="cpu"), (x,), (x,))[1]
    want = torch.func.jvp(lambda x: fa.reference.attention(x, x, x), (x,), (x,))[1]
    torch.testing.assert_close(moved, want)
    assert before
