"""Drawn calls from many threads at once: results stay right, and memory, objects, files and threads do not grow."""

import ctypes
import gc
import os
import random
import statistics
import threading
import time
import traceback

import pytest

pytest.importorskip("hypothesis")
pytest.importorskip("triton", reason="kernels need Triton")

from hypothesis import Phase, given, seed, settings

from .conftest import INTERPRETED
from .fuzz.__main__ import QUIET
from .fuzz.kinds import KINDS

SECONDS, ROUNDS, THREADS = 6.0, 6, 3  # for a longer one, change the first two
MOST = dict(mib=32.0, objects=500, files=0, threads=0)  # growth from the second third of the rounds to the last


def drawn(kind):
    """Return (a function, its argument) of 50 calls of a kind."""
    strategy, hold, _ = KINDS[kind]
    calls = []
    draw = given(strategy(kind))(lambda call: calls.append((hold, call)))
    seed(1)(settings(max_examples=50, phases=[Phase.generate], **QUIET)(draw))()
    return calls


def measured(record_after):
    """Return memory in MiB, Python's objects, open files and threads, without what replays keep."""
    record_after(1)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as statm:
        mib = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    counts = (len(os.listdir(f"/proc/self/{folder}")) for folder in ("fd", "task"))
    return dict(zip(MOST, (mib, len(gc.get_objects()), *counts), strict=True))


def work(number, calls, until, wrong):
    dice = random.Random(number)
    while time.monotonic() < until and not wrong:
        hold, call = dice.choice(calls)
        try:
            hold(call)
        except BaseException:
            wrong.append(f"{call}\n{traceback.format_exc()}")


@pytest.mark.matrix
@pytest.mark.skipif(not INTERPRETED, reason="on the CPU kernels need TRITON_INTERPRET=1")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("one_thread")
def test_nothing_grows(record_after):
    wrong, rows = [], []
    calls = [x for kind in ("attention", "attention_varlen", "decode") for x in drawn(kind)]
    for number in range(ROUNDS):
        until = time.monotonic() + SECONDS / ROUNDS
        workers = [threading.Thread(target=work, args=(9 * number + n, calls, until, wrong)) for n in range(THREADS)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert not wrong, wrong[0]
        rows.append(measured(record_after))
    third = ROUNDS // 3
    for name, most in MOST.items():
        before, after = (statistics.median(row[name] for row in part) for part in (rows[third:-third], rows[-third:]))
        assert after - before <= most, (name, rows)
