"""Tests float32 calls with few keys, such as Swin's windows: the kernel, gradients, and the bias's gradient."""

from collections import Counter

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import fusedattn as fa

from ..close import assert_computes
from ..inside import alike, named

WINDOWS, HEADS, TOKENS, DIM = 4, 3, 25, 16
KERNEL = "aten::_scaled_dot_product_flash_attention_for_cpu"
NOTHING = torch.zeros(TOKENS, TOKENS).masked_fill(torch.arange(TOKENS)[:, None] == 5, float("-inf"))
OPTIONS = {
    "plain": {}, "causal": dict(causal=True), "bias": dict(bias=torch.randn(1, HEADS, TOKENS, TOKENS)),
    "bias of windows": dict(bias=torch.randn(WINDOWS, HEADS, TOKENS, TOKENS)),
    "mask": dict(mask=torch.rand(WINDOWS, 1, TOKENS, TOKENS) < 0.7), "a row sees nothing": dict(bias=NOTHING),
}  # fmt: skip


def operators(function):
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        function()
    return Counter({event.key: event.count for event in seen.key_averages()})


@pytest.mark.parametrize("requires", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_forward_is_one_call_of_torchs_kernel(name, requires):
    """A forward calls PyTorch's kernel once; our formula would be ten times slower for denormal weights (bias -100)."""
    inputs = alike(WINDOWS, HEADS, TOKENS, DIM, requires_grad=requires)
    found = operators(lambda: fa.attention(*inputs, **OPTIONS[name], backend="cpu"))
    assert found[KERNEL] == 1
    assert not found["aten::_softmax"] + found["aten::bmm"] + found["aten::baddbmm"]


BESIDE = {
    "bias": {}, "mask": dict(mask=torch.rand(TOKENS, TOKENS) < 0.7), "window": dict(window=(3, 9)),
    "causal": dict(causal=True), "sinks": dict(sinks=torch.randn(HEADS)),
    "alibi_slopes": dict(alibi_slopes=torch.rand(HEADS)),
    "key_mask": dict(key_mask=torch.rand(WINDOWS, TOKENS) < 0.8),
}  # fmt: skip


@pytest.mark.parametrize("name", BESIDE)
def test_the_gradient_of_a_bias_is_as_good_as_eagers(name):
    options = BESIDE[name]
    many = TOKENS, TOKENS
    shapes = (1, 1, *many), (WINDOWS, 1, TOKENS, 1), (1, HEADS, *many), (WINDOWS, HEADS, 1, TOKENS)
    kinds = zip(shapes, (torch.float64, torch.float32, torch.bfloat16, torch.float32), strict=True)
    for (shape, dtype), grads in zip(kinds, ("out", "out", "lse", "out and lse"), strict=True):
        bias = torch.randn(shape).to(dtype).masked_fill(torch.rand(shape[2:]) < 0.1, float("-inf"))
        tensors = named(*torch.randn(4, WINDOWS, HEADS, TOKENS, DIM))
        tensors["lse"] = torch.randn(WINDOWS, HEADS, TOKENS)
        assert_computes(fa.attention, tensors, options | dict(bias=bias), grads, backend="cpu")


def test_a_bias_of_no_keys_can_be_compared():
    tensors = {name: torch.randn(1, 2, 5, 8) for name in ("query", "out")}
    tensors |= {name: torch.randn(1, 2, 0, 8) for name in ("key", "value")}
    options = dict(bias=torch.randn(1, 2, 5, 0))
    assert_computes(fa.attention, tensors, options, "out")


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dim, keys, scale", [(32, 17, 4), (16, 64, 4), (4, 17, None), (8, 64, None), (64, 33, None)])
@pytest.mark.one_in(3)
def test_gradients_of_few_keys_are_as_good_as_eagers(dim, keys, scale, seed):
    """Gradients for few keys are as exact as eager's, whose order of sums over rows depends on the CPU."""
    torch.manual_seed(seed)
    sizes = dict(query=(4, 3, 1030, dim), key=(4, 3, keys, dim), value=(4, 3, keys, dim))
    sizes |= dict(out=(4, 3, 1030, dim), lse=(4, 3, 1030))
    tensors = {name: torch.randn(size) for name, size in sizes.items()}
    assert_computes(fa.attention, tensors, dict(scale=scale))


def test_sinks_of_more_than_float32_holds_count_as_its_largest_number():
    inputs = [torch.randn(1, 2, n, 8, requires_grad=True) for n in (5, 7, 7)]
    sinks = torch.full((2,), 1e39, dtype=torch.float64)
    out, lse = fa.attention(*inputs, sinks=sinks, return_lse=True)
    assert not out.any() and lse.isfinite().all() and torch.autograd.grad(out.sum(), inputs)[0].isfinite().all()
