"""Tests bfloat16 calls: values with a large common mean or outliers, and CPUs without bfloat16 units."""

import platform

import pytest
import torch

import fusedattn as fa
from fusedattn.testing.tolerance import verdict

from ..close import assert_computes, assert_like
from ..conftest import run_python
from ..inside import named

CALLS_WITH_OUTLIERS = {
    "one element": dict(keys=128, place=(slice(None), slice(None), 5, 7), size=1e4),
    "the last row": dict(keys=1000, place=(slice(None), slice(None), -1), size=1e4, mean=1.0, causal=True),
    "a larger one": dict(keys=1000, place=(slice(None), slice(None), -1), size=1e5, mean=1.0, causal=True),
}


@pytest.mark.parametrize("fields", CALLS_WITH_OUTLIERS.values(), ids=CALLS_WITH_OUTLIERS)
def test_values_of_bfloat16_with_outliers(fields):
    query, key, value, out = (torch.randn(1, 1, fields["keys"], 64) for _ in range(4))
    query[..., 0], key[..., 0], value[:] = 8.0, 0.0, value + fields.get("mean", 0.0)
    key[:, :, 5, 0] = -40.0
    value[fields["place"]] = fields["size"]
    tensors = named(*(x.bfloat16() for x in (query, key, value, out)))
    assert_computes(fa.attention, tensors, dict(causal=fields.get("causal", False)), "out")


@pytest.mark.parametrize("hidden", ["bias", "mask"])
def test_what_rows_see_may_be_small_beside_what_they_do_not(hidden):
    torch.manual_seed(0)
    tensors = named(*torch.randn(4, 1, 1, 120, 16).bfloat16())
    tensors["value"] = tensors["value"] / 20
    tensors["value"][..., :-3, :] = 10.0
    seen = (torch.arange(120) >= 117).expand(120, 120)
    options = {"bias": torch.zeros(120, 120).masked_fill(~seen, float("-inf"))} if hidden == "bias" else {"mask": seen}
    assert_computes(fa.attention, tensors, options, "out", (), backend="cpu")


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_each_row_that_sees_small_values_alone_is_exact(share):
    query, key, value = torch.randn(3, 1, 1, 120, 16).bfloat16()
    value[..., :-3, :], value[..., -3:, :] = 10.0, value[..., -3:, :] / 20
    small = torch.arange(120) >= 120 * (1 - share)
    mask = (torch.arange(120) >= 117) | ~small[:, None]
    exact = fa.reference.attention(query.double(), key.double(), value.double(), mask=mask)[..., small, :]
    eager = fa.reference.eager(query, key, value, mask=mask)[..., small, :]
    query.requires_grad_()
    for more in ({}, dict(query_mask=small)):
        got = fa.attention(query, key, value, mask=mask, backend="cpu", **more)
        assert verdict(got[..., small, :], eager, exact).ok


def test_a_weight_of_nearly_1_may_be_that_of_a_small_value():
    query, key = torch.full((2, 1, 1, 120, 16), 4.0, dtype=torch.bfloat16).unbind()
    value = torch.full((1, 1, 120, 16), 10.0, dtype=torch.bfloat16)
    key[..., :-1, :], value[..., -1, :] = 0.0, 0.1
    out = fa.attention(query.requires_grad_(), key, value, backend="cpu")
    assert torch.equal(out.detach(), value[..., -1:, :].expand_as(out))


def test_a_mean_that_is_infinite_is_not_taken_off():
    value = (torch.randn(1, 1, 400, 64) + 1).bfloat16()
    value[..., 300:304, 0] = 3e38
    query, key = (torch.randn(1, 1, 400, 64).bfloat16() for _ in range(2))
    outs = [fa.attention(x, key, value) for x in (query.clone().requires_grad_(), query)]
    for out in outs:
        assert_like(out[..., 1:], fa.reference.eager, query, key, value[..., 1:])
    assert torch.equal(*(out[..., 0].isfinite() for out in outs))


# CPUs without bfloat16 units compute in float32, in half of PyTorch's time. Others do so in backwards of few rows.
OPTIONS = {
    "plain": {},
    "causal": dict(causal=True),
    "window": dict(window=(9, 4)),
    "key_mask": dict(key_mask=torch.arange(70) < torch.tensor([[70], [41]])),
    "keys apart": dict(key_mask=torch.arange(70) % torch.tensor([[9], [14]]) == 0),
    "sinks": dict(sinks=torch.randn(4, generator=torch.Generator().manual_seed(0))),
}


@pytest.mark.parametrize("rows, units", [(50, False), (100, True), (200, True)])
@pytest.mark.parametrize("common", [0.0, 20.0], ids=["values", "values with a mean"])
@pytest.mark.parametrize("name", OPTIONS)
def test_output_and_gradients_are_as_good_as_eagers(name, common, rows, units, monkeypatch):
    monkeypatch.setattr("fusedattn.cpu.tiling.multiplies_bfloat16", lambda: units)
    torch.manual_seed(0)
    key, value, out = (2, 2, 70, 32), (2, 2, 70, 24), (2, 4, rows, 24)
    sizes = dict(query=(2, 4, rows, 32), key=key, value=value, out=out, lse=out[:3])
    tensors = {
        name: torch.randn(size).to(torch.float32 if name == "lse" else torch.bfloat16) for name, size in sizes.items()
    }
    tensors["key"] += common / 10
    tensors["value"] += common
    assert_computes(fa.attention, tensors, OPTIONS[name], backend="cpu")


def test_gradients_of_one_key_that_many_rows_see(monkeypatch):
    monkeypatch.setattr("fusedattn.cpu.tiling.multiplies_bfloat16", lambda: True)
    for seed in range(10):
        torch.manual_seed(seed)
        tensors = named(*(torch.randn(2, n, rows, 16).bfloat16() for n, rows in ((4, 300), (1, 1), (1, 1), (4, 300))))
        assert_computes(fa.attention, tensors, {}, "out", backend="cpu")


@pytest.mark.parametrize("dtype, units", [(torch.float16, False), (torch.bfloat16, False), (torch.bfloat16, True)])
def test_gradients_of_sinks_are_not_computed_from_rounded_outputs(dtype, units, monkeypatch):
    monkeypatch.setattr("fusedattn.cpu.tiling.multiplies_bfloat16", lambda: units)
    for seed in range(20):
        torch.manual_seed(seed)
        tensors = named(*torch.randn(4, 1, 2, 2, 16).to(dtype))
        assert_computes(fa.attention, tensors, dict(sinks=torch.randn(2)), "out", ("sinks",), backend="cpu")


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
