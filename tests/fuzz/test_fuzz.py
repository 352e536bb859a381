"""A few calls of each kind that hypothesis draws, always the same ones; `python -m tests.fuzz` draws thousands."""

import pytest

pytest.importorskip("hypothesis")
pytest.importorskip("triton", reason="kernels need Triton")
from hypothesis import given, settings

import fusedattn as fa

from ..conftest import INTERPRETED
from .__main__ import QUIET
from .dense import Dense
from .held import Wrong
from .kinds import KINDS, hold

pytestmark = [
    pytest.mark.skipif(not INTERPRETED, reason="on the CPU kernels need TRITON_INTERPRET=1"),
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.mark.parametrize("kind", KINDS)
def test_a_few_calls(kind):
    settings(derandomize=True, max_examples=2, **QUIET)(given(KINDS[kind][0](kind))(lambda call: hold(kind, call)))()


MISTAKES = {
    "a value": lambda results, query: (results[0] * 1.001, *results[1:]),
    "NaN": lambda results, query: (results[0].where(results[0] != results[0].max(), float("nan")), *results[1:]),
    "an input": lambda results, query: (query.detach().zero_(), results)[1],
    "a dtype": lambda results, query: (results[0], results[1].double(), *results[2:]),
    "a shape": lambda results, query: (results[0][:, :, :-1], *results[1:]),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_what_is_wrong_is_seen(what, monkeypatch):
    attention = fa.attention
    case = Dense(Hkv=2, Sq=5, Sk=7, D=8, Dv=8, lse=True, wanted=("key",), loss=("out", "lse"))
    hold("attention", case)
    monkeypatch.setattr(
        fa, "attention", lambda query, *rest, **more: MISTAKES[what](attention(query, *rest, **more), query)
    )
    with pytest.raises((Wrong, RuntimeError)):
        hold("attention", case)
