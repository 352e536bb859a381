"""The naive path: against a loop over pairs, against torch's SDPA, and within its memory budget."""

import functools
import math

import pytest
import torch
import torch.nn.functional as F

import fusedattn as fa
from fusedattn.naive import formula

from ..close import assert_like
from ..inside import by


def by_the_definition(query, key, value, visible, scale):
    """(out, lse) one pair at a time, in Python floats."""
    out = torch.zeros(*query.shape[:3], value.shape[3], dtype=torch.float64)
    lse = torch.full(query.shape[:3], float("-inf"), dtype=torch.float64)
    group = query.shape[1] // key.shape[1]
    for b, h, i in torch.cartesian_prod(*(torch.arange(n) for n in query.shape[:3])).tolist():
        keys = [j for j in range(key.shape[2]) if visible[b, h, i, j]]
        scores = [scale * float(query[b, h, i] @ key[b, h // group, j]) for j in keys]
        if keys:
            total = sum(math.exp(s) for s in scores)
            lse[b, h, i] = math.log(total)
            for j, s in zip(keys, scores, strict=True):
                out[b, h, i] += math.exp(s) / total * value[b, h // group, j]
    return out, lse


@pytest.mark.parametrize("align", ["bottom_right", "top_left"])
@pytest.mark.parametrize("sizes", [(5, 7), (7, 5), (6, 6)], ids=str)
@pytest.mark.parametrize("window", [None, (2, 1), (None, 0), (0, None)], ids=str)
def test_the_definition_pair_by_pair(align, sizes, window):
    sq, sk = sizes
    query, key, value = (torch.randn(2, h, s, 4).double() for h, s in ((4, sq), (2, sk), (2, sk)))
    mask, key_mask, query_mask = torch.rand(2, 4, sq, sk) < 0.8, torch.rand(2, sk) < 0.8, torch.rand(2, sq) < 0.8
    left, right = (None, None) if window is None else window
    visible = mask & key_mask[:, None, None, :] & query_mask[:, None, :, None]
    shift = sk - sq if align == "bottom_right" else 0
    for i in range(sq):
        for j in range(sk):
            if left is not None and j < shift + i - left or right is not None and j > shift + i + right:
                visible[:, :, i, j] = False
    got = fa.reference.attention(
        query,
        key,
        value,
        mask=mask,
        key_mask=key_mask,
        query_mask=query_mask,
        window=window,
        align=align,
        scale=0.3,
        return_lse=True,
    )
    assert_like(got, by_the_definition(query, key, value, visible, 0.3))


def test_it_agrees_with_sdpa():
    query, key, value = (torch.randn(2, h, 33, 16) for h in (4, 2, 2))
    for causal in (False, True):
        torchs = functools.partial(F.scaled_dot_product_attention, is_causal=causal, enable_gqa=True)
        assert_like(fa.reference.attention(query, key, value, causal=causal), torchs, query, key, value)


def test_half_precision_is_computed_in_float32():
    query, key, value = (torch.randn(1, 2, 40, 16).bfloat16() for _ in range(3))
    wide = fa.reference.attention(query.float(), key.float(), value.float()).bfloat16()
    assert torch.equal(fa.reference.attention(query, key, value), wide)


def test_under_torch_func_blocks_are_right_too(monkeypatch):
    query, key, value = (torch.randn(1, 2, 33, 8) for _ in range(3))

    def grad(attend, query):
        return torch.func.grad(lambda q: attend(q, key, value).square().sum())(query)

    monkeypatch.setattr(formula, "CACHE", 4 * 33 * 10)
    assert_like(grad(fa.reference.attention, query), grad, fa.reference.eager, query)


def test_it_takes_any_head_dimension():
    query, key, value = torch.randn(1, 1, 3, 300), torch.randn(1, 1, 4, 300), torch.randn(1, 1, 4, 500)
    assert fa.reference.attention(query, key, value).shape == (1, 1, 3, 500)


def test_anomaly_detection_finds_no_nan():
    """Rows that see nothing pass no NaN on their way back, not even one that is dropped later."""
    query, key, value = (torch.randn(1, 1, n, 8, requires_grad=True) for n in (9, 4, 4))
    with torch.autograd.set_detect_anomaly(True):
        out, lse = fa.reference.attention(query, key, value, causal=True, return_lse=True)
        (out.sum() + lse[..., 5:].sum()).backward()


@pytest.mark.parametrize("softcap", [1e-320, 1e-45, 1e38, 3e38])
def test_a_cap_that_float32_can_hardly_divide_by(softcap):
    inputs = [torch.randn(2, 2, 9, 8, requires_grad=True) for _ in range(3)]
    out = fa.reference.attention(*inputs, softcap=softcap)
    scale = 1e-30 if softcap < 1 else None  # all scores alike, or none capped
    assert_like(out, lambda: fa.reference.eager(*inputs, scale=scale))
    assert all(x.isfinite().all() for x in torch.autograd.grad(out.sin().sum(), inputs))


@pytest.mark.parametrize("softcap", [1e-3, 2.0**-61, 1e-30, 1e-42])
@pytest.mark.parametrize("backend", ["naive", "triton"])
def test_a_score_of_0_is_as_if_it_had_no_cap(backend, softcap, device):
    """However small the cap is: its derivative there is 1."""
    query, key = torch.zeros(1, 1, 3, 8, device=device), torch.randn(1, 1, 4, 8, device=device)
    value = torch.randn(1, 1, 4, 8, device=device)

    def grad(backend, **options):
        out = by(backend)(query.requires_grad_(), key, value, **options)
        return torch.autograd.grad(out[..., 0].sum(), query)[0]

    assert_like(grad(backend, softcap=softcap), grad, "eager")
