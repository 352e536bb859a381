"""Parses the command line `fusedattn` and runs the command. Each command is a module, imported when it is used."""

import argparse
import contextlib
import importlib
import io
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from .. import __version__
from .output import Problem

SIZES = "B,Hq,Hkv,Sq,Sk,D"
DTYPES = ("float16", "bfloat16", "float32", "float64")


class _Parser(argparse.ArgumentParser):
    """Says in one line what is wrong, and where help is."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="fusedattn", description="Fused multi-head attention: look at it, check it, see it.")
    parser.add_argument("--version", action="version", version=f"fusedattn {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def command(name, summary, description):
        added = commands.add_parser(name, help=summary, description=description)
        added.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
        return added

    def option(command, name, help, **more):
        command.add_argument(f"--{name}", action="append", help=f"{help} (may be repeated)", **more)

    command(
        "info",
        "versions, GPUs, and which backend takes what here",
        "Versions, GPUs and CPU cores; for each device and dtype the backend that takes a call, and why no other does.",
    )
    check = command(
        "check",
        "hold every backend of this machine to float64",
        "Compute named cases with every backend that runs here, on the GPU or else in Triton's interpreter; compare "
        "outputs, lse and gradients with float64, beside eager PyTorch in that dtype. Exit status 1 if any is wrong, "
        "or if nothing ran.",
    )
    option(check, "backend", "only this backend", metavar="NAME")
    option(check, "dtype", "only this dtype", choices=DTYPES)
    option(check, "case", "only this case", metavar="NAME")
    check.add_argument("--device", choices=("cpu", "cuda"), help="only on this device")
    bench = command(
        "bench",
        "time attention against its peers here, and hold each to float64",
        "Time attention by fusedattn, by PyTorch's own and by the plain formula on this machine, the GPU or else the "
        "CPU; say how much faster ours is than each, and whether every result is right. Exit status 1 if ours is not.",
    )
    bench.add_argument(
        "questions", nargs="*", metavar="QUESTION", help="forward, backward, options, packed, decode or module, in full"
    )
    what = bench.add_mutually_exclusive_group()
    what.add_argument(
        "--preset",
        choices=("quick", "paper", "full"),
        help="quick, the default, takes minutes; paper: forward and backward in full; full: every question",
    )
    option(what, "shape", "this size instead", metavar=SIZES, type=_sizes)
    option(bench, "dtype", "in this dtype", choices=DTYPES)
    bench.add_argument("--causal", action="store_true", help="--shape with a causal mask; of a preset the causal cases")
    option(bench, "mode", "some of forward,backward,forward_backward,graph", metavar="LIST")
    option(bench, "providers", "these, as fusedattn,sdpa,sdpa:flash,naive", metavar="LIST")
    bench.add_argument("--csv", metavar="FILE", help="append every row to this file as soon as it is measured")
    bench.add_argument("--commit", help="the commit that the rows name, where git cannot tell")
    bench.add_argument("--device", choices=("cpu", "cuda"), help="on this device")
    bench.add_argument("--plot", nargs="?", const="bench.png", metavar="PNG", help="draw speeds (bench.png)")
    tune = command(
        "tune",
        "measure the kernels on this GPU, and have calls take the fastest",
        "Hold each tile and pipeline of the kernels to float64 on this GPU, time those that are right, print a table, "
        "and write a file to the user's cache folder, over an earlier one. Calls on the same GPU, driver, torch, "
        "Triton and version of fusedattn take the fastest by it, and none that was wrong.",
    )
    option(tune, "shape", "this size", metavar=SIZES, type=_sizes)
    option(tune, "dtype", "bfloat16, or these", choices=DTYPES[:3])
    warmup = command(
        "warmup",
        "compile the kernels of given shapes ahead, several at a time",
        "Compile the kernels that calls of given shapes take on this GPU, forward and backward, so that the first call "
        "of a program, or one in a CUDA graph, need not; Triton keeps them on disk. They serve any batch and length of "
        "the same head_dim, dtype and Hq / Hkv. Kernels for Hopper also need the same Hq, and depend on the length: "
        "name the shortest and the longest. Exit status 1 if one fails.",
    )
    option(warmup, "shape", "of a call", metavar=SIZES, type=_sizes, required=True)
    option(warmup, "dtype", "bfloat16, or these", choices=DTYPES[:3])
    warmup.add_argument(
        "--causal", action=argparse.BooleanOptionalAction, help="only calls that are causal, or that are not"
    )
    warmup.add_argument("--inference", action="store_true", help="only forwards of which no gradient is asked")
    warmup.add_argument("--jobs", type=_positive, metavar="N", help="processes (as many as there are cores)")
    return parser


def _sizes(text: str) -> tuple[int, ...]:
    sizes = tuple(int(word) if word.isdecimal() else 0 for word in text.split(","))
    if len(sizes) != 6 or min(sizes) < 1 or max(sizes) >= 2**31 or sizes[1] % sizes[2]:
        raise argparse.ArgumentTypeError(f"expected {SIZES}, whole numbers, Hq a multiple of Hkv; got {text}")
    return sizes


def _positive(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) < 2**31:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {text}")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    0; 1 if a check failed; 2 if it could not be run; 130 if it was interrupted; 141 if nobody reads its output.
    """
    command = "fusedattn"
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal may lack letters of a user's text
    try:
        options = _parser().parse_args(arguments)
        command += f" {options.command}"
        status: int = importlib.import_module(f".{options.command}", __package__).run(options)
        print(end="", flush=True)
        return status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # who reads has seen enough
        _drop_output()
        return 141
    except Problem as problem:
        print(f"{command}: {problem}", file=sys.stderr)
    except OSError as error:  # a full disk
        _drop_output()
        print(f"{command}: {error}", file=sys.stderr)
    return 2


def _drop_output() -> None:
    """Keep Python from writing once more, when it ends, what could not be written."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
