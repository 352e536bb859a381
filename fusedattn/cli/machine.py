"""This machine: its GPUs and cores, and how Triton can run on it."""

import os
import sys

import torch

from ..dispatch.backends import Explanation, explain
from .output import Problem


def device() -> str:
    """Return "cuda" where kernels run on a GPU, else "cpu".

    Without a GPU Triton is told to interpret kernels, if it is not imported yet.
    """
    asked = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")
    if torch.cuda.is_available() and not asked:
        return "cuda"
    if "triton" not in sys.modules:
        os.environ["TRITON_INTERPRET"] = "1"
    return "cpu"


def need_gpu(why: str) -> None:
    """Raise a Problem where kernels do not run on a GPU."""
    if not torch.cuda.is_available():
        raise Problem(f"it {why} an NVIDIA GPU, and torch finds none")
    if device() != "cuda":
        raise Problem(f"it {why} an NVIDIA GPU, and TRITON_INTERPRET has kernels run on the CPU; unset it")


def explained(device: str, dtype: str, backend: str | None = None) -> Explanation:
    """Explain which backend takes a small call."""
    small = (torch.zeros(1, 1, 16, 64, device=device, dtype=getattr(torch, dtype)),) * 3
    return explain(*small, backend=backend)


def gpus() -> list[dict]:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found = []
    for one in map(torch.cuda.get_device_properties, range(count)):
        about = dict(name=one.name, capability=f"{one.major}.{one.minor}", gib=round(one.total_memory / 2**30, 1))
        found.append(about | dict(multiprocessors=one.multi_processor_count))
    return found


def cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
