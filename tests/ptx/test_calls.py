"""Whole calls by the PTX that Triton makes of the kernels, on a GPU that is not there."""

import contextlib

import pytest

pytest.importorskip("triton", reason="kernels need Triton")

from . import calls, device
from .cases import ENTRIES, FEW, HOPPER


def test_a_call_by_its_compiled_kernels(entry, capability, tile):
    outcome = calls.execute(entry, capability, tile)
    assert not outcome.wrong(), "\n".join(outcome.wrong())


def test_what_make_test_executes():
    """Each kernel of the universal path but the weights', the lists' and the merge of splits, and the Hopper one."""
    assert len(FEW) == 10 and set(FEW) <= set(ENTRIES)
    assert any(ENTRIES[name].backend == "hopper" for name in FEW)
    assert any(ENTRIES[name].two_passes for name in FEW)


@contextlib.contextmanager
def _edited(*args, **options):
    """`device.gpu` whose exponentials are of numbers that are a tenth too small."""
    log2_e, less = "0f3FB8AA3B", "0f3FA62B81"
    with device.gpu(*args, **options) as there:
        there.edit = lambda kernel, ptx: ptx.replace(log2_e, less)
        yield there


def test_what_is_wrong_is_said(monkeypatch):
    monkeypatch.setattr(calls, "gpu", _edited)
    found = calls.execute(ENTRIES["decode: fp32"], HOPPER).wrong()
    assert found and all(name in " ".join(found) for name in ("out", "lse"))
