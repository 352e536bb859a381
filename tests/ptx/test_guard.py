"""Random calls by compiled code, whose accesses are held to the elements of their tensors; and that this is seen."""

import functools

import pytest
import torch

pytest.importorskip("hypothesis")
pytest.importorskip("triton", reason="kernels need Triton")

from ..fuzz.dense import Dense
from ..fuzz.layouts import Layout
from . import guard
from .handwritten import execute
from .report import Fault
from .test_planted import planted

PART = 5  # of the calls that `python -m tests.ptx.guard` executes
pytestmark = pytest.mark.filterwarnings("ignore")


@functools.cache
def _drawn():
    return guard.drawn(PART, seed=1)


@pytest.mark.matrix
@pytest.mark.parametrize("number", range(PART))
def test_a_random_call(number):
    kind, call = _drawn()[number]
    guard.hold(kind, call, guard.CAPABILITIES[number % 2])


def test_calls_are_the_same_each_time_and_of_all_kinds():
    assert repr(guard.drawn(PART, seed=1)) == repr(_drawn()) != repr(guard.drawn(PART, seed=2))
    assert {kind for kind, _ in _drawn()} == {*guard.KINDS}
    assert len({repr(call) for _, call in guard.drawn(50, seed=1)}) == 50


CALL = Dense(Sq=20, Sk=40, D=16, Dv=16, dtype=torch.float16, key=Layout(gap=5, offset=3), loss=("out",))


@pytest.mark.matrix
def test_an_access_outside_is_seen():
    """Of keys the rows past the last one lie among the NaN behind it, in the same storage."""
    call = CALL._replace(key=Layout(gap=500), Sk=39)
    guard.hold("attention", call, 80)
    masked = "return tl.load(pointers(m, r, c), mask=exists[:, None], other=0.0)"
    with planted("vocabulary/tiles.py", masked, masked.replace("exists[", "(exists | True)[")):
        with pytest.raises((guard.Wrong, Fault), match="astray|is in no tensor"):
            guard.hold("attention", call, 80)


@pytest.mark.parametrize("body", ["ld.global.b32 %r1, [%x_mine];", "st.global.b32 [%x_mine], %t;"], ids=["ld", "st"])
def test_bytes_of_no_element_are_reported(body):
    tensor = torch.zeros(8, 8, dtype=torch.int32)
    assert not execute(body, x=tensor).found
    assert execute(body, x=tensor[:, :7]).count("astray") == 8
