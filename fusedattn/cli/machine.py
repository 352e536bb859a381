"""The cores of this machine, and the device that kernels run on."""

import os
import sys

import torch

from ..call.options import override
from ..dispatch.backends import Explanation, explain
from .output import Problem


def device() -> str:
    """Return the device of kernels, "cuda" or "cpu". For a CPU, set TRITON_INTERPRET unless Triton is imported."""
    interpreted = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")
    if torch.cuda.is_available() and not interpreted:
        return "cuda"
    if "triton" not in sys.modules:
        os.environ["TRITON_INTERPRET"] = "1"
    return "cpu"


def check_device(name: str | None) -> None:
    if name == "cuda" and not torch.cuda.is_available():
        raise Problem("device: expected cpu, got cuda: torch finds no GPU")


def need_gpu(why: str) -> None:
    if not torch.cuda.is_available():
        raise Problem(f"it {why} an NVIDIA GPU, but torch finds none: run it on a machine with one")
    if device() != "cuda":
        raise Problem(f"it {why} an NVIDIA GPU, but TRITON_INTERPRET makes kernels run on the CPU: unset it")


def explained(device: str, dtype: str, backend: str | None = None) -> Explanation:
    small = (torch.empty(1, 1, 16, 64, device="meta", dtype=getattr(torch, dtype)),) * 3
    with override(gpu=torch.device(device)):  # takes no memory of a GPU, which another process may have filled
        return explain(*small, backend=backend)


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
