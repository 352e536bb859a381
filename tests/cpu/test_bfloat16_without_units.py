"""Tests bfloat16 calls on CPUs without bfloat16 units, which compute in float32 in half of PyTorch's time."""

import platform

import pytest
import torch

import fusedattn as fa

from ..close import assert_computes
from ..conftest import run_python

OPTIONS = {
    "plain": {},
    "causal": dict(causal=True),
    "window": dict(window=(9, 4)),
    "key_mask": dict(key_mask=torch.arange(70) < torch.tensor([[70], [41]])),
    "sinks": dict(sinks=torch.randn(4, generator=torch.Generator().manual_seed(0))),
}


@pytest.fixture
def without_units(monkeypatch):
    monkeypatch.setattr("fusedattn.cpu.tiling.multiplies_bfloat16", lambda: False)


@pytest.mark.parametrize("common", [0.0, 8.0], ids=["values", "values with a mean"])
@pytest.mark.parametrize("name", OPTIONS)
def test_output_and_gradients_are_as_good_as_eagers(name, common, without_units):
    torch.manual_seed(0)
    sizes = dict(query=(2, 4, 50, 32), key=(2, 2, 70, 32), value=(2, 2, 70, 24), out=(2, 4, 50, 24), lse=(2, 4, 50))
    tensors = {
        name: torch.randn(size).to(torch.float32 if name == "lse" else torch.bfloat16) for name, size in sizes.items()
    }
    tensors["value"] += common
    assert fa.explain(*(tensors[name] for name in ("query", "key", "value")), **OPTIONS[name]).backend == "cpu"
    assert_computes(fa.attention, tensors, OPTIONS[name])


_TIMES = """
import time, torch
import fusedattn as fa

def seconds(attend, inputs, incoming):
    begun = time.process_time()
    attend(*inputs).backward(incoming)
    return time.process_time() - begun

torch.set_num_threads(1)
inputs = [torch.randn(2, 8, 512, 64).bfloat16().requires_grad_() for _ in range(3)]
incoming = torch.randn(2, 8, 512, 64).bfloat16()
functions = fa.attention, torch.nn.functional.scaled_dot_product_attention
times = [min(seconds(f, inputs, incoming) for _ in range(4)) for f in functions]
print(torch.backends.cpu.get_cpu_capability(), times[0] / times[1])
"""


@pytest.mark.matrix
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="about x86")
def test_training_takes_half_of_pytorchs_time():
    avx2 = dict(ATEN_CPU_CAPABILITY="avx2", ONEDNN_MAX_CPU_ISA="AVX2", MKL_ENABLE_INSTRUCTIONS="AVX2")
    capability, ratio = run_python("-c", _TIMES, **avx2).split()
    assert capability == "AVX2" and float(ratio) <= 0.5
