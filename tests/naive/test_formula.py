"""Tests numerics of the naive path; tests/kernels/test_options.py compares it with the definition."""

import pytest
import torch

import fusedattn as fa

from ..close import assert_like


def test_half_precision_is_computed_in_float32():
    query, key, value = (torch.randn(1, 2, 40, 16).bfloat16() for _ in range(3))
    wide = fa.reference.attention(query.float(), key.float(), value.float()).bfloat16()
    assert torch.equal(fa.reference.attention(query, key, value), wide)


def test_anomaly_detection_finds_no_nan():
    """Rows that see no key make no NaN in the backward, not even one that a later step drops."""
    query, key, value = (torch.randn(1, 1, n, 8, requires_grad=True) for n in (9, 4, 4))
    with torch.autograd.set_detect_anomaly(True):
        out, lse = fa.reference.attention(query, key, value, causal=True, return_lse=True)
        (out.sum() + lse[..., 5:].sum()).backward()


@pytest.mark.parametrize("softcap", [1e-320, 1e-45, 1e38])
def test_a_cap_that_float32_can_hardly_divide_by(softcap):
    inputs = [torch.randn(2, 2, 9, 8, requires_grad=True) for _ in range(3)]
    out = fa.reference.attention(*inputs, softcap=softcap)
    scale = 1e-30 if softcap < 1 else None  # all scores are equal, or none is capped
    assert_like(out, lambda: fa.reference.eager(*inputs, scale=scale))
    assert all(x.isfinite().all() for x in torch.autograd.grad(out.sin().sum(), inputs))
