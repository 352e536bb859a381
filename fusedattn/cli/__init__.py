"""The command line `fusedattn`. Each command is a module, imported when it runs."""

import argparse
import contextlib
import importlib
import io
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from .. import __version__
from .output import Output, Problem

SIZES = "B,Hq,Hkv,Sq,Sk,D"
DTYPES = ("float16", "bfloat16", "float32", "float64")


class _Parser(argparse.ArgumentParser):
    """Argument parser whose errors are one line, with a hint at --help."""

    def error(self, message: str) -> NoReturn:
        message += ", got none" * message.endswith("expected one argument")
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")

    def parse_known_args(self, args=None, namespace=None):
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:  # argparse would leave them to the parser of all commands, whose help does not list the options
            self.error(f"it does not take {' '.join(unknown)}")
        return found, unknown


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="fusedattn", description="Inspect, check and time fused attention on this machine.")
    parser.add_argument("--version", action="version", version=f"fusedattn {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def command(name, description):
        """Add a command. The first sentence of its description is its help."""
        added = commands.add_parser(name, help=description.partition(". ")[0], description=description)
        added.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
        return added

    def option(command, name, help, **more):
        command.add_argument(f"--{name}", action="append", help=f"{help} (may be repeated)", **more)

    command(
        "info",
        "Show versions, GPUs, and the backend of each kind of call. For each device and dtype it prints which backend "
        "takes a call, and why the others do not.",
    )
    check = command(
        "check",
        "Compare every backend of this machine with float64. Named cases run on every backend, on the GPU or otherwise "
        "in Triton's interpreter. Outputs, lse and gradients may have at most twice the error of eager PyTorch against "
        "float64. Exit status 1 if a result is wrong, or if nothing ran.",
    )
    option(check, "backend", "only this backend", metavar="NAME")
    option(check, "dtype", "only this dtype", choices=DTYPES)
    option(check, "case", "only this case", metavar="NAME")
    check.add_argument("--device", choices=("cpu", "cuda"), help="only on this device")
    bench = command(
        "bench",
        "Time attention against its peers, and check the results. The peers are PyTorch's attention and the plain "
        "formula, on the GPU or otherwise on the CPU. It prints speeds, ratios, and errors against float64. Exit "
        "status 1 if a result of fusedattn is wrong.",
    )
    questions = "forward, backward, options, packed, decode or module, in full"
    bench.add_argument("questions", nargs="*", metavar="QUESTION", help=questions)
    presets = "quick (default): some sizes, in minutes; paper: forward and backward; full: every question"
    bench.add_argument("--preset", choices=("quick", "paper", "full"), help=presets)
    option(bench, "shape", "this size instead", metavar=SIZES, type=_sizes)
    option(bench, "dtype", "in this dtype", choices=DTYPES)
    bench.add_argument("--causal", action="store_true", help="a causal mask for --shape; only causal cases of a preset")
    option(bench, "mode", "of forward,backward,forward_backward,graph", metavar="LIST")
    option(bench, "providers", "only these, for example fusedattn,sdpa,sdpa:flash,naive", metavar="LIST")
    bench.add_argument("--csv", metavar="FILE", help="append each row to this file when it is measured")
    bench.add_argument("--commit", help="the commit to write into the rows, if git cannot tell")
    bench.add_argument("--device", choices=("cpu", "cuda"), help="on this device")
    bench.add_argument("--plot", nargs="?", const="bench.png", metavar="PNG", help="draw speeds (bench.png)")
    tune = command(
        "tune",
        "Time the kernels' tile sizes on this GPU, and use the fastest. Each tile size is checked against float64 and "
        "timed if it passes. A table is printed, and a file written to the user's cache folder, replacing an earlier "
        "one. Later calls with the same GPU, driver, torch, Triton and fusedattn use the fastest that passed.",
    )
    option(tune, "shape", "this size", metavar=SIZES, type=_sizes)
    option(tune, "dtype", "bfloat16, or these", choices=DTYPES[:3])
    warmup = command(
        "warmup",
        "Compile the kernels of given shapes ahead of time. Forward and backward kernels are compiled for this GPU, in "
        "parallel, so that the first call of a program does not wait for them. Triton keeps them on disk. They serve "
        "any batch and length with the same head_dim, dtype and Hq / Hkv. Hopper's kernels also need the same Hq, and "
        "depend on the length: name the shortest and the longest. Exit status 1 if one fails to compile.",
    )
    option(warmup, "shape", "of a call", metavar=SIZES, type=_sizes, required=True)
    option(warmup, "dtype", "bfloat16, or these", choices=DTYPES[:3])
    causal = "only causal calls, or only others (default: both)"
    warmup.add_argument("--causal", action=argparse.BooleanOptionalAction, help=causal)
    warmup.add_argument("--inference", action="store_true", help="only forwards without gradients")
    warmup.add_argument("--jobs", type=_positive, metavar="N", help="processes (default: one for each core)")
    return parser


def _sizes(text: str) -> tuple[int, ...]:
    sizes = tuple(int(word) if word.isdecimal() else 0 for word in text.split(","))
    if len(sizes) != 6 or min(sizes) < 1 or max(sizes) >= 2**31 or sizes[1] % sizes[2]:
        expected = f"expected six integers {SIZES}, each 1 or more, with Hkv dividing Hq"
        raise argparse.ArgumentTypeError(f"{expected}, got {text or 'nothing'}")
    return sizes


def _positive(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) < 2**31:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {text}")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. Return 0; 1 if a check failed; 2 if it cannot run; 130 if interrupted; 141 for a closed pipe."""
    command = "fusedattn"
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # for terminals that cannot show all characters
    try:
        options = _parser().parse_args(arguments)
        command += f" {options.command}"
        module = importlib.import_module(f".{options.command}", __package__)
        status: int = module.run(options, Output(options.json))
        print(end="", flush=True)
        return status
    except KeyboardInterrupt:
        return 130
    except Problem as problem:
        print(f"{command}: {problem}", file=sys.stderr)
    except OSError as error:  # a closed pipe, or a full disk
        with contextlib.suppress(OSError):  # if stdout did not raise it, print what stdout has buffered
            sys.stdout.flush()
        with contextlib.suppress(OSError):  # keeps Python from writing the rest at exit, which would raise again
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return 141
        print(f"{command}: {error}", file=sys.stderr)
    return 2
