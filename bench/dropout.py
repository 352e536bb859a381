"""What do dropout's bits cost the naive path, beside torch's own dropout?    python -m fusedattn.bench.dropout

A grid of 4096 x 4096 weights of one head, in float32: the mask of `fusedattn.naive.dropout` times the weights, and
torch.nn.functional.dropout, whose bits depend on the order in which they are drawn. In turns, no gradients.
"""

import argparse

import torch
import torch.nn.functional as F

from fusedattn.naive import dropout

from . import cases, rows, timing

LENGTH, RATE = 4096, 0.1


def steps(length=LENGTH, device="cpu"):
    """{provider: what it does with a (1, length, length) grid of weights}."""
    weights = torch.rand(1, length, length, device=device)
    seed, planes = torch.tensor([7], device=device), torch.zeros(1, dtype=torch.int64, device=device)

    def ours():
        return weights * dropout.keep(seed, planes, 0, length, length, RATE) * (1 / (1 - RATE))

    return {"fusedattn:naive": ours, "naive": lambda: F.dropout(weights, RATE)}


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m fusedattn.bench.dropout", description=__doc__.partition("\n")[0])
    parser.add_argument("--length", type=int, default=LENGTH, help="rows and columns of the grid")
    parser.add_argument("--repeats", type=int, default=10, help="times that each takes its turn")
    parser.add_argument("--csv", help="append to this file")
    parser.add_argument("--commit", help="what the rows say, where git cannot tell")
    options = parser.parse_args(arguments)
    writer, machine = rows.Writer(options.csv), rows.machine("cpu", options.commit)
    case = cases.Case(1, 1, 1, options.length, options.length, 1, 1, False, "float32")
    with torch.no_grad():
        times = timing.interleaved(steps(options.length), options.repeats)
    for provider, each in times.items():
        measured = each.columns()
        writer.write(rows.row(machine, "host", provider, case, options=f"dropout={RATE}", **measured))
    ours, theirs = (times[provider].p50 for provider in ("fusedattn:naive", "naive"))
    print(f"{options.length} x {options.length}: {ours:.0f} ms, F.dropout {theirs:.0f} ms, ratio {ours / theirs:.2f}")


if __name__ == "__main__":
    main()
