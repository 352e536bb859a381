"""Tests torch.vmap of empty batches, of packed sequences with sinks, and of caches that are written in place."""

import functools

import pytest
import torch
from torch.utils._pytree import tree_leaves

import fusedattn as fa

from ..close import assert_like
from ..inside import same
from ..sequences import offsets

MODES = {
    "forward": lambda f: f,
    "gradient": lambda f: torch.func.grad(lambda *x: f(*x).sin().sum(), argnums=(0, 1)),
    "tangent": lambda f: lambda *x: torch.func.jvp(f, x, x)[1],
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("backend", ["triton", "cpu", "naive"])
def test_no_calls_have_results_of_the_right_shape(backend, packed, mode, device):
    cu = offsets((2, 3), device)

    def attend(query, key):
        if packed:
            return fa.attention_varlen(query, key, key, cu, cu, max_seqlen_q=3, max_seqlen_k=3, backend=backend)
        return fa.attention(query, key, key, backend=backend)

    one = torch.randn((5, 2, 16) if packed else (1, 2, 5, 16), device=device)
    none = one.expand(0, *one.shape)
    got, want = torch.vmap(MODES[mode](attend))(none, none), MODES[mode](attend)(one, one)
    got, want = (x if isinstance(x, tuple) else (x,) for x in (got, want))
    assert [x.shape for x in got] == [(0, *x.shape) for x in want]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dims", [(0, None), (None, 0), (0, 0)], ids=str)
@pytest.mark.parametrize(
    ("backend", "lengths"), [("triton", (2, 3)), ("cpu", (2, 3)), ("naive", (2, 3)), ("naive", (1, 200, 2))]
)
def test_sinks_of_packed_sequences(backend, lengths, dims, mode, device):
    cu = offsets(lengths, device)

    def attend(query, sinks, backend=backend):
        return fa.attention_varlen(query, query, query, cu, cu, sinks=sinks, backend=backend)

    def one_by_one(*given):
        each = [[x if dim is None else x[n] for x, dim in zip(given, dims, strict=True)] for n in range(2)]
        found = [tree_leaves(MODES[mode](functools.partial(attend, backend="naive"))(*x)) for x in each]
        return [torch.stack(x) for x in zip(*found, strict=True)]

    many = torch.randn(2, sum(lengths), 2, 16, device=device), torch.randn(2, 2, device=device)
    given = [x[0] if dim is None else x for x, dim in zip(many, dims, strict=True)]
    assert_like(torch.vmap(MODES[mode](attend), dims)(*given), one_by_one, *given)


@pytest.mark.parametrize("slopes", [False, True])
@pytest.mark.parametrize("backend", ["triton", "cpu", "naive"])
def test_the_gradient_of_value_alone_from_the_lse_as_well(backend, slopes, device):
    query, key, value = (torch.randn(2, 1, 2, 5, 16, device=device) for _ in range(3))
    slopes = slopes and backend != "cpu"
    options = dict(alibi_slopes=torch.rand(2, device=device), dropout_p=0.3, seed=3) if slopes else {}
    value.requires_grad_()

    def attend(query, key, value):
        return fa.attention(query, key, value, return_lse=True, backend=backend, **options)

    out, lse = torch.vmap(attend)(query, key, value)
    want = torch.autograd.grad(out.sum(), value, retain_graph=True)
    same(torch.autograd.grad(out.sum() + lse.sum(), value), want)


def test_caches_that_are_written_to():
    key, value, new = torch.randn(2, 2, 2, 8, 4), torch.randn(2, 2, 2, 8, 4), torch.randn(2, 2, 2, 1, 4)
    lengths = torch.tensor([3, 5], dtype=torch.int32)

    def attend(key, value, new):
        more = dict(new_key=new, new_value=new, backend="naive")
        return fa.attention_decode(new, key, value, cache_seqlens=lengths, **more)

    one_by_one = key.clone(), value.clone()
    want = torch.stack([attend(*x) for x in zip(*one_by_one, new, strict=True)])
    assert_like([torch.vmap(attend)(key, value, new), key, value], [x.double() for x in (want, *one_by_one)])


@pytest.mark.parametrize("backend", [None, "naive"])
def test_tables_of_pages(backend):
    pages, query = torch.randn(4, 2, 8, 4), torch.randn(1, 2, 3, 4)
    tables = torch.tensor([[[0, 1]], [[3, 2]]], dtype=torch.int32)
    options = dict(cache_seqlens=torch.tensor([11], dtype=torch.int32), backend=backend)
    attend = lambda q, p, table: fa.attention_decode(q, p, p, block_table=table, **options)  # noqa: E731
    want = lambda *x: torch.stack([attend(*x[:2], table) for table in x[2]])  # noqa: E731
    assert_like(torch.vmap(attend, (None, None, 0))(query, pages, tables), want, query, pages, tables)


def test_what_cannot_be_mapped_over_is_named(device):
    query, new = torch.randn(3, 1, 2, 1, 16, device=device), torch.randn(3, 1, 2, 1, 16, device=device)
    cache = torch.randn(1, 2, 5, 16, device=device)
    lengths = torch.full((1,), 3, dtype=torch.int32, device=device)

    def decode(query, new, backend=None):
        options = dict(cache_seqlens=lengths, new_key=new, new_value=new, backend=backend)
        return fa.attention_decode(query, cache + 0 * new, cache + 0 * new, **options)

    with pytest.raises(NotImplementedError, match="vmap .* new_key"):
        torch.vmap(lambda query, new: decode(query, new, "triton"))(query, new)
    got = torch.vmap(lambda query, new: decode(query, new, None if device == "cpu" else "naive"))(query, new)
    assert_like(got, torch.stack([decode(*x, "naive") for x in zip(query, new, strict=True)]).double())

    key_mask, starts = torch.ones(3, 5, dtype=torch.bool, device=device), torch.stack([offsets((2, 3), device)] * 3)
    x = torch.randn(3, 5, 2, 16, device=device)
    attend = lambda x, starts, mask: fa.attention_varlen(x, x, x, starts, starts, key_mask=mask)  # noqa: E731
    with pytest.raises(ValueError, match="max_seqlen_.: expected an int"):
        torch.vmap(attend)(x, starts, key_mask)
    if device == "cpu":  # nobody reads offsets on a GPU
        with pytest.raises(ValueError, match="^cu_seqlens_q: .* 0 to 5"):
            torch.vmap(lambda x, starts: fa.attention_varlen(x, x, x, starts, starts))(x, starts.clamp(max=4))
