"""Parses the command line `fusedattn` and runs the command. Each command is a module, imported when it is used."""

import argparse
import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from .. import __version__
from .screen import Problem

DTYPES = ("float16", "bfloat16", "float32", "float64")


class _Parser(argparse.ArgumentParser):
    """Says in one line what is wrong, and where help is."""

    def print_help(self, file: Any = None) -> None:
        (file or sys.stdout).write(self.format_help())  # argparse passes over a disk that is full

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:  # said here, of a command that is the command's, which has the help
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return known, unknown

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
    check.add_argument("--backend", action="append", metavar="NAME", help="only this backend (may be repeated)")
    check.add_argument("--dtype", action="append", choices=DTYPES, help="only this dtype (may be repeated)")
    check.add_argument("--case", action="append", metavar="NAME", help="only this case (may be repeated)")
    check.add_argument("--device", choices=("cpu", "cuda"), help="only on this device")
    bench = command(
        "bench",
        "time attention against its peers here, and hold each to float64",
        "Time attention by fusedattn, by PyTorch's own and by the plain formula on this machine, the GPU or else the "
        "CPU; say how much faster ours is than each, and whether every result is right. Exit status 1 if ours is not.",
    )
    what = bench.add_mutually_exclusive_group()
    what.add_argument(
        "--preset",
        choices=("quick", "paper", "full"),
        help="quick, the default, takes a minute or two; paper: sizes of the FlashAttention papers; full: everything. "
        "On a CPU quick and full, with no other option of these, are what its user gets: attention, modules, a model",
    )
    what.add_argument(
        "--shape", action="append", metavar="B,Hq,Hkv,Sq,Sk,D", help="this size instead (may be repeated)"
    )
    bench.add_argument("--dtype", action="append", choices=DTYPES, help="in this dtype (may be repeated)")
    bench.add_argument("--causal", action="store_true", help="--shape with a causal mask; of a preset the causal cases")
    bench.add_argument("--mode", action="append", metavar="LIST", help="some of forward,backward,forward_backward")
    bench.add_argument("--providers", action="append", metavar="LIST", help="these, as fusedattn,sdpa,sdpa:flash,naive")
    bench.add_argument("--csv", metavar="FILE", help="append every row to this file as soon as it is measured")
    bench.add_argument(
        "--plot",
        nargs="?",
        const="bench.png",
        metavar="PNG",
        help="draw speeds and a roofline, over an older picture (bench.png)",
    )
    tune = command(
        "tune",
        "measure the kernels on this GPU, and have calls take the fastest",
        "Hold each tile and pipeline of the kernels to float64 on this GPU, time those that are right, print a table, "
        "and write a file to the user's cache folder, over an earlier one. Calls on the same GPU, driver, torch, "
        "Triton and version of fusedattn take the fastest by it, and none that was wrong.",
    )
    tune.add_argument("--shape", action="append", metavar="B,Hq,Hkv,Sq,Sk,D", help="this size (may be repeated)")
    tune.add_argument("--dtype", action="append", choices=DTYPES[:3], help="bfloat16, or these (may be repeated)")
    warmup = command(
        "warmup",
        "compile the kernels of given shapes ahead, several at a time",
        "Compile the kernels that calls of given shapes take on this GPU, forward and backward, so that the first call "
        "of a program, or one in a CUDA graph, need not; Triton keeps them on disk. They serve any batch and length of "
        "the same head_dim, dtype and Hq / Hkv. Kernels for Hopper also need the same Hq, and depend on the length: "
        "name the shortest and the longest. Exit status 1 if one fails.",
    )
    warmup.add_argument(
        "--shape", action="append", metavar="B,Hq,Hkv,Sq,Sk,D", required=True, help="of a call (may be repeated)"
    )
    warmup.add_argument("--dtype", action="append", choices=DTYPES[:3], help="bfloat16, or these (may be repeated)")
    warmup.add_argument(
        "--causal", action=argparse.BooleanOptionalAction, help="only calls that are causal, or that are not"
    )
    warmup.add_argument("--inference", action="store_true", help="only forwards of which no gradient is asked")
    warmup.add_argument("--jobs", type=_positive, metavar="N", help="processes (as many as there are cores)")
    return parser


def _number(kind: Callable[[str], Any], expected: str, right: Callable[[Any], bool]) -> Callable[[str], Any]:
    """What argparse makes a number by."""

    def read(text: str) -> Any:
        try:
            number = kind(text)
        except ValueError:
            number = None
        if number is None or not right(number):
            raise argparse.ArgumentTypeError(f"expected {expected}, got {text}")
        return number

    return read


_positive = _number(int, "1 or more", lambda number: 1 <= number < 2**31)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, 1 if a check failed, 2 if it could not be run, and those of signals.

    130 if it was interrupted, 141 if nobody reads any more.
    """
    command = "fusedattn"
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # a caller has closed it, who wants the exit status alone
            setattr(sys, name, open(os.devnull, "w"))
    try:
        try:
            options = _parser().parse_args(arguments)
        finally:
            sys.stdout.flush()  # of --help
        command += f" {options.command}"
        status: int = importlib.import_module(f".{options.command}", __package__).run(options)
        sys.stdout.flush()
        return status
    except Problem as problem:
        print(f"{command}: {problem}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # who reads has seen enough
        _drop_output()
        return 141
    except OSError as error:  # a disk that is full
        _drop_output()
        print(f"{command}: {error}", file=sys.stderr)
        return 2


def _drop_output() -> None:
    """Have Python not try again, when it ends, to write what could not be written."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
