"""Tests a process that is forked while a thread uses Triton's interpreter."""

import multiprocessing
import threading

import pytest
import torch

pytest.importorskip("triton", reason="kernels need Triton")

import fusedattn as fa

from ..conftest import INTERPRETED

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="about TRITON_INTERPRET=1")


def _attend():
    fa.attention(*torch.randn(3, 1, 1, 5, 16), backend="triton")


@pytest.mark.matrix
def test_a_process_is_forked_between_turns():
    _attend()
    stop = threading.Event()

    def others():
        while not stop.is_set():
            _attend()

    thread = threading.Thread(target=others)
    thread.start()
    process = multiprocessing.get_context("fork").Process(target=_attend, daemon=True)
    process.start()
    process.join(20)
    stop.set()
    thread.join()
    assert process.exitcode == 0
