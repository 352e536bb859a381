"""Random calls from many threads at once, for as long as wanted: results stay right, and nothing grows.

    python -m tests.soak --seconds 600 --threads 4 --seed 1     ten minutes; --seconds 1800 is a long one

With TRITON_INTERPRET=1 kernels take part. Calls are of `attention`, `attention_varlen` and
`attention_decode`, most of them with gradients. They are made in rounds, each by threads of its own; between rounds,
when all threads are gone and recordings are forgotten, the process is measured. A result is wrong here where it is off
by much more than rounding, as it is if threads mix something up: how exact results are, other tests hold. Exit status 1
if a result is wrong, or if more has grown than `BOUNDS` allows.
"""

import argparse
import contextlib
import ctypes
import functools
import gc
import os
import random
import statistics
import sys
import threading
import time
import traceback
import warnings
from typing import NamedTuple
from unittest import mock

import torch

import fusedattn as fa
from fusedattn import reference
from fusedattn.dispatch import replay
from fusedattn.operators import namespace
from fusedattn.testing.compare import in_float64, with_gradients

from . import caches, sequences
from .caches import Cached
from .cases import COVERING, Case
from .conftest import INTERPRETED

ROUNDS = 20
WARM_UP = 0.3  # the share of rounds that may still grow: allocators fill their pools, and modules are loaded late
FAR_OFF = {torch.float64: 1e-9, torch.float32: 3e-4, torch.float16: 3e-2, torch.bfloat16: 0.25}  # of the largest value
BOUNDS = dict(mib=32.0, objects=500, files=0, threads=0)  # from the first rounds after the warm-up on
DTYPES = (torch.float32, torch.float32, torch.float16, torch.bfloat16, torch.float64)
LENGTHS = range(1, 50)


class Wrong(AssertionError):
    """A result that is far off, or something that grew."""


class Measured(NamedTuple):
    """Of a process between two rounds: memory in use, Python's objects, open files, threads."""

    mib: float
    objects: int
    files: int
    threads: int


def close(name, got, want, dtype=None):
    """Raise Wrong if a result is far off a float64 one. Infinities, as lse has them of empty rows, are the same.

    dtype: of the inputs of the call, if that is not the result's.
    """
    if not want.numel() and got.shape == want.shape:
        return
    want, exact = want.detach().to(got.dtype).double(), got.detach().double()
    most = FAR_OFF[dtype or got.dtype] * want.nan_to_num(0, 0, 0).abs().max().clamp(1)
    same = (exact == want) | (exact - want).abs().le(most)
    if not same.all():
        raise Wrong(f"{name}: {int((~same).sum())} of {same.numel()} numbers are far off")


def _backend(dice):
    return dice.choice((None, None, "naive", *(["triton", "triton"] if INTERPRETED else [])))


def _backend_of(case, dice):
    """That of a call with gradients; in half precision never PyTorch's kernel.

    Its backward, as torch's own function calls it too, keeps a megabyte for each shape that it has met.
    """
    backend = _backend(dice)
    return "naive" if backend is None and case.dtype.itemsize == 2 else backend


def _case(dice, **fields):
    """A Case of some options together."""
    made = dict(Sq=dice.choice(LENGTHS), Sk=dice.choice(LENGTHS), dtype=dice.choice(DTYPES))
    return dice.choice(COVERING)._replace(**made | dict(scale=round(dice.uniform(0.1, 0.4), 3)) | fields)


def _held(case, attend, oracle, tensors, given):
    got = with_gradients(attend, tensors, given, case.grads)
    exact = {name: x.double() if name in ("bias", "alibi_slopes", "sinks") else x for name, x in given.items()}
    want = with_gradients(oracle, in_float64(tensors), exact, case.grads)
    for name, x in got.items():
        close(f"{name} of {case}", x, want[name], case.dtype)


def dense(dice):
    """A call of `attention`, and its gradients."""
    case = _case(dice)
    tensors, given = case.draw(seed=dice.randrange(2**31))
    attend = functools.partial(fa.attention, backend=_backend_of(case, dice))
    _held(case, attend, reference.attention, tensors, given)


def served(dice):
    """A call without gradients, of few shapes: threads make the same ones again and again."""
    sizes = dict(Sq=dice.choice((1, 8)), Sk=dice.choice((8, 32)), causal=dice.random() < 0.5)
    case = Case("served", dtype=dice.choice(DTYPES), **sizes)
    tensors, given = case.draw(seed=dice.randrange(2**31))
    inputs = {name: tensors[name] for name in ("query", "key", "value")}
    with torch.inference_mode() if dice.random() < 0.5 else torch.no_grad():
        got = fa.attention(**inputs, **given, backend=_backend(dice))
    close(f"out of {case}", got, reference.attention(**in_float64(inputs), **given))


def packed(dice):
    """A call of `attention_varlen`, and its gradients."""
    lengths = [[dice.choice((0, 1, 5, 16, 17, 33)) for _ in range(3)] for _ in range(2)]
    most = {name: max(1, *x) for name, x in zip(("Sq", "Sk"), lengths, strict=True)}
    case = _case(dice, B=3, strided=False, expanded=False, dropout=0.0, **most)
    tensors, given = case.draw(seed=dice.randrange(2**31))
    for name in ("out", "lse"):
        for b, n in enumerate(lengths[0]):
            tensors[name][b, :, n:] = 0
    attend = sequences.attention_varlen(*lengths, backend=_backend_of(case, dice))
    _held(case, attend, sequences.by_sequence(reference.attention, *lengths), tensors, given)


def cached(dice):
    """A call of `attention_decode`: its results, and what its caches hold then."""
    name = dice.choice([*caches.FEATURES])
    case = Cached(name)._replace(
        **dict(dtype=dice.choice(DTYPES), scale=dice.uniform(0.1, 0.4)) | caches.FEATURES[name]
    )
    arguments = case.draw(seed=dice.randrange(2**31))
    want, filled = caches.one_by_one(reference.attention, caches.in_float64(arguments))
    out, lse = fa.attention_decode(**arguments, return_lse=True, backend=_backend(dice))
    for name, got in dict(out=out, lse=lse).items():
        close(f"{name} of {case}", got, want[name], case.dtype)
    for name, x in zip(("key_cache", "value_cache"), filled, strict=True):
        written = ~x.isnan()
        close(f"{name} of {case}", arguments[name][written], x[written])


JOBS = {dense: 6, served: 4, packed: 2, cached: 4}  # and how often


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


class Soak:
    """Rounds of calls; `wrong` has what went wrong, `counts` how many calls there were of each kind."""

    def __init__(self, threads, seed, jobs=JOBS):
        self.threads, self.dice, self.jobs = threads, random.Random(seed), jobs
        self.wrong, self.rows, self.counts = [], [], dict.fromkeys((job.__name__ for job in jobs), 0)

    def _work(self, seed, until):
        dice = random.Random(seed)
        while time.monotonic() < until and not self.wrong:
            (job,) = dice.choices([*self.jobs], [*self.jobs.values()])
            try:
                job(dice)
            except BaseException:
                self.wrong.append(traceback.format_exc())
            self.counts[job.__name__] += 1  # in a race with others it may miss one

    def round(self, seconds):
        """Calls by threads of their own; then recordings are counted, and a row is added."""
        until = time.monotonic() + seconds
        threads = [
            threading.Thread(target=self._work, args=(self.dice.random(), until), daemon=True)
            for _ in range(self.threads)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if len(replay._known) > replay.MAX_KEPT + self.threads:  # each may have looked before another one added
            self.wrong.append(f"{len(replay._known)} recordings, of at most {replay.MAX_KEPT}")
        self.rows.append(measured())

    def growth(self):
        """{what: by how much its middle value of the last rounds is over that of the first ones after the warm-up}."""
        rows = self.rows[int(len(self.rows) * WARM_UP) :]
        some = max(1, len(rows) // 3)
        middles = ([statistics.median(x) for x in zip(*part, strict=True)] for part in (rows[:some], rows[-some:]))
        return {name: b - a for name, a, b in zip(Measured._fields, *middles, strict=True)}

    def run(self, seconds, rounds=ROUNDS, say=lambda line: None):
        """Raise Wrong for a result that is far off, or for what has grown."""
        for job in self.jobs:  # so that what is loaded late is there
            for number in range(3):
                job(random.Random(number))
        # Facts of arguments that operators know to be right, forgotten so soon that no round begins without them.
        with mock.patch.object(namespace, "MOST", 8):
            for number in range(rounds):
                self.round(seconds / rounds)
                if self.wrong:
                    raise Wrong(f"round {number + 1}: {self.wrong[0]}")
                say(f"{number + 1:3d}: {sum(self.counts.values())} calls, {self.rows[-1]}")
        grown = self.growth()
        if too_much := {name: grown[name] for name, most in BOUNDS.items() if grown[name] > most}:
            raise Wrong(f"{too_much} more than in the first rounds after the warm-up, of {BOUNDS}")
        return grown


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    soak = Soak(arguments.threads, arguments.seed)
    try:
        grown = soak.run(arguments.seconds, say=functools.partial(print, flush=True))
    except Wrong as error:
        print(f"WRONG: {error}")
        return 1
    print(f"{sum(soak.counts.values())} calls, all right: {soak.counts}")
    print(f"grown: {grown}, of at most {BOUNDS}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
