"""Draws calls and holds them, for as long as wanted.    python -m tests.fuzz --draws 20000 [--seed N]

Run it with TRITON_INTERPRET=1. Each kind of call is drawn in parts of a hundred, each by a seed of its own. A part ends
with the first failure, which is shrunk for a quarter of a minute and printed as code, which holds it again.
"""

import argparse
import sys
import time
import traceback
import warnings

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

from .. import conftest  # which makes the interpreter faster
from .kinds import KINDS, hold

PART = 100  # draws of a kind by one seed
SHRINKS = 15.0  # seconds
QUIET = dict(database=None, deadline=None, suppress_health_check=list(HealthCheck))


def run(kind, number, draws):
    """Draw a part; returns the smallest call that failed and its traceback, or None."""
    failed, since = None, None

    def one(call):
        nonlocal failed, since
        if since is not None and time.monotonic() - since > SHRINKS:
            return  # what is left to shrink takes too long
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
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=[*KINDS])
    arguments = parser.parse_args()
    if not conftest.INTERPRETED:
        parser.error("set TRITON_INTERPRET=1")
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    total, drawn, failures, number = sum(share for *_, share in KINDS.values()), 0, 0, 0
    while drawn < arguments.draws:
        for kind in arguments.kinds:
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
