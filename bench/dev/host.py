"""What host time does fa.attention add to the naive formula on a CPU?

Tiny inputs in float32, one thread, no gradients, no log-sum-exp: the difference is checks, choice and bookkeeping.
"""

import functools
import statistics

import torch
from fusedattn.bench import cases, rows, timing

import fusedattn as fa
from fusedattn.naive import formula as naive

from . import questions

CASES = [cases.Case(1, 1, 1, length, length, 8, 8, False, "float32") for length in (1, 8)]
GOAL_US = 25.0


def overhead(case, rounds=5, repeats=1000):
    """({provider: Times} of the median round, the overhead of the rounds in us, sorted).

    The two take turns within a round, and a round is a difference of medians: a busy machine slows both alike.
    """
    query, key, value = case.draw("cpu")[:3]
    scale = case.D**-0.5
    steps = {
        "fusedattn:naive": functools.partial(fa.attention, query, key, value),
        "naive": lambda: naive.formula(query, key, value, None, scale, False)[0],
    }
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            times = sorted((timing.interleaved(steps, repeats) for _ in range(rounds)), key=_added)
    finally:
        torch.set_num_threads(threads)
    return times[rounds // 2], [_added(one) for one in times]


def _added(times):
    return 1e3 * (times["fusedattn:naive"].p50 - times["naive"].p50)


def main(arguments):
    options = questions.parser("host", questions.OTHERS["host"]).parse_args(arguments)
    writer, machine = rows.Writer(options.csv), rows.machine("cpu", options.commit)
    for case in CASES:
        times, rounds = overhead(case)
        for provider, one in times.items():
            writer.write(rows.row(machine, "host", provider, case, options="threads=1", **one.columns()))
        whole, formula = (1e3 * times[provider].p50 for provider in ("fusedattn:naive", "naive"))
        every = ", ".join(f"{added:.1f}" for added in rounds)
        print(
            f"{case.name}: fa.attention {whole:.1f} us, the formula {formula:.1f} us; "
            f"overhead {statistics.median(rounds):.1f} us (rounds {every}), goal {GOAL_US:g}"
        )
    return 0
