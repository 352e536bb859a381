"""Tests that memory around inputs, results and scratch neither changes results nor is changed."""

import pytest
import torch

import fusedattn as fa
from fusedattn.testing.compare import with_gradients

from .. import caches, cases
from ..caches import Cached
from ..cases import Case
from ..guard import NAN, PLAUSIBLE, Guard
from ..inside import TRITON
from ..sample import named, one_in
from ..sequences import draw_packed, offsets

BACKENDS = [TRITON, None, "naive"]
GUARDS = [(NAN, 0), (PLAUSIBLE, 3)]  # (values of canaries, canaries after each line)


def guarded(function, tensors, options, grads, backend, monkeypatch, fill, gap):
    """Return the same as `with_gradients` with canaries around all tensors and allocations, and check the canaries."""
    guard = Guard(fill, gap)
    tensors, options = (
        {name: guard.inside(x, name) if isinstance(x, torch.Tensor) else x for name, x in given.items()}
        for given in (tensors, options)
    )
    with monkeypatch.context() as patched:
        guard.allocates(patched)
        found = with_gradients(function, tensors, options, grads, backend=backend)
    guard.check()
    return found.values()


def alike(got, want, backend):
    """Assert that kernels give equal bits; PyTorch's matmul may round differently at other addresses."""
    for a, b in zip(got, want, strict=True):
        if backend == "triton":
            assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) and torch.equal(a.isnan(), b.isnan())
        else:
            tolerance = 8 * torch.finfo(b.dtype).eps * b.nan_to_num(0, 0, 0).abs().max().clamp(1).item()
            torch.testing.assert_close(a, b, rtol=0, atol=tolerance, equal_nan=True)


def held(function, tensors, options, grads, backend, monkeypatch, passes):
    if backend == "triton":
        passes(2)
    want = with_gradients(function, tensors, options, grads, backend=backend).values()
    assert all(x.numel() == 0 or not x.isnan().all() for x in want)
    for fill, gap in GUARDS:
        for _ in range(1 if gap else 2):  # the second call is a replay
            alike(guarded(function, tensors, options, grads, backend, monkeypatch, fill, gap), want, backend)


ALL = "out, lse and weights"
DENSE = [
    Case("plain", grads=ALL),
    Case("causal, grouped, half", Hq=4, causal=True, dtype=torch.float16, Sq=33, Sk=50),
    Case("masks", B=2, mask="pairs", key_mask="own", query_mask="own"),
    Case("scores", bias="pairs", alibi="own", sinks=True, softcap=1.5, D=5, Dv=24, grads=ALL),
    Case("window, dropout", window=(9, 4), dropout=0.3, dtype=torch.bfloat16, Sq=70, Sk=40),
    Case("shared", B=2, mask="heads", bias="keys", key_mask="shared", query_mask="rank 1", Sk=19),
    Case("rows of a bias", B=2, bias="rows", dtype=torch.float64, Sq=19),
    Case("a bias of each head", B=2, bias="one a head", causal=True),
]
DENSE = [*DENSE, *(case._replace(Sq=min(case.Sq, 40), Sk=min(case.Sk, 40)) for case in cases.COVERING[::8])]
DENSE = one_in(9, named([DENSE[3], *DENSE[4:12], DENSE[2], DENSE[0], DENSE[1], *DENSE[12:], *cases.WIDE[25::60]]))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", DENSE)
@pytest.mark.one_in(2)
def test_a_dense_call(case, backend, monkeypatch, passes):
    tensors, options = case.draw()
    tensors |= {name: tensors[name].clone(memory_format=torch.contiguous_format) for name in ("query", "key", "value")}
    held(fa.attention, tensors, options, case.grads, backend, monkeypatch, passes)


ROWS, KEYS = (7, 0, 33), (17, 5, 0)
MOST = max(ROWS), max(KEYS)


def _drawn(**shapes):
    """Draw random options from {name: shape}: masks are bool, other options are numbers."""
    made = {}
    for name, shape in shapes.items():
        x = torch.randn(shape, generator=torch.Generator().manual_seed(len(name)))
        made[name] = x > -0.5 if "mask" in name else x
    return made


PACKED = {
    "plain": {},
    "causal": dict(causal=True, max_seqlen_q=MOST[0], max_seqlen_k=MOST[1]),
    "window": dict(window=(5, 3), dtype=torch.float16),
    "tokens": _drawn(key_mask=(sum(KEYS),), query_mask=(sum(ROWS),)),
    "pairs": _drawn(mask=(3, 1, *MOST), bias=(1, 4, *MOST)),
    "scores": _drawn(alibi_slopes=(3, 4), sinks=(4,)) | dict(softcap=2.0),
    "dropout": dict(dropout_p=0.3, seed=3),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", one_in(5, [pytest.param(name, id=name) for name in PACKED]))
@pytest.mark.one_in(2)
def test_packed_sequences(name, backend, monkeypatch, passes):
    options = dict(PACKED[name])
    query, key, value, grad = draw_packed(ROWS, KEYS, dtype=options.pop("dtype", torch.float32))
    lengths = dict(cu_seqlens_q=offsets(ROWS), cu_seqlens_k=offsets(KEYS))
    tensors = dict(query=query, key=key, value=value, out=grad, lse=torch.randn(4, sum(ROWS)))
    held(fa.attention_varlen, tensors, lengths | options, "out and lse", backend, monkeypatch, passes)


CACHED = [
    *caches.SINGLE[1:6],
    caches.EVERYTHING._replace(strided=False),
    Cached("splits", lengths=(200, 3), C=210, dtype=torch.float16),
    *caches.EDGES[:3],
    *caches.EDGES[7:9],
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", one_in(5, named(CACHED)))
@pytest.mark.one_in(2)
def test_caches(case, backend, monkeypatch):
    arguments = case.draw()
    results = fa.attention_decode(**arguments, return_lse=True, backend=backend)
    for fill, gap in GUARDS:
        for _ in range(1 if gap else 2):
            given, guard = case.draw(), Guard(fill, gap)
            given = {name: guard.inside(x, name) if isinstance(x, torch.Tensor) else x for name, x in given.items()}
            with monkeypatch.context() as patched:
                guard.allocates(patched)
                found = fa.attention_decode(**given, return_lse=True, backend=backend)
            alike(found, results, backend)
            mine = {name: given[name] for name in ("key_cache", "value_cache")}
            new = {name: caches.touched(x, given).repeat_interleave(x.element_size()) for name, x in mine.items()}
            guard.check(**new)
            for name, x in mine.items():
                assert torch.equal(x.nan_to_num(7.0), arguments[name].nan_to_num(7.0)), name
