"""Tests threads and processes that use Triton's interpreter at the same time."""

import functools
import multiprocessing
import threading

import pytest
import torch

pytest.importorskip("triton", reason="kernels need Triton")

import fusedattn as fa

from ..close import assert_like
from ..conftest import INTERPRETED, in_threads

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="about TRITON_INTERPRET=1")


def test_threads_take_turns(impatient, one_thread):
    begin = threading.Barrier(3)

    def work(number):
        dice = torch.Generator().manual_seed(number)
        begin.wait()
        for _ in range(6):
            inputs = [torch.randn(1, 2, 17 + number, 16, generator=dice, requires_grad=True) for _ in range(3)]

            def results(out, inputs=inputs):
                return [out, *torch.autograd.grad(out.sum(), inputs)]

            got = results(fa.attention(*inputs, causal=True, backend="triton"))
            assert_like(got, lambda of=results, inputs=inputs: of(fa.reference.eager(*inputs, causal=True)))

    in_threads(*(functools.partial(work, number) for number in range(3)))


def _attend():
    fa.attention(*torch.randn(3, 1, 1, 5, 16), backend="triton")


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
