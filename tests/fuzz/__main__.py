"""Draw random calls and check them.    python -m tests.fuzz --draws 20000 [--seed N]

Run it with TRITON_INTERPRET=1. Each kind of call is drawn in batches of a hundred, each with its own seed. A batch ends
with its first failure, which is shrunk for 15 seconds and printed as code that repeats it.
"""

import argparse
import sys
import time
import traceback
import warnings
import zlib
from unittest import mock

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

from fusedattn.dispatch import replay
from fusedattn.operators import repeats

from .. import conftest  # makes the interpreter faster
from . import cached, held, modules, routes, strategies

PART = 100  # number of draws with one seed
SHRINKS = 15.0  # seconds
QUIET = dict(database=None, deadline=None, suppress_health_check=list(HealthCheck))
# {name: (function of the name that returns a strategy, function that checks a call, share of draws)}
KINDS = dict.fromkeys(routes.ROUTES, (strategies.calls, held.hold, 1))
KINDS |= {"attention": (strategies.calls, held.hold, 5), "attention_varlen": (strategies.calls, held.hold, 2)}
KINDS |= {"decode": (cached.calls, cached.hold, 2)}
KINDS |= dict.fromkeys(modules.MODULES, (modules.calls, modules.hold, 1))


def hold(name, call):
    """Check one random call of a kind (`name`); its first or its second execution is recorded for replays."""
    replay.forget()
    with mock.patch.object(repeats, "RECORD_AFTER", 1 + zlib.crc32(repr(call).encode()) % 2):
        KINDS[name][1](call)


def run(kind, number, draws):
    """Check `draws` random calls of a kind, with seed `number`. Return the smallest failure and its traceback."""
    failed, since = None, None

    def one(call):
        nonlocal failed, since
        if since is not None and time.monotonic() - since > SHRINKS:
            return  # time for shrinking is over
        try:
            hold(kind, call)
        except Exception:
            since = time.monotonic() if since is None else since
            failed = call, traceback.format_exc()
            raise

    options = settings(max_examples=draws, phases=[Phase.generate, Phase.shrink], report_multiple_bugs=False, **QUIET)
    try:
        seed(number)(options(given(KINDS[kind][0](kind))(one)))()
    except Exception:
        if failed is None:
            raise
    return failed


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=20000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if not conftest.INTERPRETED:
        parser.error("set TRITON_INTERPRET=1")
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    total, drawn, failures, number = sum(share for *_, share in KINDS.values()), 0, 0, 0
    while drawn < arguments.draws:
        for kind in KINDS:
            begun, draws = time.monotonic(), min(PART, -(-arguments.draws * KINDS[kind][2] // total))
            failed = run(kind, 1000 * arguments.seed + number, draws)
            if failed is not None:
                failures += 1
                print(f"FAILED hold({kind!r}, {failed[0]!r})\n{failed[1]}", flush=True)
            drawn += draws
            print(f"{kind} {number}: {draws} draws, {time.monotonic() - begun:.1f} s; {drawn} in all", flush=True)
        number += 1
    print(f"{drawn} draws, {failures} parts failed")
    return failures > 0


if __name__ == "__main__":
    sys.exit(main())
