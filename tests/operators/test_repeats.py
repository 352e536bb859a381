"""Tests that operators repeat the launches of an earlier call, and prepare those of other calls anew."""

import contextlib
import copy
import functools

import pytest
import torch

import fusedattn as fa

from ..caches import Cached
from ..close import assert_like
from ..inside import OPTIONS, SK, SQ, Seen, by, draw, learned
from ..sequences import draw_packed, offsets

graph = torch.compile(lambda *inputs, **options: fa.attention(*inputs, **options), backend="aot_eager", fullgraph=True)


def of_attention(attend, name, device):
    inputs, options = draw(device, requires_grad=True), OPTIONS[name](SQ, SK, device)

    def results(backend):
        function = by("eager") if backend == "eager" else functools.partial(attend, backend=backend)
        with torch.autocast(device, enabled=attend is not graph):
            out, lse = function(*inputs, **options, return_lse=True)
            total = out.float().sin().sum() + lse.nan_to_num(0, 0, 0).sin().sum()
        return out, lse, *torch.autograd.grad(total, [*inputs, *learned(options)])

    return results


def of_sequences(rows, apart, device):
    *inputs, incoming = draw_packed(rows, (7, 3, 20), device)
    starts, ends = offsets(rows, device), offsets((7, 3, 20), device)
    starts = torch.stack([starts, starts + 1], 1)[:, 0] if apart else starts

    def results(backend):
        backend = "naive" if backend == "eager" else backend
        most = int(torch.randint(99, 999, ()))  # calls without masks do not need it: it selects no launch
        out = fa.attention_varlen(*inputs, starts, ends, max_seqlen_q=most, causal=True, backend=backend)
        return out, *torch.autograd.grad(out, inputs, incoming)

    return results


def of_caches(return_lse, device, by_operator=False, **fields):
    case = Cached("repeated", **dict(half=3, new=1) | fields)
    arguments = case.draw(device, seed=int(torch.randint(99, ())))

    def results(backend):
        backend, own = "naive" if backend == "eager" else backend, copy.deepcopy(arguments)
        with Seen() if by_operator else contextlib.nullcontext():
            found = fa.attention_decode(**own, return_lse=return_lse, backend=backend)
        return found, own["key_cache"].nan_to_num()

    return results


CALLS = {f"in a graph, {name}": functools.partial(of_attention, graph, name) for name in OPTIONS if name != "added"}
CALLS |= {"under autocast, causal": functools.partial(of_attention, fa.attention, "causal")}
CALLS |= {"sequences": functools.partial(of_sequences, (5, 0, 12), False)}
CALLS |= {"caches": functools.partial(of_caches, True), "pages": functools.partial(of_caches, False, page=8)}
CALLS |= {"shared caches": functools.partial(of_caches, True, shared=True, new=0, D=24)}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.one_in(3)
def test_launches_are_repeated_for_other_tensors(name, device, poison, launched, record_after):
    record_after(2)
    for again in range(3):
        results = CALLS[name](device)
        launched.clear()
        assert_like(results("triton"), results, "eager")
        assert bool(launched) == (again < 2)


@pytest.mark.parametrize("D, Dv", [(8, 24), (20, 24), (24, 20)])
def test_caches_that_begin_at_one_address(D, Dv, device):
    """Values are read from memory if they have more columns than the keys."""
    both = torch.randn(2, 2, 40, 32, device=device)
    arguments = dict(key_cache=both[..., :D], value_cache=both[..., :Dv], cache_seqlens=offsets([5], device)[[1, 1]])
    arguments |= dict(query=torch.randn(2, 4, 1, D, device=device))
    for _ in range(2):
        got = fa.attention_decode(**arguments, backend="triton")
        assert_like(got, lambda: fa.attention_decode(**arguments, backend="naive"))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, Seen])
def test_offsets_apart_in_memory(mode, device):
    """A call copies such offsets, which a replay would lack. In some modes torch calls that copy a view."""
    for rows in ((5, 0, 12), (6, 5, 6), (12, 4, 1)):
        inputs, starts = [torch.randn(17, 2, 8, device=device) for _ in range(3)], offsets(rows, device)
        apart = torch.stack([starts, starts + 1], 1)[:, 0]
        with mode():
            got = fa.attention_varlen(*inputs, apart, apart, backend="triton")
        assert_like(got, lambda *x: fa.reference.attention_varlen(*x, starts, starts), *inputs)  # noqa: B023


def test_other_calls_are_prepared_anew(device, poison, record_after):
    """Other strides, lengths, dtypes, results, rotations and settings of a call are not those that are known."""
    record_after(1)
    for results in (
        *(of_sequences(rows, apart, device) for apart in (False, True) for rows in ((5, 0, 12), (6, 5, 6), (5, 0, 30))),
        *(of_caches(lse, device, shared=shared, new=0) for shared in (False, True) for lse in (False, True)),
        of_caches(True, device, shared=True, new=0, Dv=8),
        *(of_caches(True, device, interleaved=interleaved) for interleaved in (False, True)),
        *(of_caches(True, device, by_operator=True, half=0, new=new) for new in (1, 0, 2)),
        *(of_caches(True, device, dtype=dtype) for dtype in (torch.bfloat16, torch.float16)),
        *(of_attention(graph, name, device) for name in ("plain", "scale", "added", "plain")),
    ):
        assert_like(results("triton"), results, "eager")
