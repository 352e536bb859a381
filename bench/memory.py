"""How much memory does naive attention take on a long sequence?    python -m fusedattn.bench.memory

Forward and backward at B=1, H=4, S=16384, D=64 in float32, whose score matrix would be 4 GiB. What is printed is the
peak of this whole process, torch included, so it takes a process that has done nothing else.
"""

import argparse
import pathlib
import resource
import sys
import time

import torch

import fusedattn as fa

from . import cases

CASE = cases.Case(1, 4, 4, 16384, 16384, 64, 64, False, "float32")
GOAL_GIB = 3.0


def peak_gib():
    """The most memory this process has held at a time."""
    status = pathlib.Path("/proc/self/status")
    if status.exists():  # ru_maxrss would count what the parent held when it started us
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) / 2**20
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m fusedattn.bench.memory", description=__doc__.partition("\n")[0])
    parser.add_argument("--length", type=int, default=CASE.Sq, help="tokens (default: %(default)s)")
    length = parser.parse_args(arguments).length
    case = CASE._replace(Sq=length, Sk=length)
    query, key, value, grad_out = case.draw("cpu")[:4]
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    before, start = peak_gib(), time.perf_counter()
    out = fa.attention(*leaves, backend="naive")
    forward, middle = peak_gib(), time.perf_counter()
    torch.autograd.backward(out, grad_out)
    end = time.perf_counter()
    if not all(leaf.grad.isfinite().all() for leaf in leaves):
        raise SystemExit("the gradients are not finite")
    print(
        f"{case.name}: peak {peak_gib():.2f} GiB (before {before:.2f}, forward {forward:.2f}), goal {GOAL_GIB:g}; "
        f"forward {middle - start:.1f} s, backward {end - middle:.1f} s, {torch.get_num_threads()} threads"
    )


if __name__ == "__main__":
    main()
