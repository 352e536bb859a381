"""How fast does this machine multiply and copy?    python -m fusedattn.bench.ceilings

What the shares in tables are shares of: a product of two large square matrices of random numbers, as torch computes it
in the dtype of a case, and a copy of more bytes than a cache holds, read once and written once. Measured in every run:
a data sheet knows neither the clock nor the power limit.
"""

import functools
import sys
from typing import NamedTuple

import torch

from . import cases, command, timing

DTYPES = ("bfloat16", "float16", "float32")


class Ceilings(NamedTuple):
    """The columns of a row."""

    matmul_tflops: float
    copy_gbps: float


@functools.cache
def measure(dtype, device, budget_ms=60.0):
    """The Ceilings of a device in a dtype; measured once in a process."""
    on_gpu = torch.device(device).type == "cuda"
    side, size = (8192, 2**30) if on_gpu else (256, 2**25)
    generator = torch.Generator(device).manual_seed(cases.SEED)
    left, right = torch.randn(2, side, side, device=device, generator=generator).to(getattr(torch, dtype))
    product = torch.empty_like(left)
    multiply = timing.measure(lambda: torch.mm(left, right, out=product), device, budget_ms)
    source = torch.randint(2**31, (size // 4,), device=device, generator=generator, dtype=torch.int32)
    target = torch.empty_like(source)
    copy = timing.measure(lambda: target.copy_(source), device, budget_ms)
    return Ceilings(2 * side**3 / multiply.p50 / 1e9, 2 * size / copy.p50 / 1e6)


def main(arguments=None):
    options = command.parser(__doc__, csv=False).parse_args(arguments)
    for dtype in DTYPES:
        found = measure(dtype, options.device, options.repeat_ms)
        print(f"{dtype}: products {found.matmul_tflops:.4g} TFLOP/s, copies {found.copy_gbps:.4g} GB/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
