"""Attention as flash-attn defines it, (B, S, H, D) and lower-right, in the dtype of the inputs; and its names."""

import math
import re

import torch


def formula(
    q,
    k,
    v,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    factor=None,
    seen=None,
):
    """(output (B, Sq, H, Dv), log-sum-exp (B, H, Sq)).

    factor: (B, H, Sq, Sk), multiplies weights, as dropout does. seen: bool (Sk,), keys that are there at all.
    """
    (_, rows, heads, dim), keys = q.shape, k.shape[1]
    k, v = (x.repeat_interleave(heads // x.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * (dim**-0.5 if softmax_scale is None else softmax_scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    level = torch.arange(rows, device=q.device)[:, None] + keys - rows
    key = torch.arange(keys, device=q.device)
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.to(q.dtype).reshape(-1, heads, 1, 1) * (level - key).abs()
    left, right = window_size
    visible = torch.ones(rows, keys, dtype=torch.bool, device=q.device)
    if left != -1:
        visible &= key >= level - left
    if right != -1:
        visible &= key <= level + right
    if causal:
        visible &= key <= level
    if seen is not None:
        visible &= seen
    scores = scores.masked_fill(~visible, -math.inf)
    lse = scores.logsumexp(-1)
    weights = torch.where(visible, (scores - lse.nan_to_num(neginf=0.0)[..., None]).exp(), 0.0)
    if factor is not None:
        weights = weights * factor
    return torch.einsum("bhij,bjhd->bihd", weights, v), lse


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
