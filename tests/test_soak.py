"""A few seconds of `python -m tests.soak`."""

import pytest

pytest.importorskip("hypothesis")
pytest.importorskip("triton", reason="kernels need Triton")

from .conftest import INTERPRETED
from .soak import run


@pytest.mark.matrix
@pytest.mark.skipif(not INTERPRETED, reason="on the CPU kernels need TRITON_INTERPRET=1")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("one_thread")
def test_a_few_seconds():
    run(6.0, threads=3, seed=1, rounds=4)
