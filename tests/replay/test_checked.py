"""Calls to caches and of packed sequences on a CPU that are like an earlier one: what may differ is looked at again."""

import functools
import gc
import itertools
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fusedattn as fa
from fusedattn.replay import cache

from ..close import assert_like


@pytest.fixture
def recalled(monkeypatch):
    """Whether each call was like an earlier one."""
    answers, recall = [], cache.recall

    def watched(*arguments):
        known = recall(*arguments)
        answers.append(known is not None)
        return known

    monkeypatch.setattr(cache, "recall", watched)
    return answers


def hold(function, *given, **options):
    assert_like(function(*given, **options), lambda: function(*given, **options, backend="naive"))


def caches(capacity=40):
    return [torch.randn(3, 2, capacity, 16) for _ in range(2)]


def decoded(lengths, *, new=0, rows=1, backend=None, **options):
    """(results of a decode, the caches afterwards), of numbers that the seed draws."""
    torch.manual_seed(7)
    query, both = torch.randn(3, 4, rows, 16), caches()
    if new:
        options |= dict(new_key=torch.randn(3, 2, new, 16), new_value=torch.randn(3, 2, new, 16))
    lengths = torch.tensor(lengths, dtype=torch.int32)
    results = fa.attention_decode(query, *both, cache_seqlens=lengths, backend=backend, **options)
    return [*(results if isinstance(results, tuple) else (results,)), *both]


@pytest.mark.parametrize("new", [0, 2])
def test_other_lengths(new, recalled):
    for lengths in ((5, 5, 5), (1, 38, 7), (38, 38, 38), (0, 0, 9), (3, 3, 8), (0, 0, 0)):
        hold(decoded, lengths, new=new, rows=max(new, 1))
    assert recalled[::3] == [False, True, True, True, True, True]


DIFFERENT = [
    dict(scale=0.3),
    dict(scale=0.5),
    dict(causal=True),
    dict(window=(4, 0)),
    dict(window=(9, 0)),
    dict(return_lse=True),
    dict(key_mask=torch.arange(40) % 3 > 0),
    dict(sinks=torch.tensor([0.0, 1.0, -1.0, 0.5])),
    dict(rotary_cos=torch.ones(40, 4), rotary_sin=torch.zeros(40, 4)),
]


def test_caches_with_other_options():
    for _ in range(2):
        for lengths, options in itertools.product(((5, 17, 40), (17, 17, 17)), ({}, *DIFFERENT)):
            hold(decoded, lengths, **options)
    plain, *others = (decoded((5, 17, 40), **options)[0] for options in ({}, *DIFFERENT[:5]))
    assert not any(torch.equal(plain, x) for x in others[:2])


def test_lengths_are_looked_at_each_time():
    for _ in range(3):
        decoded((5, 5, 5), new=1)
        for lengths in ((5, 41, 5), (5, -1, 5)):
            with pytest.raises(ValueError, match="cache_seqlens: expected lengths from 0 to the capacity, 40"):
                decoded(lengths, new=1)
        with pytest.raises(ValueError, match="new_key: expected at most 0 rows"):
            decoded((5, 40, 5), new=1)


def varlen(lengths, total=90, *, backend=None, requires_grad=False, **options):
    """The results of packed sequences of numbers that the seed draws, and their gradients."""
    torch.manual_seed(7)
    tensors = [torch.randn(total, 2, 16, requires_grad=requires_grad) for _ in range(3)]
    cu = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    results = fa.attention_varlen(*tensors, cu, cu, backend=backend, **options)
    results = results if isinstance(results, tuple) else (results,)
    grads = torch.autograd.grad(results[0].square().sum(), tensors) if requires_grad else ()
    return [*results, *grads]


LENGTHS = (30, 30, 30), (1, 80, 9), (0, 90, 0), (90, 0, 0), (45, 0, 45)


@pytest.mark.parametrize("longest", [{}, dict(max_seqlen_q=90, max_seqlen_k=90)], ids=["read", "given"])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_other_offsets(longest, requires_grad):
    for lengths in LENGTHS:
        more = dict(requires_grad=requires_grad, causal=True, **longest)
        hold(varlen, lengths, **more)


def test_packed_sequences_with_other_options():
    every = {}, dict(scale=0.3), dict(scale=0.5), dict(window=(4, 0)), dict(window=(9, 0)), dict(return_lse=True)
    for _ in range(2):
        for options in every:
            more = dict(options, max_seqlen_q=80, max_seqlen_k=80)
            hold(varlen, LENGTHS[1], **more)


def test_offsets_are_looked_at_each_time():
    for _ in range(3):
        varlen(LENGTHS[1], max_seqlen_q=90, max_seqlen_k=90)
        with pytest.raises(ValueError, match="cu_seqlens_q: expected"):
            varlen((30, 30, 40), max_seqlen_q=90, max_seqlen_k=90)
        with pytest.raises(ValueError, match="cu_seqlens_q: expected"):
            varlen((60, -30, 60), max_seqlen_q=90, max_seqlen_k=90)


def test_a_longest_length_is_looked_at_each_time():
    varlen((30, 30, 30), max_seqlen_q=30, max_seqlen_k=30)
    for _ in range(2):
        for lengths, most in (((1, 80, 9), 30), ((1, 80, 9), 80)):
            results = []
            for backend in (None, "naive"):
                try:
                    results.append(varlen(lengths, max_seqlen_q=most, max_seqlen_k=most, backend=backend))
                except ValueError as error:
                    results.append(str(error))
            if isinstance(results[1], str):
                assert results[0] == results[1]
            else:
                hold(varlen, lengths, max_seqlen_q=most, max_seqlen_k=most)


def test_one_tensor_in_several_places(recalled):
    x, cu = torch.randn(90, 2, 16), torch.tensor([0, 50, 90], dtype=torch.int32)
    other = torch.tensor([0, 20, 90], dtype=torch.int32)
    for more in (cu, other, cu):
        attend = functools.partial(fa.attention_varlen, x, x, x, cu, more, max_seqlen_q=90, max_seqlen_k=90)
        assert_like(attend(), functools.partial(attend, backend="naive"))
    assert recalled[::3] == [False, False, True]


def test_what_is_known_keeps_no_tensor():
    both, cu = caches(), torch.tensor([0, 90], dtype=torch.int32)
    weight = torch.randn(16, requires_grad=True)
    tensors = [torch.randn(90, 2, 16) * weight for _ in range(3)]
    fa.attention_decode(torch.randn(3, 2, 1, 16), *both, cache_seqlens=torch.full((3,), 9, dtype=torch.int32))
    fa.attention_varlen(*tensors, cu, cu, max_seqlen_q=90, max_seqlen_k=90)
    gone = [weakref.ref(x) for x in (*both, *tensors, weight, cu)]
    del both, tensors, weight, cu
    gc.collect()
    assert not any(reference() is not None for reference in gone)


def test_what_watches_sees_operators(recalled):
    class Seen(TorchDispatchMode):
        names: list = []

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.names.append(str(function))
            return function(*args, **(kwargs or {}))

    x, cu = torch.randn(90, 2, 16), torch.tensor([0, 50, 90], dtype=torch.int32)
    longest = dict(max_seqlen_q=90, max_seqlen_k=90)
    fa.attention_varlen(x, x, x, cu, cu, **longest)
    with Seen():
        fa.attention_varlen(x, x, x, cu, cu, **longest)
    assert any("fusedattn" in name for name in Seen.names) and recalled == [False, False]


def test_a_graph_does_not_depend_on_what_is_known():
    x, cu = torch.randn(90, 2, 16), torch.tensor([0, 50, 90], dtype=torch.int32)

    def step(x, cu):
        return fa.attention_varlen(x, x, x, cu, cu, max_seqlen_q=90, max_seqlen_k=90)

    torch.compiler.reset()
    compiled = torch.compile(step, fullgraph=True, backend="eager")
    want = compiled(x, cu)
    step(x, cu)
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert torch.equal(compiled(x, cu), want)


def test_a_first_call_in_inference_mode():
    """What is remembered of it is for calls with gradients as well, and autograd saves no tensor of inference mode."""
    tensors = [torch.randn(1, 1, n, 8, requires_grad=True) for n in (6, 4, 4)]
    with torch.inference_mode(), torch.enable_grad():
        fa.attention(*tensors, causal=True, backend="naive")
    out = fa.attention(*tensors, causal=True, backend="naive")
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.sum(), tensors))
