"""Draws calls and holds them, for as long as wanted.    python -m tests.fuzz --draws 20000 [--seed N] [--resume]

Run it with TRITON_INTERPRET=1. Each kind of call is drawn in parts of a hundred, each by a seed of its own. A part ends
with the first failure, which is shrunk for a quarter of a minute, and written to the folder of --out as code that holds
it again. --resume goes on where the last run ended.
"""

import argparse
import json
import pathlib
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
REPRODUCER = '''"""{why}"""

import torch

from tests import conftest
from tests.fuzz.cached import Cache
from tests.fuzz.dense import Dense, Pairs, Tokens
from tests.fuzz.kinds import hold
from tests.fuzz.layouts import Layout
from tests.fuzz.merged import Merged
from tests.fuzz.mistakes import Mistaken
from tests.fuzz.modules import Module

inf, nan = float("inf"), float("nan")
hold({kind!r}, {call!r})
'''


class Part:
    """Some draws of one kind by one seed; `failed` is the smallest call that failed, and its error."""

    def __init__(self, kind, number, draws):
        self.kind, self.number, self.draws = kind, number, draws
        self.count, self.failed, self.since, self.tally = 0, None, None, {}

    def run(self):
        phases = [Phase.generate, Phase.shrink]
        options = settings(
            max_examples=self.draws, deadline=None, database=None, phases=phases, report_multiple_bugs=False
        )
        quiet = settings(options, suppress_health_check=list(HealthCheck), print_blob=False)
        try:
            seed(self.number)(quiet(given(KINDS[self.kind].calls(self.kind))(self._one)))()
        except BaseException as error:
            if self.failed is None or isinstance(error, KeyboardInterrupt):
                raise

    def _one(self, call):
        if self.since is not None and time.monotonic() - self.since > SHRINKS:
            return  # what is left to shrink takes too long
        self.count += self.since is None
        try:
            hold(self.kind, call, self.tally)
        except Exception as error:
            self.since = time.monotonic() if self.since is None else self.since
            self.failed = call, "".join(traceback.format_exception(error))
            raise


def plan(draws, first):
    """[(kind, seed, draws)]: the parts of all, the kinds by turns."""
    total = sum(kind.share for kind in KINDS.values())
    left = {name: round(draws * kind.share / total) for name, kind in KINDS.items()}
    parts, number = [], 0
    while any(left.values()):
        for name, n in left.items():
            if n:
                parts.append((name, 1000 * first + number, min(n, PART)))
                left[name] -= parts[-1][2]
        number += 1
    return parts


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=20000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=[*KINDS])
    parser.add_argument("--resume", action="store_true", help="leave out what the file of results has")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("out/fuzz"))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no part after so long")
    arguments = parser.parse_args()
    if not conftest.INTERPRETED:
        parser.error("set TRITON_INTERPRET=1")
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    arguments.out.mkdir(parents=True, exist_ok=True)
    kept = arguments.out / "parts.jsonl"
    done = [json.loads(line) for line in kept.read_text().splitlines()] if arguments.resume and kept.exists() else []
    if not arguments.resume:
        kept.unlink(missing_ok=True)
    known = {(row["kind"], row["seed"]) for row in done}
    begun, parts = time.monotonic(), plan(arguments.draws, arguments.seed)
    for at, (name, number, draws) in enumerate(parts):
        if (name, number) in known or name not in arguments.kinds:
            continue
        if time.monotonic() - begun > arguments.seconds:
            break
        part, start = Part(name, number, draws), time.monotonic()
        part.run()
        row = dict(kind=name, seed=number, draws=part.count, seconds=round(time.monotonic() - start, 1), **part.tally)
        if part.failed:
            call, why = part.failed
            row["failed"] = why.strip().splitlines()[-1]
            path = arguments.out / f"{name.replace(' ', '_').replace(',', '')}_{number}.py"
            path.write_text(REPRODUCER.format(why=why.replace("\\", "/"), kind=name, call=call))
            print(f"FAILED {path}: {row['failed'][:300]}\n    {call!r}", flush=True)
        done.append(row)
        with kept.open("a") as file:
            file.write(json.dumps(row) + "\n")
        count = sum(row["draws"] for row in done)
        print(
            f"{at + 1}/{len(parts)} {name} {number}: {row['draws']} draws, {row['seconds']} s; {count} in all",
            flush=True,
        )
    for name in KINDS:
        mine = [row for row in done if row["kind"] == name]
        failed, again = sum("failed" in row for row in mine), sum(row.get("drawn again", 0) for row in mine)
        print(f"{name}: {sum(row['draws'] for row in mine)} draws, {failed} parts failed, {again} drawn again")
    print(f"{sum(row['draws'] for row in done)} draws, {sum('failed' in row for row in done)} parts failed")
    return any("failed" in row for row in done)


if __name__ == "__main__":
    sys.exit(main())
