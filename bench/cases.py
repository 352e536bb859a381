"""What is measured: named cases, the most important first."""

from typing import NamedTuple

import torch
from torch import Tensor


class Tensors(NamedTuple):
    """The input of one case, and the gradient of its output."""

    query: Tensor
    key: Tensor
    value: Tensor
    grad_out: Tensor


class Case(NamedTuple):
    """Sizes as in the columns of the CSV; dtype is the name of a torch dtype."""

    B: int
    Hq: int
    Hkv: int
    Sq: int
    Sk: int
    D: int
    Dv: int
    causal: bool
    dtype: str

    @property
    def name(self) -> str:
        dims = f"d{self.D}" if self.D == self.Dv else f"d{self.D}-{self.Dv}"
        heads = "" if self.Hq == self.Hkv else f"-h{self.Hq}over{self.Hkv}"
        length = f"s{self.Sq}" if self.Sq == self.Sk else f"s{self.Sq}x{self.Sk}"
        return f"{dims}-{length}{heads}-{'causal' if self.causal else 'full'}-{self.dtype}"

    def draw(self, device) -> Tensors:
        """Normal numbers, the same ones every time; never zeros, on which a GPU is faster than on anything real."""
        generator = torch.Generator(device).manual_seed(0)
        shapes = (
            (self.B, self.Hq, self.Sq, self.D),
            (self.B, self.Hkv, self.Sk, self.D),
            (self.B, self.Hkv, self.Sk, self.Dv),
            (self.B, self.Hq, self.Sq, self.Dv),
        )
        dtype = getattr(torch, self.dtype)
        return Tensors(*(torch.randn(shape, device=device, generator=generator).to(dtype) for shape in shapes))


TOKENS, WIDTH = 16384, 2048  # B * S and Hq * D: the convention of the FlashAttention papers


def _long(length, dim, causal, dtype):
    heads = WIDTH // dim
    return Case(TOKENS // length, heads, heads, length, length, dim, dim, causal, dtype)


# Prompts that training and prefill see. Those that the goals speak of (S >= 2048) come first.
LONG = [
    _long(length, dim, causal, dtype)
    for lengths in ((2048, 4096, 8192, 16384), (512, 1024))
    for dtype in ("bfloat16", "float16")
    for length in lengths
    for dim in (128, 64)
    for causal in (True, False)
]

# One step off the main road each.
MORE = [
    *(_long(length, 256, causal, "bfloat16") for length in (2048, 8192) for causal in (True, False)),
    Case(4, 32, 8, 4096, 4096, 128, 128, True, "bfloat16"),  # grouped heads
    Case(4, 32, 4, 4096, 4096, 64, 64, True, "bfloat16"),
    Case(4, 16, 16, 4096, 4096, 192, 128, True, "bfloat16"),  # Dv is not D
    Case(16, 16, 16, 128, 8192, 128, 128, False, "bfloat16"),  # few queries, many keys
    Case(4, 16, 16, 4095, 4095, 128, 128, True, "bfloat16"),  # an odd length
    *(_long(4096, dim, False, "float32") for dim in (64, 128)),
]

# For a CPU, and to see that the benchmark itself works.
TINY = [
    Case(1, 2, 2, 64, 64, 16, 16, False, "float32"),
    Case(2, 2, 2, 64, 64, 16, 16, True, "float32"),
    Case(1, 4, 2, 48, 80, 16, 16, False, "float32"),
    Case(1, 2, 2, 64, 64, 16, 8, True, "bfloat16"),
]

TABLES = {"long": LONG, "more": MORE, "all": LONG + MORE, "tiny": TINY}
