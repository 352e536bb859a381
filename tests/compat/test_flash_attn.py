"""Tests flash-attn's functions with gradients: signatures, values and layouts."""

import functools
import inspect
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import fusedattn as fa
from fusedattn.compat import flash_attn as compat

from ..cases import DTYPES, FEATURES, Case
from ..close import assert_case
from ..fuzz.routes import flash_dense, flash_packed
from ..inside import leaves, same
from ..sequences import offsets

OPTIONS = "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, "
OPTIONS += "deterministic=False, return_attn_probs=False"
OFFSETS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
SIGNATURES = {
    "flash_attn_func": f"q, k, v, {OPTIONS}",
    "flash_attn_kvpacked_func": f"q, kv, {OPTIONS}",
    "flash_attn_qkvpacked_func": f"qkv, {OPTIONS}",
    "flash_attn_varlen_func": f"q, k, v, {OFFSETS}, {OPTIONS}, block_table=None",
    "flash_attn_varlen_kvpacked_func": f"q, kv, {OFFSETS}, {OPTIONS}",
    "flash_attn_varlen_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, {OPTIONS}",
    "flash_attn_with_kvcache": "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, "
    "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, "
    "window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0, "
    "return_softmax_lse=False",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_flash_attns(name):
    parameters = inspect.signature(getattr(compat, name)).parameters.values()
    bare = [each.replace(annotation=inspect.Parameter.empty) for each in parameters]
    assert str(inspect.Signature(bare)) == f"({SIGNATURES[name]})"


NAMES = (
    *("grouped heads", "odd head dims", "wide value", "more rows", "more keys", "one row", "strided", "expanded"),
    *("causal", "window", "window of itself", "left window", "right window", "negative scale", "softcap", "slopes"),
)
EVERY = dict(B=2, Hq=4, D=10, Dv=6, scale=0.7, causal=True, window=(20, 1), softcap=2.0, alibi="own")
CASES = [
    *(Case(name, dtype=DTYPES[n % 4])._replace(**FEATURES[name]) for n, name in enumerate(NAMES)),
    Case("everything", strided=True, **EVERY),
    Case("causal, fewer keys", causal=True, Sk=9, dtype=torch.float16),
    Case("no queries", Sq=0),
    Case("no keys", Sk=0, causal=True),
    Case("no batch", B=0),
]
ON_KERNELS = ("causal, fewer keys", "everything", "no keys")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_values_and_gradients(case):
    assert_case(case, function=flash_dense(None))


@pytest.mark.parametrize("case", [case for case in CASES if case.name in ON_KERNELS], ids=lambda case: case.name)
def test_kernels(case, device, poison):
    with fa.use_backend("triton"):
        assert_case(case, device, flash_dense(None))


@pytest.mark.parametrize("window", [torch.tensor([1, 0]), np.array([1, 0], np.int32), [1, 0]], ids=type)
def test_a_window_may_be_a_tensor_or_an_array(window):
    q = torch.randn(2, 5, 4, 8)
    same(compat.flash_attn_func(q, q, q, window_size=window), compat.flash_attn_func(q, q, q, window_size=(1, 0)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_comes_out(dtype):
    q, k = torch.randn(2, 4, 5, 8).to(dtype).transpose(1, 2), torch.randn(2, 7, 8, 2).to(dtype).mT
    out, lse, third = compat.flash_attn_func(q, k, k, causal=True, return_attn_probs=True)
    assert out.shape == q.shape and out.dtype == dtype and out.is_contiguous() and third.numel() == 0
    assert lse.shape == (2, 4, 5) and lse.dtype == torch.promote_types(dtype, torch.float32)
    assert torch.equal(compat.flash_attn_func(q, k, k, causal=True), out)


def test_dropout():
    q, k, v = torch.randn(2, 40, 4, 8), torch.randn(2, 50, 2, 8), torch.randn(2, 50, 2, 8)
    options = dict(softcap=2.0, causal=True)
    torch.manual_seed(5)
    want = fa.attention(*[x.transpose(1, 2) for x in (q, k, v)], dropout_p=0.4, **options).transpose(1, 2)
    torch.manual_seed(5)
    assert torch.equal(compat.flash_attn_func(q, k, v, 0.4, **options), want)
    assert not torch.equal(compat.flash_attn_func(q, k, v, 0.4, **options), want)


def together(function, packed, *rest):
    """Return output, lse and the gradient of each tensor in `packed`, which holds q, k and v together."""
    packed = [x.detach().requires_grad_() for x in packed]
    out, lse, _ = function(*packed, *rest, causal=True, softcap=2.0, return_attn_probs=True)
    assert out.is_contiguous()
    weight = torch.linspace(-1, 1, out.numel()).view(out.shape)
    loss = (out * weight).sum() + lse.masked_fill(lse == -math.inf, 0.0).sum()
    return [out, lse, *torch.autograd.grad(loss, packed)]


@pytest.mark.parametrize("varlen", [False, True])
def test_tensors_in_one(varlen):
    if varlen:
        qkv, q, kv = (torch.randn(sum(n), *s, 8) for n, s in ((ROWS, (3, 4)), (ROWS, (4,)), (KEYS, (2, 2))))
        functions = [getattr(compat, f"flash_attn_varlen_{kind}func") for kind in ("qkvpacked_", "kvpacked_", "")]
        rows = offsets(ROWS), torch.tensor(max(ROWS))
        rests = rows, (rows[0], offsets(KEYS), rows[1], max(KEYS)), (rows[0], rows[0], *rows[1:] * 2)
    else:
        qkv, q, kv = (torch.randn(2, *s, 8) for s in ((5, 3, 4), (5, 4), (7, 2, 2)))
        functions = [getattr(compat, f"flash_attn_{kind}func") for kind in ("qkvpacked_", "kvpacked_", "")]
        rests = (), (), ()
    out, lse, grad = together(functions[0], [qkv], *rests[0])
    *want, dq, dk, dv = together(functions[2], qkv.unbind(-3), *rests[2])
    same((out, lse, grad), (*want, torch.stack([dq, dk, dv], -3)))
    out, lse, *grads = together(functions[1], [q, kv], *rests[1])
    *want, dq, dk, dv = together(functions[2], [q, *kv.unbind(-3)], *rests[1])
    same((out, lse, *grads), (*want, dq, torch.stack([dk, dv], -3)))


ROWS, KEYS = (3, 0, 5, 1, 2), (4, 2, 3, 0, 2)
PACKED = dict(B=5, Hq=4, Hkv=2, Sq=5, Sk=4)
VARLEN = [
    Case("plain", **PACKED),
    Case("causal", causal=True, dtype=torch.bfloat16, **PACKED),
    Case("window", window=(1, 2), **PACKED),
    Case("causal window", causal=True, window=(1, 1), softcap=2.0, scale=0.5, **PACKED),
    Case("slopes", alibi="shared", causal=True, **PACKED),
    Case("slopes of each", alibi="own", **PACKED),
]


def check_varlen(case, device, backend):
    attend = flash_packed(SimpleNamespace(lengths=(ROWS, KEYS), Sq=5, Sk=4))
    with fa.use_backend(backend):
        assert_case(case, device, attend, lengths=(ROWS, KEYS))


@pytest.mark.parametrize("case", VARLEN, ids=lambda case: case.name)
def test_sequences_of_unequal_lengths(case):
    check_varlen(case, "cpu", None)


def test_sequences_on_kernels(device, poison):
    check_varlen(VARLEN[-2], device, "triton")


def in_pages(page, *tensors):
    """Return (pools, table): the packed keys of each tensor in shuffled pages, with NaN in unused places."""
    most = -(-max(KEYS) // page) + 1
    table = torch.randperm(len(KEYS) * most).view(len(KEYS), most)
    places = [torch.stack([own.repeat_interleave(page), torch.arange(page).repeat(most)])[:, :n]
              for own, n in zip(table, KEYS, strict=True)]  # fmt: skip
    pools = [x.new_full((table.numel(), page, *x.shape[1:]), math.nan) for x in tensors]
    return [pool.index_put(tuple(torch.cat(places, 1)), x) for pool, x in zip(pools, tensors, strict=True)], table.int()


@pytest.mark.parametrize("page", [256, 3])
@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.one_in(3)
def test_packed_sequences_of_keys_in_pages(page, traced):
    """Paged keys give the results and gradients of packed keys, also in a graph, which cannot read lengths."""
    sizes = (ROWS, 4), (KEYS, 2), (KEYS, 2)
    tensors = leaves(*(torch.randn(sum(n), h, 8, dtype=torch.float64) for n, h in sizes))
    rest = offsets(ROWS), offsets(KEYS), max(ROWS), max(KEYS)
    options = dict(causal=True, window_size=(1, 1), softcap=2.0, alibi_slopes=torch.rand(5, 4), return_attn_probs=True)
    want = compat.flash_attn_varlen_func(*tensors, *rest, **options)
    attend = compat.flash_attn_varlen_func
    if traced:
        attend = torch.compile(attend, fullgraph=True, backend="eager")
    pools, table = in_pages(page, *tensors[1:])
    found = attend(tensors[0], *pools, *rest, **options, block_table=table)
    one, own = KEYS.index(max(KEYS)), slice(0, -(-max(KEYS) // page))
    few = [pool[table[one, own].long()] for pool in pools]  # all sequences share the pages of the longest
    shared = dict(block_table=torch.arange(own.stop, dtype=torch.int32).expand(len(KEYS), -1))
    ours, eager = (f(tensors[0], *few, *rest, **options, **shared)[0] for f in (attend, compat.flash_attn_varlen_func))
    torch.testing.assert_close(ours, eager)
    results = [
        (out, lse, *torch.autograd.grad(out.sin().sum() + lse.exp().sum(), tensors)) for out, lse, _ in (found, want)
    ]
    for ours, packed in zip(*results, strict=True):
        torch.testing.assert_close(ours, packed, rtol=0, atol=1e-12)


def test_deterministic_is_of_one_call(device):
    q, k, v = (torch.randn(1, 40, 2, 16, device=device, requires_grad=True) for _ in range(3))
    packed, offset = [x.detach()[0].requires_grad_() for x in (q, k, v)], offsets([15, 25], device)
    calls = (
        (functools.partial(compat.flash_attn_func, q, k, v), (q, k, v)),
        (functools.partial(compat.flash_attn_varlen_func, *packed, offset, offset, 25, 25), packed),
    )
    with fa.use_backend("triton"):
        for call, inputs in calls:
            outs = [call(deterministic=wanted) for wanted in (True, False, True)]
            grads = [torch.autograd.grad(out.square().sum(), inputs) for out in outs]
            same(grads[0], grads[2])
            close = [torch.allclose(x, y, atol=1e-4) for x, y in zip(*grads[:2], strict=True)]
            assert all(close) and (device != "cpu" or not all(map(torch.equal, *grads[:2])))
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(("dtype", "other"), [(torch.float16, torch.bfloat16), (torch.bfloat16, torch.float16)])
def test_autocast_leaves_half_precision_as_it_is(dtype, other):
    q, k, v = (torch.randn(2, 5, 2, 8).to(dtype) for _ in range(3))
    cos = torch.randn(9, 4)
    calls = (
        lambda: compat.flash_attn_func(q, k, v),
        lambda: compat.flash_attn_varlen_func(*(x.flatten(0, 1) for x in (q, k, v)), *[offsets([5, 5])] * 2, 5, 5),
        lambda: compat.flash_attn_with_kvcache(q, k.clone(), v.clone(), cache_seqlens=4),
        lambda: compat.flash_attn_with_kvcache(q, k.clone(), v.clone(), k[:, :1], v[:, :1], cos, cos, cache_seqlens=4),
    )
    for call in calls:
        want = call()
        with torch.autocast("cpu", other):
            got = call()
        assert got.dtype == dtype and torch.equal(got, want)
