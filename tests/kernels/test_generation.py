"""Tests attention to a cache against a loop over the sequences."""

import pytest
import torch

import fusedattn as fa
from fusedattn.testing.tolerance import verdicts

from .. import caches, sample
from ..caches import Cached, bits
from ..close import assert_ok


def check(case, device, backend):
    """Check the results of a case, and that only the cache rows of new keys changed."""
    if case.dtype == torch.float64 and device == "cuda":
        case = case._replace(dtype=torch.float16)
    found, eager, oracle = caches.computed(case.draw(device), backend)
    assert_ok(verdicts(found, eager, oracle))


CASES = sample.named([*caches.SINGLE, *caches.EDGES, caches.EVERYTHING])
CASES += sample.one_in(51, sample.named(caches.WIDE))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.one_in(4)
def test_a_call_is_as_good_as_eager(case, device, poison):
    check(case, device, "triton")


@pytest.mark.parametrize("case", sample.one_in(4, CASES))
def test_a_naive_call_is_as_good_as_eager(case, device):
    check(case, device, "naive")


@pytest.mark.matrix
@pytest.mark.parametrize("case", caches.PAIRS, ids=lambda case: case.name)
def test_pairs_of_options(case, device, backend, poison, tiles):
    tiles.splits(1)
    check(case, device, backend)


@pytest.mark.parametrize("page", [None, 4, 16])
def test_memory_past_a_length_changes_no_bit(page, device, backend):
    case = Cached("beyond", page=page, new=2, Sq=2, sinks=True, dtype=torch.float16, lengths=(0, 17), Hq=2)
    arguments = case.draw(device)
    clean = {name: arguments[name].nan_to_num(0.0).clone() for name in ("key_cache", "value_cache")}
    got, want = (
        fa.attention_decode(**{**arguments, **changed}, return_lse=True, return_weights=True, backend=backend)
        for changed in ({}, clean)
    )
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert all(x.isfinite().all() for x in got)


def test_results_lie_as_the_query_does(device, backend, tiles):
    tiles.splits(1)
    arguments = Cached("order", Sq=2, lengths=(5, 20)).draw(device)
    for axes in ((0, 1, 2, 3), (0, 2, 1, 3), (1, 2, 0, 3)):
        query = arguments["query"].permute(axes).contiguous().permute([axes.index(axis) for axis in range(4)])
        out = fa.attention_decode(**{**arguments, "query": query}, backend=backend)
        assert out.stride() == query.stride()
        weights = fa.attention_decode(**{**arguments, "query": query}, return_weights=True, backend=backend)
        assert torch.equal(weights[0], out) and weights[1].shape == (2, 4, 2, 48)


ZEROS = dict(B=0), dict(Sq=0), dict(C=0), dict(Hq=0, Hkv=0), dict(page=0), dict(pages=0), dict(n=0)


@pytest.mark.parametrize("shape, sink", sample.checkered(ZEROS, [False, True]))
def test_sizes_of_zero(shape, sink, device, backend, poison):
    sizes = dict(B=2, Sq=2, C=3, Hq=2, Hkv=1, page=None, pages=3, n=2) | shape
    B, Sq, Hq, Hkv = (sizes[name] for name in ("B", "Sq", "Hq", "Hkv"))
    paged = shape.keys() & {"page", "pages", "n"}
    page = 2 if sizes["page"] is None else 0
    rows = (sizes["pages"], Hkv, page) if paged else (B, Hkv, sizes["C"])
    pool = [torch.randn(*rows, d, device=device) for d in (4, 8)]
    given = dict(cache_seqlens=torch.zeros(B, dtype=torch.int32, device=device))
    if paged:
        given["block_table"] = torch.zeros(B, sizes["n"], dtype=torch.int32, device=device)
    if sink:
        given["sinks"] = torch.ones(Hq, device=device)
    query = torch.randn(B, Hq, Sq, 4, device=device)
    both = dict(return_lse=True, return_weights=True)
    out, lse, weights = fa.attention_decode(query, *pool, **given, **both, backend=backend)
    assert out.shape == (B, Hq, Sq, 8) and lse.shape == (B, Hq, Sq)
    assert weights.shape == (B, Hq, Sq, sizes["n"] * page if paged else sizes["C"])
    assert not out.any() and not weights.any() and (lse == (1.0 if sink else float("-inf"))).all()
    nothing = [torch.randn(B, Hkv, 0, d, device=device) for d in (4, 8)]
    again = fa.attention_decode(query, *pool, **given, new_key=nothing[0], new_value=nothing[1], backend=backend)
    assert torch.equal(again, out)


def test_autocast_casts_the_query_alone(device, backend):
    arguments = Cached("autocast", dtype=torch.bfloat16, new=1).draw(device)
    with torch.autocast(device, torch.bfloat16):
        got = fa.attention_decode(**{**arguments, "query": arguments["query"].float()}, backend=backend)
        with pytest.raises(TypeError, match="key_cache: expected .* torch.bfloat16"):
            fa.attention_decode(**{**arguments, "key_cache": arguments["key_cache"].float()}, backend=backend)
    assert got.dtype == torch.bfloat16 and torch.equal(got, fa.attention_decode(**arguments, backend=backend))


@pytest.mark.parametrize("page", [None, 12])
@pytest.mark.one_in(3)
def test_a_write_to_a_cache_is_seen_by_autograd(page, device, backend):
    arguments = Cached("written", new=1, page=page).draw(device)
    cache = arguments["key_cache"]
    grows = torch.randn(1, device=device, requires_grad=True)
    total = (grows * cache.nan_to_num()).sum() + (grows * cache).nansum()
    with torch.no_grad():
        fa.attention_decode(**arguments, backend=backend)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


def test_only_a_hidden_row_may_stand_before_every_key(device, backend):
    arguments = Cached("early", Sq=2, lengths=(1, 30), half=4).draw(device)
    if device == "cpu":  # values on a GPU are not checked
        with pytest.raises(ValueError, match="^query: expected "):
            fa.attention_decode(**arguments, backend=backend)
    hidden = torch.tensor([[False, True], [True, True]], device=device)
    out = fa.attention_decode(**arguments, query_mask=hidden, backend=backend)
    assert out.isfinite().all() and not out[0, :, 0].any()


def test_a_table_without_pages_takes_no_new_keys(device, backend, unchecked):
    arguments = Cached("no pages", new=2, page=12).draw(device)
    before = bits(arguments["key_cache"]).clone()
    arguments["block_table"] = arguments["block_table"][:, :0]
    assert not fa.attention_decode(**arguments, backend=backend).any()
    assert torch.equal(bits(arguments["key_cache"]), before)
