"""How long does a user's first call wait for the compiler?    python -m tests.offline.first_call [--report]

The kernels of one call, forward and backward, are compiled for a GPU that is not there, with an empty cache: seconds of
CPU time, of one core, the assembler's among them. Loading them and the launch itself are not in it.
"""

import argparse
import contextlib
import itertools
import pathlib
import resource
import tempfile

import torch
import triton
from fusedattn.bench.cases import Case

from fusedattn.cli.warmup import PASSES, compile_pass

from . import absent

REPORT = pathlib.Path(__file__).parents[2] / "bench" / "results" / "first_call.md"
DTYPES, WIDTHS, CAPABILITIES = ("bfloat16", "float16", "float32"), (64, 128, 256), (80, 90)
HEADING = """\
# What a first call waits for

Seconds of CPU time, of one core, that Triton {version} and its ptxas take to compile what a call launches, with nothing
cached, made by `python -m tests.offline.first_call --report`; causal calls without masks and options. A call that
differs in the dtype, in head_dim, in how many query heads share a kv head, in which side of the window is bounded or in
which options there are compiles anew; another batch, length or number of heads does not (of the kernel for Hopper the
number of heads does). `inference` is a forward of
which no gradient is asked, `training` one that saves for the `backward`. `fusedattn warmup` compiles several at a time.
"""


def _cpu_seconds():
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def measure(case, what, capability):
    """(seconds, kernels) of a pass of a case, compiled with an empty cache."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(absent.gpu(capability, stages=None, folder=folder))
        began = _cpu_seconds()
        done = compile_pass(case, what, torch.device("cpu"))
        assert not done.why, done.why
        return _cpu_seconds() - began, done.kernels


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", action="store_true", help=f"write {REPORT.name}")
    chosen = parser.parse_args(arguments)
    measure(Case(1, 8, 8, 512, 512, 64, 64, True, "bfloat16"), "inference", 90)  # imports are not a call's
    lines = ["| GPU | dtype | head_dim | " + " | ".join(reversed(PASSES)) + " |", "|" + "---|" * (3 + len(PASSES))]
    for capability, dtype, width in itertools.product(CAPABILITIES, DTYPES, WIDTHS):
        case = Case(1, 8, 8, 512, 512, width, width, True, dtype)
        times = [measure(case, what, capability) for what in reversed(PASSES)]
        cells = " | ".join(f"{seconds:.1f} ({kernels})" for seconds, kernels in times)
        lines.append(f"| sm_{capability} | {dtype} | {width} | {cells} |")
        print(lines[-1], flush=True)
    if chosen.report:
        text = HEADING.format(version=triton.__version__)
        REPORT.write_text("\n".join([text, "In brackets how many kernels they are.", "", *lines, ""]))


if __name__ == "__main__":
    main()
