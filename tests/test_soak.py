"""Tests random calls from many threads: results stay right; memory, objects, files and threads do not grow."""

import ctypes
import functools
import gc
import os
import random
import statistics
import time

import pytest

pytest.importorskip("hypothesis")
pytest.importorskip("triton", reason="kernels need Triton")

from hypothesis import Phase, given, seed, settings

from .conftest import in_threads
from .fuzz.__main__ import KINDS, QUIET
from .inside import interpreted

SECONDS, ROUNDS, THREADS = 6.0, 6, 3  # change the first two for a longer run
MOST = dict(mib=32.0, objects=500, files=0, threads=0)  # allowed growth from the second third to the last


def drawn(kind):
    strategy, hold, _ = KINDS[kind]
    calls = []
    draw = given(strategy(kind))(lambda call: calls.append((hold, call)))
    seed(1)(settings(max_examples=50, phases=[Phase.generate], **QUIET)(draw))()
    return calls


def measured(record_after):
    """Return the process's memory in MiB, and its numbers of objects, open files and threads, without replays."""
    record_after(1)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as statm:
        mib = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    counts = (len(os.listdir(f"/proc/self/{folder}")) for folder in ("fd", "task"))
    return dict(zip(MOST, (mib, len(gc.get_objects()), *counts), strict=True))


def work(number, calls, until):
    dice = random.Random(number)
    while time.monotonic() < until:
        hold, call = dice.choice(calls)
        try:
            hold(call)
        except BaseException as error:
            raise AssertionError(call) from error


@pytest.mark.matrix
@interpreted
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("one_thread")
def test_nothing_grows(record_after):
    rows = []
    calls = [x for kind in ("attention", "attention_varlen", "decode") for x in drawn(kind)]
    for number in range(ROUNDS):
        until = time.monotonic() + SECONDS / ROUNDS
        in_threads(*(functools.partial(work, 9 * number + n, calls, until) for n in range(THREADS)))
        rows.append(measured(record_after))
    third = ROUNDS // 3
    for name, most in MOST.items():
        before, after = (statistics.median(row[name] for row in part) for part in (rows[third:-third], rows[-third:]))
        assert after - before <= most, (name, rows)
