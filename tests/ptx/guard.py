"""Executes compiled kernels of random calls, and holds each access to the elements of its tensors.

    python -m tests.ptx.guard --calls 50 --seed 1     minutes, most of them compiling; --capability 80 or 90

Calls are drawn as `tests/fuzz/` draws them: dense ones, packed sequences and caches, of any options and layouts, whose
tensors lie among NaN. A call fails if it reads or writes what is of no tensor or between its elements, or what nobody
wrote, if two programs store at one place, if an input changes, or if a result is far off.
"""

import argparse
import random
import sys
import time
import traceback
import warnings

import torch
from hypothesis import HealthCheck, Phase, given, seed as seeded, settings

from ..fuzz import cached as fuzzed_caches, held, strategies
from ..soak import close
from .calls import HARMLESS, OF_TRITON
from .device import gpu

KINDS = "attention", "attention_varlen", "attention", "decode"  # by turns
WIDEST = 64  # of heads: wider ones take long to execute, and their tiles differ in sizes alone
CAPABILITIES = 80, 90


class Wrong(AssertionError):
    """A call that does what it must not."""


def drawn(count, seed):
    """[(kind, call)]: always the same ones for a seed."""
    made = {kind: _drawn(kind, -(-count // len(KINDS)) * KINDS.count(kind), seed) for kind in sorted({*KINDS})}
    return [(kind, next(made[kind])) for kind in (KINDS[n % len(KINDS)] for n in range(count))]


def _drawn(kind, count, seed):
    """An iterator over calls of a kind, tame ones of sizes that are soon executed.

    Those that hypothesis draws behind each other are much alike, so a few of many are taken.
    """
    calls = (fuzzed_caches if kind == "decode" else strategies).calls(kind).map(_tame).filter(_is_small)
    found = []
    quiet = settings(
        max_examples=20 * count,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )

    def keep(call):
        found.append(call)

    seeded(seed)(quiet(given(calls)(keep)))()
    different = list({repr(call): call for call in found}.values())
    return iter(random.Random(seed).sample(different, count))


def _tame(call):
    """The same call of values and scores of ordinary size, in a dtype that tensor cores multiply."""
    case, values = call if isinstance(call, tuple) and not hasattr(call, "_fields") else (call, None)
    scale = case.scale if case.scale is not None and abs(case.scale) <= 1 else None
    tame = dict(dtype=torch.bfloat16 if case.dtype == torch.float64 else case.dtype, scale=scale)
    tame["softcap"] = None if case.softcap is None else 2.0
    if values is None:
        slopes = None if case.slopes is None else 0.2
        tame |= dict(spread=1.0, alike=0.0, slopes=slopes, backend=None, again=False)
        tame["bias"] = case.bias and case.bias._replace(size=min(case.bias.size, 1.0), lowest=False)
    return case._replace(**tame) if values is None else (case._replace(**tame), values)


def _is_small(call):
    case = call if hasattr(call, "_fields") else call[0]
    return max(case.D, case.Dv) <= WIDEST and getattr(case, "Sk", 1) * case.Sq > 0


def hold(kind, call, capability, **options):
    """Raise Wrong if a call by compiled kernels does what it must not; returns how many launches it took."""
    with gpu(capability, **options) as device:
        if kind == "decode":
            case, values = call
            found, mine, _ = fuzzed_caches._run(case, values, "triton", False)
        else:
            case, found = call, held.run(call, "triton")
    problems = []
    for launch in device.launches:
        harmless = HARMLESS if launch.kernel.src.fn.is_gluon() else OF_TRITON
        problems += [f"{launch.name}\n{launch.report}" for kind in launch.report.found if kind not in harmless]
    if problems:
        raise Wrong("\n".join(problems))
    if kind == "decode":
        truth = fuzzed_caches._truth(case, values)
        wrong, oracle = fuzzed_caches._judged([found], [truth]), truth[1]
        for name, got, want in zip(("key_cache", "value_cache"), mine, truth[2], strict=True):
            close(name, got[~want.isnan()], want[~want.isnan()])
    else:
        truth = held.Truth(case)
        wrong, oracle = held.judged([found], [truth]), truth.oracle
    for name, why in wrong.items():  # an error just past the rule is for tests of more values to judge
        if "error" not in why:
            raise Wrong(f"{name}: {why}")
        close(name, found[name], oracle[name], case.dtype)
    return len(device.launches)


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.ptx.guard", description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--capability", type=int, choices=CAPABILITIES, nargs="*", default=[*CAPABILITIES])
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    launches, failed, began = 0, 0, time.monotonic()
    for number, (kind, call) in enumerate(drawn(arguments.calls, arguments.seed)):
        capability = arguments.capability[number % len(arguments.capability)]
        start = time.monotonic()
        try:
            launches += hold(kind, call, capability)
        except Exception:
            failed += 1
            print(f"FAILED on sm_{capability}: {kind} {call!r}\n{traceback.format_exc()}", flush=True)
        print(f"{number + 1}/{arguments.calls} {kind}, sm_{capability}, {time.monotonic() - start:.1f} s", flush=True)
    seconds = time.monotonic() - began
    print(f"{arguments.calls} calls, {launches} launches, {failed} failed, {seconds:.0f} s")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
