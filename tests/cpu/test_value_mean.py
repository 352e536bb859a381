"""Tests that outputs are exact for bfloat16 values with a large common mean or outliers."""

import pytest
import torch

import fusedattn as fa
from fusedattn.testing.tolerance import verdict

from ..close import assert_computes, assert_like
from ..inside import named

CALLS_WITH_OUTLIERS = {
    "one element": dict(keys=128, place=(slice(None), slice(None), 5, 7), size=1e4),
    "the last row": dict(keys=1000, place=(slice(None), slice(None), -1), size=1e4, mean=1.0, causal=True),
    "a larger one": dict(keys=1000, place=(slice(None), slice(None), -1), size=1e5, mean=1.0, causal=True),
}


@pytest.mark.parametrize("name", CALLS_WITH_OUTLIERS)
def test_values_of_bfloat16_with_outliers(name):
    """Outputs are exact if outliers dominate the mean of the values: such a mean is not subtracted."""
    fields = CALLS_WITH_OUTLIERS[name]
    query, key, value, out = (torch.randn(1, 1, fields["keys"], 64) for _ in range(4))
    query[..., 0], key[..., 0], value[:] = 8.0, 0.0, value + fields.get("mean", 0.0)
    key[:, :, 5, 0] = -40.0
    value[fields["place"]] = fields["size"]
    tensors = named(*(x.bfloat16() for x in (query, key, value, out)))
    assert_computes(fa.attention, tensors, dict(causal=fields.get("causal", False)), "out")


@pytest.mark.parametrize("hidden", ["bias", "mask"])
def test_what_rows_see_may_be_small_beside_what_they_do_not(hidden):
    """Outputs are exact if visible values are small beside hidden ones: the large mean is not subtracted."""
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
    got = fa.attention(query, key, value, mask=mask, backend="cpu")
    assert verdict(got[..., small, :], eager, exact).ok
    got = fa.attention(query, key, value, mask=mask, query_mask=small, backend="cpu")
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
    with_gradient = fa.attention(query.requires_grad_(), key, value)
    outs = with_gradient, fa.attention(query.detach(), key, value)
    for out in outs:
        assert_like(out[..., 1:], fa.reference.eager, query, key, value[..., 1:])
    assert torch.equal(*(out[..., 0].isfinite() for out in outs))
