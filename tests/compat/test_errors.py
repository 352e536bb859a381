"""Errors of drop-ins are of the classes that torch and flash-attn raise."""

import pickle

import pytest
import torch

import fusedattn.compat.torch as compat
from fusedattn.compat import flash_attn

X, LAYER = torch.zeros(2, 2, 4, 8), dict(embed_dim=8, num_heads=2)
CAUGHT = [
    (RuntimeError, lambda: compat.scaled_dot_product_attention(X, X[..., :4], X)),
    (RuntimeError, lambda: compat.scaled_dot_product_attention(X, X.double(), X)),
    (RuntimeError, lambda: compat.scaled_dot_product_attention(X, X, X, dropout_p=2.0)),
    (TypeError, lambda: compat.scaled_dot_product_attention([1], X, X)),
    (AssertionError, lambda: compat.MultiheadAttention(8, 3)),
    (ValueError, lambda: compat.MultiheadAttention(0, 3)),
    (AssertionError, lambda: compat.MultiheadAttention(**LAYER)(X[0, :, :, :4], X[0], X[0])),
    (RuntimeError, lambda: compat.MultiheadAttention(**LAYER)(X[0], X[0], X[0], attn_mask=torch.zeros(3, 3))),
    (AssertionError, lambda: compat.MultiheadAttention(**LAYER)(X[0], X[0], X[0], attn_mask=torch.zeros(4, 4).int())),
    (RuntimeError, lambda: compat.MultiheadAttention(**LAYER)(X[0], X[0], X[0], is_causal=True)),
    (RuntimeError, lambda: flash_attn.flash_attn_func(X, X[..., :4], X)),
    (RuntimeError, lambda: flash_attn.flash_attn_varlen_func(X[0], X[0], X[0], X, X, 1, 1)),
    (RuntimeError, lambda: flash_attn.flash_attn_with_kvcache(X, X, X.double())),
]


@pytest.mark.parametrize(("error", "call"), CAUGHT)
def test_programs_that_catch_their_errors_catch_ours(error, call):
    with pytest.raises(error) as raised:
        call()
    again = pickle.loads(pickle.dumps(raised.value))
    assert isinstance(again, ValueError | TypeError) and str(again) == str(raised.value) and "expected" in str(again)


def test_a_compiled_program_catches_them_too():
    def attend(query, key):
        try:
            return compat.scaled_dot_product_attention(query, key, key)
        except RuntimeError:
            return query

    torch._dynamo.reset()
    assert torch.equal(torch.compile(attend, backend="eager")(X, X[..., :4]), X)
