"""Drawn calls from many threads at once, for as long as wanted: results stay right, and nothing grows.

    TRITON_INTERPRET=1 python -m tests.soak --seconds 600 --threads 4 --seed 1

The calls are those of `tests/fuzz`, each made again and again. Each round has threads of its own; between rounds, when
recordings are forgotten, the process is measured.
"""

import argparse
import contextlib
import ctypes
import gc
import os
import random
import statistics
import threading
import time
import traceback
import warnings
from typing import NamedTuple
from unittest import mock

import torch
from hypothesis import Phase, given, seed as seeded, settings

from fusedattn.dispatch import replay
from fusedattn.operators import namespace

from .fuzz.__main__ import QUIET
from .fuzz.kinds import KINDS

ROUNDS = 20
DRAWS = 50  # of each kind
WARM_UP = 0.3  # the share of rounds that may still grow: allocators fill their pools, and modules are loaded late
BOUNDS = dict(mib=32.0, objects=500, files=0, threads=0)  # from the first rounds after the warm-up on


class Measured(NamedTuple):
    """Memory in use, Python's objects, open files and threads of a process between two rounds."""

    mib: float
    objects: int
    files: int
    threads: int


def drawn(kind, seed):
    """Return (what holds a call, the call) of each call of a kind that threads make."""
    strategy, hold, _ = KINDS[kind]
    calls = []
    draw = given(strategy(kind))(lambda call: calls.append((hold, call)))
    seeded(seed)(settings(max_examples=DRAWS, phases=[Phase.generate], **QUIET)(draw))()
    return calls


def measured():
    """A Measured of this process, without what it keeps of calls."""
    replay.forget()
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # another C library than GNU's
        ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as statm:
        pages = int(statm.read().split()[1])
    counts = (len(os.listdir(f"/proc/self/{folder}")) for folder in ("fd", "task"))
    return Measured(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, len(gc.get_objects()), *counts)


def work(seed, calls, until, wrong):
    """Make calls until a time, or until one is wrong."""
    dice = random.Random(seed)
    while time.monotonic() < until and not wrong:
        hold, call = dice.choice(calls)
        try:
            hold(call)
        except BaseException:
            wrong.append(f"{call}\n{traceback.format_exc()}")


def growth(rows):
    """Return by how much the middle value of the last rounds exceeds that of the first ones after the warm-up."""
    rows = rows[int(len(rows) * WARM_UP) :]
    some = max(1, len(rows) // 3)
    middles = ([statistics.median(x) for x in zip(*part, strict=True)] for part in (rows[:some], rows[-some:]))
    return {name: b - a for name, a, b in zip(Measured._fields, *middles, strict=True)}


def run(seconds, threads, seed, rounds=ROUNDS):
    """Raise AssertionError for a result that is wrong, or for something that grew."""
    dice, wrong, rows = random.Random(seed), [], []
    calls = [x for kind in ("attention", "attention_varlen", "decode") for x in drawn(kind, seed)]
    # Facts of arguments that operators know to be right, forgotten so soon that no round begins without them.
    with mock.patch.object(namespace, "MOST", 8):
        for number in range(rounds):
            shared = calls, time.monotonic() + seconds / rounds, wrong
            workers = [threading.Thread(target=work, args=(dice.random(), *shared)) for _ in range(threads)]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
            assert not wrong, wrong[0]
            assert len(replay._known) <= replay.MAX_KEPT + threads  # each may have looked before another one added
            rows.append(measured())
            print(f"{number + 1:3d}: {rows[-1]}", flush=True)
    grown = growth(rows)
    assert all(grown[name] <= most for name, most in BOUNDS.items()), f"grown: {grown}, of at most {BOUNDS}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    run(**vars(parser.parse_args()))
