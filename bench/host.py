"""What host time does fa.attention add to the naive formula on a CPU?    python -m fusedattn.bench.host

Tiny inputs in float32, one thread, no gradients, no log-sum-exp: what is left is checks, choice and bookkeeping.
"""

import argparse
import functools
import statistics

import torch

import fusedattn as fa
from fusedattn.naive import formula as naive

from . import cases, rows, timing

CASES = [cases.Case(1, 1, 1, length, length, 8, 8, False, "float32") for length in (1, 8)]
GOAL_US = 25.0


def overhead(case, rounds=5, repeats=1000):
    """(Times of each of {provider: step} in the round of the middle, the overhead of every round in us, sorted).

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
            taken = [timing.interleaved(steps, repeats) for _ in range(rounds)]
    finally:
        torch.set_num_threads(threads)
    taken.sort(key=_added)
    return taken[rounds // 2], [_added(each) for each in taken]


def _added(times):
    return 1e3 * (times["fusedattn:naive"].p50 - times["naive"].p50)


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m fusedattn.bench.host", description=__doc__.partition("\n")[0])
    parser.add_argument("--csv", help="append to this file")
    parser.add_argument("--commit", help="what the rows say, where git cannot tell")
    options = parser.parse_args(arguments)
    writer, machine = rows.Writer(options.csv), rows.machine("cpu", options.commit)
    for case in CASES:
        times, rounds = overhead(case)
        for provider, each in times.items():
            measured = each.columns()
            writer.write(rows.row(machine, "host", provider, case, options="threads=1", **measured))
        whole, formula = (1e3 * times[provider].p50 for provider in ("fusedattn:naive", "naive"))
        each_round = ", ".join(f"{each:.1f}" for each in rounds)
        print(
            f"{case.name}: fa.attention {whole:.1f} us, the formula {formula:.1f} us; "
            f"overhead {statistics.median(rounds):.1f} us (rounds {each_round}), goal {GOAL_US:g}"
        )


if __name__ == "__main__":
    main()
