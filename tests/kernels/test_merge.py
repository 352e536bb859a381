"""Tests that `fa.merge` of attention over two sets of keys equals attention over both, with gradients."""

import pytest
import torch

import fusedattn as fa

from ..close import assert_like


def draw(dtype=torch.float64):
    return [torch.randn(2, h, s, 8, dtype=dtype).requires_grad_() for h, s in ((4, 10), (2, 15), (2, 15))]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_two_parts_merge(dtype):
    query, key, value = draw(dtype)
    mask = torch.rand(2, 1, 10, 15) < 0.6
    mask[:, :, 0] = mask[:, :, 1, :7] = mask[:, :, 2, 7:] = False  # hidden in both parts, in the first, in the second
    halves = [
        fa.attention(query, key[:, :, part], value[:, :, part], mask=mask[..., part], return_lse=True)
        for part in (slice(0, 7), slice(7, 15))
    ]
    got = fa.merge(*halves[0], *halves[1])
    assert [x.dtype for x in got] == [x.dtype for x in halves[0]]
    assert (got[0][:, :, 0] == 0).all() and (got[1][:, :, 0] == float("-inf")).all()
    weights = [torch.randn_like(x) for x in got]
    weights[1] = weights[1].masked_fill(got[1].isinf(), 0.0)

    def with_gradients(results):
        return [*results, *torch.autograd.grad(results, (query, key, value), weights)]

    whole = lambda: with_gradients(fa.reference.eager(query, key, value, mask=mask, return_lse=True))  # noqa: E731
    assert_like(with_gradients(got), whole)


def test_gradients_of_first_and_second_order():
    out_a, out_b = (torch.randn(3, 2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    lse_a, lse_b = (torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(fa.merge, (out_a, lse_a, out_b, lse_b))
    assert torch.autograd.gradgradcheck(fa.merge, (out_a, lse_a, out_b, lse_b))


def test_large_log_sums_do_not_overflow():
    out = torch.ones(1, 1, 1, 2)
    merged, lse = fa.merge(out, torch.full((1, 1, 1), 3e38), out * 3, torch.full((1, 1, 1), 3e38))
    assert (merged == 2).all() and (lse == 3e38).all()
