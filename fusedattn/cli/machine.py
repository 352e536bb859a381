"""What this machine is: versions, cores, GPUs; and how Triton can run on it."""

import os
import platform
import shutil
import subprocess
import sys

import torch

from .. import __version__
from ..backends import Explanation, explain
from .screen import Problem


def device() -> str:
    """Where kernels run: "cuda", or "cpu" where there is no GPU or Triton is to interpret them.

    Without a GPU it is told to, if it can be: it reads that once, when it is imported.
    """
    asked = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")
    if torch.cuda.is_available() and not asked:
        return "cuda"
    if "triton" not in sys.modules:
        os.environ["TRITON_INTERPRET"] = "1"
    return "cpu"


def need_gpu(why: str) -> None:
    """Raise a Problem, that a command does what it is for on an NVIDIA GPU, where kernels do not run on one."""
    if not torch.cuda.is_available():
        raise Problem(f"it {why} an NVIDIA GPU, and torch finds none")
    if device() != "cuda":
        raise Problem(f"it {why} an NVIDIA GPU, and TRITON_INTERPRET has kernels run on the CPU; unset it")


def explained(device: str, dtype: str = "float32", backend: str | None = None) -> Explanation:
    """Who takes a small call on a device, or why a backend that is named does not."""
    return explain(*small(device, dtype), backend=backend)


def small(device: str, dtype: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value of a small call."""
    return (torch.zeros(1, 1, 16, 64, device=device, dtype=getattr(torch, dtype)),) * 3


def versions() -> dict[str, str | None]:
    """Of everything an answer may depend on; None is what is not there."""
    try:
        import triton
    except Exception:  # one that is broken raises anything; `fusedattn info` says what, among the reasons
        triton = None
    return {
        "fusedattn": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": getattr(triton, "__version__", None),
        "cuda": torch.version.cuda,
        "driver": _driver(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def gpus() -> list[dict]:
    """Name, compute capability, memory in GiB and multiprocessors of each."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [
        dict(name=of.name, capability=f"{of.major}.{of.minor}", gib=gib, multiprocessors=of.multi_processor_count)
        for of in map(torch.cuda.get_device_properties, range(count))
        for gib in [round(of.total_memory / 2**30, 1)]
    ]


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def busy() -> bool:
    """Whether others have had half of its cores or more for a minute."""
    return hasattr(os, "getloadavg") and os.getloadavg()[0] > cores() / 2


def _driver():
    if not torch.cuda.is_available() or shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()
    return answer[0] if answer else None
