"""The backward for Hopper that stores gradients of scores, elsewhere as `gluon` has it; and what a slip would do."""

import itertools

import pytest
import torch

pytest.importorskip("triton", reason="kernels need Triton")

import fusedattn as fa
from fusedattn.launch import hopper, run, tiles
from fusedattn.launch.tiles import Backward

from .. import cases, sample
from ..cases import Case

if hopper.missing is not None:
    pytest.skip(hopper.missing, allow_module_level=True)

from fusedattn.kernels.hopper import ring, steps, stored

from . import test_hopper
from .test_hopper import check, emulate, halved, launches, slipped, slipped_in, takes

BF16 = dict(dtype=torch.bfloat16)
WIDE = dict(D=256, Dv=256)
CASES = [
    Case("many blocks", B=2, Hq=4, Hkv=2, Sq=70, Sk=50, **WIDE, **BF16),
]


@pytest.fixture
def launched(monkeypatch):
    """The names of kernels, as they are launched."""
    return launches(monkeypatch)


@pytest.fixture(autouse=True)
def _same_bits(monkeypatch):
    """Of wide heads it is the one that has the same bits each time."""
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_case(case, monkeypatch, launched, poison):
    emulate(monkeypatch)
    check(case, "cpu")
    assert launched[-3:] == ["hopper_stored", "hopper_dk", "hopper_dq"]
