"""Attention as flash-attn defines it, (B, S, H, D) and lower-right, in the dtype of the inputs; and its names."""

import re

import torch

import fusedattn as fa


def formula(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None):
    """(output (B, Sq, H, Dv), log-sum-exp (B, H, Sq)) by eager PyTorch."""
    window = tuple(None if side == -1 else int(side) for side in window_size)
    options = dict(scale=softmax_scale, causal=causal, window=window, softcap=softcap or None)
    by_head = (x.transpose(1, 2) for x in (q, k, v))
    out, lse = fa.reference.eager(*by_head, **options, alibi_slopes=alibi_slopes, return_lse=True)
    return out.transpose(1, 2), lse


def turned(x, places, cos, sin, interleaved):
    """(S, H, D) with its first columns turned by the angles of places (S,), as complex numbers."""
    half = cos.shape[1]
    some = x[..., : 2 * half].double()
    first, second = (some[..., ::2], some[..., 1::2]) if interleaved else (some[..., :half], some[..., half:])
    found = torch.complex(first, second) * torch.complex(cos.double(), sin.double())[places.long()][:, None]
    found = torch.stack([found.real, found.imag], -1 if interleaved else -2).flatten(-2)
    return torch.cat([found.to(x.dtype), x[..., 2 * half :]], -1)


NOT_THEIRS = re.compile(r"(?<!new )\b(query|key|value|key_cache|value_cache|new_key|new_value|scale|window)\b")


def assert_names(error, name):
    """An error is one line, begins with the name of the argument, and knows no name that flash-attn does not."""
    assert str(error).startswith(f"{name}: expected ") and "\n" not in str(error)
    assert not NOT_THEIRS.search(str(error)), error


def described(wrong):
    return f"{wrong.dtype}{tuple(wrong.shape)}" if isinstance(wrong, torch.Tensor) else getattr(wrong, "__name__", None)
