"""Tests a few random calls of each kind, always the same calls; `python -m tests.fuzz` draws thousands."""

import pytest

pytest.importorskip("hypothesis")
pytest.importorskip("triton", reason="kernels need Triton")
from hypothesis import given, settings

from ..conftest import INTERPRETED
from .__main__ import KINDS, QUIET, hold

pytestmark = [
    pytest.mark.skipif(not INTERPRETED, reason="on the CPU kernels need TRITON_INTERPRET=1"),
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.mark.parametrize("kind", KINDS)
def test_a_few_calls(kind):
    settings(derandomize=True, max_examples=1, **QUIET)(given(KINDS[kind][0](kind))(lambda call: hold(kind, call)))()
