"""Tests of packed sequences on a GPU: real sizes, graphs, and no synchronisation."""

import random

import pytest
import torch

import fusedattn as fa

from .. import sample
from ..cases import Case
from ..close import assert_case
from ..sequences import attention_varlen, draw_packed, offsets
from .test_gpu import HALF, LARGE, captured

pytestmark = pytest.mark.gpu
CALLS = {"plain": {}, "causal": dict(causal=True), "window": dict(window=(100, 50)), **LARGE}


def draw(lengths, cuda, dim=64):
    """Return random query, key, value, gradient of the output, and cu_seqlens."""
    return *draw_packed(lengths, lengths, cuda, dims=(dim, dim), dtype=torch.bfloat16), offsets(lengths, cuda)


@pytest.mark.parametrize("name, dim", sample.checkered(CALLS, [64, 128]))
def test_options_in_many_tiles(name, dim, cuda, poison):
    rows, keys = (457, 0, 130, 1, 256), (333, 12, 571, 0, 256)
    sizes = dict(B=5, Hq=4, Hkv=2, Sq=457, Sk=571, D=dim, Dv=dim, dtype=HALF[len(name) % 2])
    case = Case(name)._replace(**sizes, **CALLS[name])
    for backend in ("triton", None):  # None: on compute capability 9.0 the Hopper kernels, if they support the options
        assert_case(case, cuda, attention_varlen(rows, keys, backend), lengths=(rows, keys))


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_same_bits_each_time(deterministic, cuda, passes):
    """Repeated calls have equal bits in any order of programs; only without determinism dq may depend on the order."""
    passes(1 + deterministic)
    generator = random.Random(3)
    lengths = [generator.randint(1, 700) for _ in range(40)]
    query, key, value, grad, cu = draw(lengths, cuda, dim=128)
    before = None
    for _ in range(20):
        out = fa.attention_varlen(query, key, value, cu, cu, causal=True)
        dq, dk, dv = torch.autograd.grad(out, (query, key, value), grad)
        now = (out, dk, dv, dq) if deterministic else (out, dk, dv)
        assert before is None or all(map(torch.equal, now, before))
        before = now


def test_the_host_does_not_wait(cuda):
    query, key, value, grad, cu = draw((100, 30), cuda)
    sinks = torch.randn(4, device=cuda, requires_grad=True)
    slopes = torch.rand(2, 4, device=cuda, requires_grad=True)
    mask = torch.rand(2, 1, 100, 100, device=cuda) < 0.5
    calls = (
        dict(causal=True),
        dict(sinks=sinks, alibi_slopes=slopes),
        dict(mask=mask, key_mask=mask[0, 0, 0].new_ones(130), max_seqlen_q=100, max_seqlen_k=100, return_weights=True),
    )

    def run(options):
        out = fa.attention_varlen(query, key, value, cu, cu, **options)
        out = out[0] if isinstance(out, tuple) else out
        learned = [options[name] for name in ("sinks", "alibi_slopes") if name in options]
        torch.autograd.grad(out, (query, key, value, *learned), grad)

    for options in calls:
        run(options)  # the first call compiles, and may synchronise
        torch.cuda.set_sync_debug_mode("error")
        try:
            run(options)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_a_graph_is_replayed_with_other_lengths(cuda):
    query, key, value, _, cu = draw((300, 100), cuda)
    query, key, value = (x.detach() for x in (query, key, value))

    def run():
        return fa.attention_varlen(query, key, value, cu, cu, causal=True)

    graph, out = captured(run)
    for lengths in ((300, 100), (1, 399), (400, 0), (200, 200)):
        cu.copy_(offsets(lengths, cuda))
        graph.replay()
        assert torch.equal(out, run())
