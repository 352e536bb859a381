"""Tests ranks of inputs, windows, alignment and seeds."""

import pytest
import torch

import fusedattn as fa

from ..close import assert_like

QUERY, KEY, VALUE = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 6)


@pytest.mark.parametrize("rank", [2, 3])
def test_results_have_the_rank_of_query(rank):
    tensors = [x[:, 0] if rank == 3 else x[0, 0] for x in (QUERY, KEY, VALUE)]
    results = fa.attention(*tensors, return_lse=True, return_weights=True)
    whole = fa.attention(*(x[:, :1] for x in (QUERY, KEY, VALUE)), return_lse=True, return_weights=True)
    for found, want in zip(results, whole, strict=True):
        want = want[:, 0] if rank == 3 else want[0, 0]
        assert found.shape == want.shape
        assert_like(found, want.double())


@pytest.mark.parametrize(
    "options, left, right, shift",
    [
        (dict(align="top_left"), 9, 9, 0),
        (dict(causal=True), 9, 0, 2),
        (dict(causal=True, align="top_left"), 9, 0, 0),
        (dict(window=(2, None)), 2, 9, 2),
        (dict(window=(None, 1), align="top_left"), 9, 1, 0),
        (dict(window=(2, 7), causal=True), 2, 0, 2),
        (dict(window=(0, 0)), 0, 0, 2),
        (dict(window=(2**40, 2**70)), 9, 9, 2),
    ],
    ids=str,
)
@pytest.mark.parametrize("backend", ["naive", "cpu"])
def test_a_band_is_a_mask(options, left, right, shift, backend):
    distance = torch.arange(5) - torch.arange(3)[:, None] - shift
    mask = (distance >= -left) & (distance <= right)
    found = fa.attention(QUERY, KEY, VALUE, **options, backend=backend)
    assert_like(found, lambda: fa.reference.eager(QUERY, KEY, VALUE, mask=mask))


def test_seeds():
    def draw(seed):
        return fa.attention(QUERY, KEY, VALUE, dropout_p=0.5, seed=seed)

    assert not torch.equal(draw(None), draw(None))
    assert torch.equal(draw(5), draw(torch.tensor(5))) and torch.equal(draw(5), draw(torch.tensor([5])))
    torch.manual_seed(0)
    first = draw(None)
    torch.manual_seed(0)
    assert torch.equal(first, draw(None))
    torch.manual_seed(0)
    fa.attention(QUERY, KEY, VALUE), fa.attention(QUERY, KEY, VALUE, seed=3)
    assert torch.equal(first, draw(None)), "without dropout nothing is drawn"
