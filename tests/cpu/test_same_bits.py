"""Tests that the output has the same bits whatever else a call returns, with and without gradients."""

import pytest
import torch

import fusedattn as fa

ROWS, KEYS = 20, 90
DTYPES = torch.float32, torch.bfloat16, torch.float16, torch.float64
LEARNED = "bias", "alibi_slopes", "sinks"


def options():
    torch.manual_seed(0)
    return {
        "plain": {},
        "causal": dict(causal=True),
        "window": dict(window=(20, 3)),
        "mask": dict(mask=torch.rand(ROWS, KEYS) < 0.7),
        "bias": dict(bias=torch.randn(1, 4, ROWS, KEYS)),
        "alibi_slopes": dict(alibi_slopes=torch.rand(4)),
        "sinks": dict(sinks=torch.randn(4)),
        "key_mask": dict(key_mask=torch.arange(KEYS) < torch.tensor([[30], [80]])),
        "query_mask": dict(query_mask=torch.rand(2, ROWS) < 0.8),
        "softcap": dict(softcap=3.0),
        "dropout": dict(dropout_p=0.3, seed=3),
        "dropout and mask": dict(dropout_p=0.3, seed=3, mask=torch.rand(ROWS, KEYS) < 0.7, causal=True),
    }


def outputs(query, key, value, more):
    for requires in (False, True):
        inputs = [x.detach().requires_grad_(requires) for x in (query, key, value)]
        given = {name: x.detach().requires_grad_(requires) if name in LEARNED else x for name, x in more.items()}
        for lse in (False, True):
            for weights in (False, True):
                for _ in range(2):
                    found = fa.attention(*inputs, **given, return_lse=lse, return_weights=weights)
                    yield found[0] if lse or weights else found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", options())
@pytest.mark.parametrize("dim, keys, common", [(8, KEYS, 0.0), (32, 40, 0.0), (32, KEYS, 4.0)])
@pytest.mark.one_in(5)
def test_an_output_has_the_same_bits(dtype, name, dim, keys, common):
    more = options()[name]
    cut = {key: x[..., :keys] for key, x in more.items() if key in ("mask", "bias", "key_mask")}
    query, key, value = (torch.randn(2, heads, rows, dim) for heads, rows in ((4, ROWS), (2, keys), (2, keys)))
    first, *others = outputs(query.to(dtype), key.to(dtype), (value + common).to(dtype), more | cut)
    assert all(torch.equal(first, x) for x in others)
