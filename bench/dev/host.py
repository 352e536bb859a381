"""What host time does fa.attention add to the naive formula on a CPU?

Tiny inputs in float32, one thread, no gradients, no log-sum-exp: the difference is checks, choice and bookkeeping.
"""

import functools

import torch
from fusedattn.bench import cases, rows, timing

import fusedattn as fa
from fusedattn.naive import formula

from . import questions

CASES = [cases.Case(1, 1, 1, length, length, 8, 8, False, "float32") for length in (1, 8)]
GOAL_US = 25.0


@torch.no_grad()
def overhead(case, rounds=5, repeats=1000):
    """[(us that fa.attention adds, {provider: Times})] of each round, sorted.

    A round is a difference of medians of steps one after another: a busy machine slows both alike.
    """
    query, key, value = case.draw("cpu")[:3]
    steps = {
        "fusedattn:naive": functools.partial(fa.attention, query, key, value),
        "naive": functools.partial(formula.formula, query, key, value, None, case.D**-0.5, False),
    }
    times = [timing.interleaved(steps, repeats) for _ in range(rounds)]
    return sorted(
        ((1e3 * (one["fusedattn:naive"].p50 - one["naive"].p50), one) for one in times), key=lambda one: one[0]
    )


def main(arguments):
    writer, machine = questions.opened(questions.parser("host").parse_args([*arguments, "--device", "cpu"]))
    for case in CASES:
        rounds = overhead(case)
        added, times = rounds[len(rounds) // 2]
        for provider, one in times.items():
            writer.write(rows.row(machine, "host", provider, case, options="threads=1", **one.columns()))
        ours, theirs = (f"{1e3 * one.p50:.1f} us" for one in times.values())
        added = f"{added:.1f} us (rounds {', '.join(f'{us:.1f}' for us, _ in rounds)})"
        print(f"{case.name}: fa.attention {ours}, the formula {theirs}; overhead {added}, goal {GOAL_US:g}")
    return 0
