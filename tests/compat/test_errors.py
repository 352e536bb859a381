"""Errors of drop-ins use the argument names and error classes of torch and flash-attn."""

import math
import pickle
import re

import pytest
import torch

import fusedattn as fa
from fusedattn.compat import flash_attn as flash, torch as for_torch

from ..sequences import offsets

NOT_THEIRS = re.compile(r"(?<!new )\b(query|key|value|key_cache|value_cache|new_key|new_value|scale|window)\b")


def assert_names(error, name):
    """Assert that an error is one line that begins with the argument and uses flash-attn's names only."""
    assert str(error).startswith(f"{name}: expected ") and "\n" not in str(error)
    assert not NOT_THEIRS.search(str(error)), error


def described(wrong):
    return f"{wrong.dtype}{tuple(wrong.shape)}" if isinstance(wrong, torch.Tensor) else getattr(wrong, "__name__", None)


Q, K = torch.zeros(2, 5, 4, 8), torch.zeros(2, 7, 2, 8)
QT, KT, CU = torch.zeros(10, 4, 8), torch.zeros(14, 2, 8), offsets([3, 7])
LENGTHS = dict(cu_seqlens_q=CU, cu_seqlens_k=offsets([7, 7]), max_seqlen_q=7, max_seqlen_k=7)
CALLS = {
    "flash_attn_func": dict(q=Q, k=K, v=K),
    "flash_attn_kvpacked_func": dict(q=Q, kv=torch.stack([K, K], 2)),
    "flash_attn_qkvpacked_func": dict(qkv=torch.stack([Q, Q, Q], 2)),
    "flash_attn_varlen_func": dict(q=QT, k=KT, v=KT, **LENGTHS),
    "flash_attn_varlen_kvpacked_func": dict(q=QT, kv=torch.stack([KT, KT], 1), **LENGTHS),
    "flash_attn_varlen_qkvpacked_func": dict(qkv=torch.stack([QT, QT, QT], 1), cu_seqlens=CU, max_seqlen=7),
}
SHARED = [
    (ValueError, "softmax_scale", math.nan),
    (TypeError, "causal", 1),
    (ValueError, "window_size", (-2, 0)),
    (ValueError, "softcap", -1.0),
    (ValueError, "dropout_p", 1.5),
    (ValueError, "alibi_slopes", torch.zeros(3)),
]
DENSE = [
    (TypeError, "q", None),
    (ValueError, "q", Q[0]),
    (TypeError, "q", Q.to_sparse()),
    (TypeError, "k", K.half()),
    (ValueError, "k", K[:1]),
    (ValueError, "k", K.to("meta")),
    (TypeError, "v", None),
    (ValueError, "v", K[:, :6]),
]
PACKED = [
    (ValueError, "q", Q),
    (ValueError, "k", KT[..., :4]),
    (ValueError, "v", KT[:6]),
    (TypeError, "cu_seqlens_q", CU.long()),
    (ValueError, "cu_seqlens_q", offsets([3, 6])),
    (ValueError, "max_seqlen_q", 6),
    (TypeError, "max_seqlen_k", 7.0),
]
WRONG = [
    *(("flash_attn_func", *each) for each in DENSE + SHARED),
    *(("flash_attn_varlen_func", *each) for each in PACKED + SHARED[:4]),
    ("flash_attn_kvpacked_func", ValueError, "kv", K),
    ("flash_attn_kvpacked_func", ValueError, "kv", torch.zeros(2, 7, 3, 2, 8)),
    ("flash_attn_kvpacked_func", ValueError, "kv", torch.zeros(2, 7, 2, 3, 8)),
    ("flash_attn_kvpacked_func", ValueError, "softmax_scale", math.inf),
    ("flash_attn_qkvpacked_func", ValueError, "qkv", torch.zeros(2, 5, 2, 4, 8)),
    ("flash_attn_qkvpacked_func", TypeError, "qkv", torch.zeros(2, 5, 3, 4, 8).int()),
    ("flash_attn_varlen_kvpacked_func", ValueError, "kv", torch.zeros(14, 2, 3, 8)),
    ("flash_attn_varlen_kvpacked_func", ValueError, "cu_seqlens_k", offsets([7, 6])),
    ("flash_attn_varlen_qkvpacked_func", ValueError, "qkv", torch.zeros(10, 2, 4, 8)),
    ("flash_attn_varlen_qkvpacked_func", ValueError, "cu_seqlens", offsets([3, 6])),
    ("flash_attn_varlen_qkvpacked_func", ValueError, "max_seqlen", 6),
]


@pytest.mark.parametrize(("function", "error", "name", "wrong"), WRONG, ids=described)
def test_errors_name_flash_attns_arguments(function, error, name, wrong):
    flash.__dict__[function](**CALLS[function])
    with pytest.raises(error) as raised:
        flash.__dict__[function](**CALLS[function] | {name: wrong})
    assert issubclass(raised.type, RuntimeError)  # which flash-attn raises
    assert_names(raised.value, name)


def test_errors_show_the_shapes_that_the_caller_has():
    for call, shape in (
        (lambda: flash.flash_attn_func(Q, K, K[:, :6]), "(2, 6, 2, 8)"),
        (lambda: flash.flash_attn_varlen_func(**CALLS["flash_attn_varlen_func"] | dict(q=Q)), "(2, 5, 4, 8)"),
        (lambda: flash.flash_attn_with_kvcache(Q[:1], K, K[:, :6]), "(2, 6, 2, 8)"),  # of two caches one is used
    ):
        with pytest.raises(ValueError) as raised:
            call()
        assert str(raised.value).endswith(f"got {shape}")


def test_a_kernel_that_cannot_says_so_in_flash_attns_words(device):
    q = torch.zeros(1, 2, 1, 300, device=device)
    with fa.use_backend("triton"), pytest.raises(NotImplementedError) as raised:
        flash.flash_attn_func(q, q, q)
    assert "the head dimension of q is 300" in str(raised.value) and not NOT_THEIRS.search(str(raised.value))


X, layer = torch.zeros(2, 2, 4, 8), for_torch.MultiheadAttention(8, 2)
CAUGHT = [
    (RuntimeError, lambda: for_torch.scaled_dot_product_attention(X, X[..., :4], X)),
    (RuntimeError, lambda: for_torch.scaled_dot_product_attention(X, X.double(), X)),
    (RuntimeError, lambda: for_torch.scaled_dot_product_attention(X, X, X, dropout_p=2.0)),
    (TypeError, lambda: for_torch.scaled_dot_product_attention([1], X, X)),
    (AssertionError, lambda: for_torch.MultiheadAttention(8, 3)),
    (ValueError, lambda: for_torch.MultiheadAttention(0, 3)),
    (AssertionError, lambda: layer(X[0, :, :, :4], X[0], X[0])),
    (RuntimeError, lambda: layer(X[0], X[0], X[0], attn_mask=torch.zeros(3, 3))),
    (AssertionError, lambda: layer(X[0], X[0], X[0], attn_mask=torch.zeros(4, 4).int())),
    (RuntimeError, lambda: layer(X[0], X[0], X[0], is_causal=True)),
    (RuntimeError, lambda: flash.flash_attn_with_kvcache(X, X, X.double())),
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
            return for_torch.scaled_dot_product_attention(query, key, key)
        except RuntimeError:
            return query

    torch._dynamo.reset()
    assert torch.equal(torch.compile(attend, backend="eager")(X, X[..., :4]), X)
