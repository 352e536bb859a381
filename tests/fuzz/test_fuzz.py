"""A few calls of each kind that hypothesis draws, always the same ones; `python -m tests.fuzz` draws thousands."""

import pytest
import torch

pytest.importorskip("hypothesis")
pytest.importorskip("triton", reason="kernels need Triton")
from hypothesis import HealthCheck, given, settings

import fusedattn as fa

from ..conftest import INTERPRETED
from .cached import Cache
from .dense import Dense, Pairs, Tokens
from .held import Wrong
from .kinds import KINDS, hold
from .layouts import Layout, lay, memory
from .mistakes import Mistaken
from .modules import Module

pytestmark = [
    pytest.mark.skipif(not INTERPRETED, reason="on the CPU kernels need TRITON_INTERPRET=1"),
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),
]


def draw(kind, count):
    @settings(
        derandomize=True, database=None, deadline=None, max_examples=count, suppress_health_check=list(HealthCheck)
    )
    @given(call=KINDS[kind].calls(kind))
    def held(call):
        hold(kind, call)

    held()


@pytest.mark.parametrize("kind", KINDS)
def test_a_few_calls(kind):
    draw(kind, 2)


@pytest.mark.parametrize("kind", ["attention", "rank 2", "decode", "mistakes", "MultiHeadAttention"])
def test_what_is_drawn_is_shown_as_code_that_makes_it(kind):
    names = dict(torch=torch, inf=float("inf"), nan=float("nan"), Cache=Cache, Dense=Dense, Layout=Layout, Pairs=Pairs)
    names |= dict(Tokens=Tokens, Mistaken=Mistaken, Module=Module)

    @settings(derandomize=True, database=None, deadline=None, max_examples=10, suppress_health_check=list(HealthCheck))
    @given(call=KINDS[kind].calls(kind))
    def same(call):
        assert eval(repr(call), names) == call

    same()


PLANTED = {
    "a value": lambda results, query: (results[0] * 1.001, *results[1:]),
    "NaN": lambda results, query: (results[0].where(results[0] != results[0].max(), float("nan")), *results[1:]),
    "an input": lambda results, query: (query.detach().zero_(), results)[1],
    "a dtype": lambda results, query: (results[0], results[1].double(), *results[2:]),
    "a shape": lambda results, query: (results[0][:, :, :-1], *results[1:]),
}


@pytest.mark.parametrize("what", PLANTED)
def test_what_is_wrong_is_seen(what, monkeypatch):
    attention = fa.attention
    case = Dense(Hkv=2, Sq=5, Sk=7, D=8, Dv=8, lse=True, wanted=("key",), loss=("out", "lse"))
    hold("attention", case)
    monkeypatch.setattr(
        fa, "attention", lambda query, *rest, **more: PLANTED[what](attention(query, *rest, **more), query)
    )
    with pytest.raises((Wrong, RuntimeError)):
        hold("attention", case)


@pytest.mark.parametrize("layout", [Layout(), Layout(5, 2, 3, 1), Layout(23, 1, 0, 7), Layout(3, 3, 1, 0)], ids=str)
def test_a_layout_keeps_the_values(layout):
    x = torch.randn(2, 3, 4, 5)
    assert torch.equal(lay(x, layout), x) and memory(lay(x, layout)).numel() >= 4 * x.numel()
    assert torch.equal(lay(x, layout._replace(expanded=(1,))), x[:, :1].expand_as(x))
    over = lay(x, Layout(offset=2, overlapping=True))
    assert torch.equal(over[..., 0], x[..., 0]) and torch.equal(over[..., 1:, 0], over[..., :-1, 1])
