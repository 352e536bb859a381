"""Tests of caches that need a GPU: real sizes, each tile, graphs, no synchronisation, far addresses."""

import pytest
import torch

pytest.importorskip("triton", reason="kernels need Triton")

import fusedattn as fa
from fusedattn.testing.tolerance import verdicts

from ..caches import EVERYTHING, Cached, computed
from ..close import assert_ok
from .test_generation import check
from .test_gpu import CAPABILITIES, captured

pytestmark = pytest.mark.gpu
DIMS = (16, 40, 64, 80, 128, 160, 256, 512)


def filled(device, batch=3, heads=8, kv_heads=2, rows=1, keys=3000, dim=128, dtype=torch.bfloat16, page=None):
    """Return the arguments of a call. Caches are random, with NaN after each length."""
    query = torch.randn(batch, heads, rows, dim, device=device, dtype=dtype)
    lengths = torch.tensor([keys, 1, *(keys * n // batch for n in range(1, batch - 1))], device=device).int()
    pages = -(-keys // (page or keys))
    held = torch.randn(2, batch, kv_heads, pages * (page or keys), dim, device=device).to(dtype)
    held.masked_fill_(torch.arange(held.shape[3], device=device)[:, None] >= lengths[:, None, None, None], float("nan"))
    arguments = dict(query=query, cache_seqlens=lengths)
    if page is None:
        return arguments | dict(key_cache=held[0], value_cache=held[1])
    table = torch.randperm(batch * pages, device=device).view(batch, pages).int()
    pool = torch.empty_like(held).view(2, batch * pages, kv_heads, page, dim)
    pool[:, table.flatten().long()] = held.unflatten(3, (pages, page)).transpose(2, 3).flatten(1, 2)
    return arguments | dict(key_cache=pool[0], value_cache=pool[1], block_table=table)


def judged(arguments, **options):
    """Check a call with a cache against the tolerance, one sequence after the other."""
    results = computed(arguments | options, "triton", need_weights=False)
    for b in range(arguments["query"].shape[0]):
        assert_ok(verdicts(*({name: x[name][b : b + 1] for name in ("out", "lse")} for x in results)))


@pytest.mark.parametrize("number", range(2 * len(DIMS)), ids=lambda number: f"D {DIMS[number // 2]}, {number % 2}")
def test_head_dimensions(number, cuda, poison):
    dtype = (torch.bfloat16, torch.float16, torch.float32)[number // 2 % 3]
    judged(filled(cuda, dim=DIMS[number // 2], dtype=dtype, page=(None, 16, 256, 48)[(number + number // 4 * 2) % 4]))


@pytest.mark.parametrize("kv_heads", [1, 2, 8])
@pytest.mark.parametrize("rows", [1, 4, 17, 200])
def test_rows_and_groups(rows, kv_heads, cuda, poison):
    judged(filled(cuda, kv_heads=kv_heads, rows=rows, page=64), causal=True)
    judged(filled(cuda, kv_heads=kv_heads, rows=rows), window=(700, 0), softcap=5.0)


@pytest.mark.parametrize("place", range(2))
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("dim", [64, 128, 256, 512])
def test_every_tile_of_the_table(dim, dtype, capability, place, cuda, tiles):
    tiles.choose(lambda found: found[min(place, len(found) - 1) :], capability)
    for rows in (2, 7, 16):
        judged(filled(cuda, rows=rows, dim=dim, dtype=dtype, page=64), causal=True)
    if capability is None:
        check(EVERYTHING._replace(D=dim, Dv=dim, dtype=dtype), cuda, "triton")


@pytest.mark.parametrize("page", [None, 16])
def test_a_graph_replays_with_other_lengths(page, cuda):
    """A CUDA graph that appends, rotates and attends is right in each replay, until the caches are full."""
    case = Cached("graph", page=page, new=1, half=4, causal=True, lengths=(0, 3, 20), sinks=True, dtype=torch.float16)
    held, eager = case.draw(cuda), case.draw(cuda)
    angles = torch.rand(2, 48, 4, device=cuda)
    for arguments in (held, eager):
        arguments |= dict(rotary_cos=angles[0], rotary_sin=angles[1])
        if page:
            arguments["block_table"].copy_(torch.arange(9, device=cuda).view(3, 3))
        for name in ("key_cache", "value_cache"):
            arguments[name].copy_(arguments[name].nan_to_num(1.0))
    with torch.cuda.stream(torch.cuda.Stream()):
        fa.attention_decode(**{k: x.clone() if torch.is_tensor(x) else x for k, x in held.items()}, backend="triton")
    graph, (out, lse) = captured(lambda: fa.attention_decode(**held, return_lse=True, backend="triton"), warm=False)
    for _ in range(30):  # in the last two replays one cache is full
        new = torch.randn(case.Hkv * 2 + case.Hq, 3, 16, device=cuda, dtype=torch.float16)
        for arguments in (held, eager):
            arguments["query"].copy_(new[: case.Hq].transpose(0, 1)[:, :, None])
            arguments["new_key"].copy_(new[case.Hq : case.Hq + case.Hkv].transpose(0, 1)[:, :, None])
            arguments["new_value"].copy_(new[case.Hq + case.Hkv :].transpose(0, 1)[:, :, None])
        graph.replay()
        want = fa.attention_decode(**eager, return_lse=True, backend="triton")
        assert torch.equal(out, want[0]) and torch.equal(lse, want[1])
        for name in ("key_cache", "value_cache"):
            assert torch.equal(held[name], eager[name])
        for arguments in (held, eager):
            arguments["cache_seqlens"] += 1
    assert held["cache_seqlens"].tolist() == [30, 33, 50]


def test_nothing_is_fetched(cuda):
    case = EVERYTHING._replace(new=2)
    fa.attention_decode(**case.draw(cuda), backend="triton")
    arguments = case.draw(cuda)
    torch.cuda.set_sync_debug_mode("error")
    try:
        fa.attention_decode(**arguments, backend="triton", return_lse=True, return_weights=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_many_runs_give_the_same_bits(cuda):
    arguments = filled(cuda, batch=4, keys=20000, page=64)
    first = fa.attention_decode(**arguments, return_lse=True, backend="triton")
    for _ in range(200):
        again = fa.attention_decode(**arguments, return_lse=True, backend="triton")
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("page", [None, 64])
def test_a_pool_beyond_two_to_the_31(page, cuda):
    arguments, buffers = filled(cuda, batch=2, keys=2**17, page=page), []
    judged(arguments)
    near_by = fa.attention_decode(**arguments, backend="triton")
    for name in ("key_cache", "value_cache"):  # the last page or sequence begins past 2**31 elements
        near = arguments[name]
        step = 2**31 // (near.shape[0] - 1) + 2**12
        buffers.append(torch.full((near.shape[0] * step,), float("nan"), dtype=near.dtype, device=cuda))
        far = buffers[-1].as_strided(near.shape, (step, *near.contiguous().stride()[1:]))
        arguments[name] = far.copy_(near)
    assert torch.equal(fa.attention_decode(**arguments, backend="triton"), near_by)
    new = torch.randn(2, 2, 1, 128, device=cuda, dtype=torch.bfloat16)
    arguments["cache_seqlens"] -= 1
    out = fa.attention_decode(**arguments, new_key=new, new_value=new, backend="triton")
    want = fa.attention_decode(**{**arguments, "cache_seqlens": arguments["cache_seqlens"] + 1}, backend="triton")
    assert torch.equal(out, want) and out.isfinite().all()
