"""The backward for Hopper that stores gradients of scores, elsewhere as `gluon` has it; and what a slip would do."""

import itertools
import sys

import pytest
import torch

pytest.importorskip("triton", reason="kernels need Triton")

import triton.language as tl
from fusedattn.kernels.vocabulary import span
from triton.experimental import gluon as language
from triton.experimental.gluon import language as gl

import fusedattn as fa
from bench import providers
from fusedattn.call.form import Arguments
from fusedattn.call.rules import checked
from fusedattn.cli.tune import child
from fusedattn.launch import hopper, run, tiles, tuned
from fusedattn.launch.backward import passes, reasons_not_on_hopper
from fusedattn.launch.tiles import Backward

from .. import cases, sample
from ..cases import Case

if hopper.missing is not None:
    pytest.skip(hopper.missing, allow_module_level=True)

from fusedattn.kernels.hopper import ring, steps, stored

from . import gluon, test_hopper
from .test_hopper import check, emulate, halved, launches, slipped, slipped_in, takes

BF16 = dict(dtype=torch.bfloat16)
WIDE = dict(D=256, Dv=256)
CASES = [
    Case("many blocks", B=2, Hq=4, Hkv=2, Sq=70, Sk=50, **WIDE, **BF16),
    Case("one column more", Sq=40, Sk=50, D=136, Dv=136, **BF16),
    Case("causal", Hq=2, Hkv=1, Sq=40, Sk=50, D=192, Dv=136, causal=True, **BF16),
    Case("wide queries alone", Sq=40, Sk=33, D=200, Dv=16, **BF16),
    Case("wide values alone", Sq=40, Sk=33, D=16, Dv=200, **BF16),
    Case("values of 128", Sq=40, Sk=33, D=192, Dv=128, dtype=torch.float16),
    Case("a window", Sq=40, Sk=50, window=(9, 5), **WIDE, dtype=torch.float16),
    Case("keys that nobody sees", Sq=20, Sk=90, causal=True, align="top_left", **WIDE, **BF16),
    Case("rows that see nothing", Hkv=1, Sq=90, Sk=40, window=(20, 0), align="top_left", **WIDE, **BF16),
    Case("more queries than keys", Sq=90, Sk=41, causal=True, grads="out and lse", **WIDE, **BF16),
    Case("one key", Sq=40, Sk=1, **WIDE, **BF16),
    Case("one row", Sq=1, Sk=40, **WIDE, **BF16),
]
# The named cases that the kernel for Hopper takes, each once, with wider heads.
NAMED = [case._replace(D=144, Dv=136) for case in map(halved, cases.SINGLE + cases.SHAPES)]
NAMED = {case._replace(name=""): case for case in NAMED if takes(case)}
EACH = ["hopper_stored", "hopper_dk", "hopper_dq"]  # what is launched for some heads


@pytest.fixture
def launched(monkeypatch):
    """The names of kernels, as they are launched."""
    return launches(monkeypatch)


@pytest.fixture(autouse=True)
def _same_bits(monkeypatch):
    """Of wide heads it is the one that has the same bits each time."""
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)


@pytest.mark.parametrize(
    "case, form",
    [pytest.param(case, Backward(16, 2), id=case.name) for case in CASES]
    + [pytest.param(CASES[0], Backward(16, 3), id="three stages")]
    + [pytest.param(CASES[i], Backward(32, 2), id=f"{CASES[i].name}, blocks of more rows") for i in (0, 7, 8)],
)
def test_a_case(case, form, monkeypatch, launched, poison):
    """What nobody stores of scores is NaN, and so is what would be made of it."""
    emulate(monkeypatch, way_back=form)
    check(case, "cpu")
    assert launched[-3:] == EACH and not {"dq", "dkdv", "postprocess"} & {*launched}


@pytest.mark.parametrize("case", sample.one_in(2, sample.named(NAMED.values())))
def test_a_named_case(case, monkeypatch, poison):
    emulate(monkeypatch)
    check(case, "cpu")
