"""Tests checks of caches: overlapping memory, inference mode, vmap, and inputs that require gradients."""

import shutil

import pytest
import torch

import fusedattn as fa
from fusedattn.call import decode

from ..close import assert_like
from ..inside import TRITON, Plain
from ..mistakes import assert_named, ints, wrong
from .test_rules import CACHED, FROZEN, HKV, HQ, NEITHER, new

ALL, FIRST = slice(None), slice(6)
PLACES = {  # (rows, columns) of each of two caches in one tensor
    **{f"{n} columns apart": ((ALL, FIRST), (ALL, slice(n, n + 6))) for n in (0, 3, 6, 9, 12)},
    "rows": ((slice(4), FIRST), (slice(4, 8), FIRST)),
    "rows that meet": ((slice(5), FIRST), (slice(3, 8), FIRST)),
    "a corner": ((slice(4), slice(12, 18)), (slice(1, 5), slice(9, 15))),
    "narrow values before keys": ((ALL, slice(6, 12)), (ALL, slice(1, 4))),
    "narrow values that meet keys": ((ALL, slice(6, 12)), (ALL, slice(4, 7))),
    "every second row": ((slice(0, 8, 2), FIRST), (slice(1, 8, 2), FIRST)),
    "every second column": ((ALL, slice(0, 12, 2)), (ALL, slice(1, 12, 2))),
}


@pytest.mark.parametrize("name", PLACES)
def test_caches_share_no_memory_where_something_is_written(name):
    both, places = torch.zeros(1, 1, 8, 24), torch.arange(8 * 24).view(8, 24)
    caches = [both[0, 0][where][None, None] for where in PLACES[name]]
    shared = set.intersection(*({*places[where].flatten().tolist()} for where in PLACES[name]))
    new = [torch.randn(1, 1, 1, cache.shape[3]) for cache in caches]
    given = dict(cache_seqlens=ints(2), new_key=new[0], new_value=new[1])
    query = torch.randn(1, 1, 1, 6)
    for _ in range(2):
        if shared:
            with pytest.raises(ValueError, match="^value_cache: expected "):
                fa.attention_decode(query, *caches, **given)
        else:
            fa.attention_decode(query, *caches, **given)
    fa.attention_decode(query, *caches, cache_seqlens=ints(2))  # caches may overlap if nothing is written


INDUCTOR = pytest.mark.matrix, pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")


@pytest.mark.parametrize("pages", [False, True])
@pytest.mark.parametrize("backend", [None, "naive", TRITON])
def test_what_is_new_may_lie_in_a_cache(backend, pages):
    """New keys may lie in the cache: they are read before the append overwrites them, also in replays."""
    both, lengths = torch.randn(2, 2, HKV, 12, 8), ints(3, 5)
    table = dict(block_table=ints([1], [0])) if pages else {}
    query = torch.randn(2, HQ, 1, 8)

    def append(copied, first, second):
        caches = both.clone()
        new = caches[first][:, :, 2:6], caches[second][:, :, 1:5]
        new = [x.clone() for x in new] if copied else new
        arguments = dict(cache_seqlens=lengths, new_key=new[0], new_value=new[1], backend=backend, **table)
        return fa.attention_decode(query, *caches, **arguments), caches

    for order in ((0, 1), (1, 0)):
        for _ in range(2):
            for got, want in zip(append(False, *order), append(True, *order), strict=True):
                assert torch.equal(got, want)


def _within(query, keys, values, lengths, backend):
    """Append new keys that are a view of the value cache, and new values that are a view of the key cache."""
    new = dict(new_key=values[:, :, 2:6], new_value=keys.detach()[:, :, 1:5])
    return fa.attention_decode(query, keys, values, cache_seqlens=lengths, **new, backend=backend)


SEEN_BY = {
    "a subclass": lambda call, q, k, v, *rest: call(q, k.as_subclass(Plain), v.as_subclass(Plain), *rest),
    "functionalize": lambda call, q, k, v, n, by: torch.func.functionalize(lambda *x: call(*x, n, by))(q, k, v),
    "vmap": lambda call, *x: torch.vmap(call, (0, 0, 0, 0, None))(*(y[None] for y in x[:4]), x[4])[0],
    "aot_eager": lambda call, *x: torch.compile(call, backend="aot_eager", fullgraph=True)(*x),
}
# Inductor removes copies that change no strides, such as the copy of a cache stored as (1, C, H, D).
BY_ALL = SEEN_BY | dict(inductor=lambda call, *x: torch.compile(call, fullgraph=True)(*x))


@pytest.mark.parametrize("seen_by", [*SEEN_BY, pytest.param("inductor", marks=INDUCTOR)])
@pytest.mark.parametrize("backend", [None, "naive"])
@pytest.mark.one_in(2)
def test_what_is_new_may_lie_in_a_cache_whoever_sees_the_call(seen_by, backend):
    if seen_by == "functionalize" and backend is None:
        pytest.skip("torch.func.functionalize takes no operators of others that write, and says so")
    memory, query, lengths = torch.randn(2, 1, 12, HKV, 8), torch.randn(1, HQ, 1, 8), ints(3)
    (keys, values), (*expected,) = (memory.clone().transpose(2, 3).unbind() for _ in range(2))
    new = expected[1][:, :, 2:6].clone(), expected[0][:, :, 1:5].clone()
    arguments = dict(cache_seqlens=lengths, new_key=new[0], new_value=new[1], backend=backend)
    before = [x.clone() for x in expected]
    naively = lambda: fa.attention_decode(query, *(x.clone() for x in before), **arguments | dict(backend="naive"))  # noqa: E731
    fa.attention_decode(query, *expected, **arguments)
    assert_like(BY_ALL[seen_by](_within, query, keys, values, lengths, backend).as_subclass(torch.Tensor), naively)
    assert torch.equal(keys, expected[0]) and torch.equal(values, expected[1])


@pytest.mark.parametrize("name", ["key_cache", "value_cache"])
def test_a_cache_is_mapped_where_what_is_written_there_is(name):
    dims = dict.fromkeys(("new_key", "new_value", "key_cache", "value_cache"), 0) | {name: None}
    mapped = [CACHED[x] if dim is None else torch.stack([CACHED[x], CACHED[x] + 1]) for x, dim in dims.items()]

    def append(*tensors):
        return fa.attention_decode(**CACHED | dict(zip(dims, tensors, strict=True)))

    with pytest.raises(ValueError, match=f"^{name}: expected "):
        torch.vmap(append, tuple(dims.values()))(*mapped)


@pytest.mark.parametrize("backend", [None, "naive"])
def test_values_may_be_the_first_columns_of_keys(backend):
    """Values may be the first columns of keys (a shared latent vector), if new values are, too, without rotation."""
    cache, apart, new = torch.zeros(1, 1, 8, 16), torch.zeros(1, 1, 8, 12), torch.randn(1, 1, 1, 16)
    query, lengths = torch.randn(1, 2, 1, 16), torch.tensor([0], dtype=torch.int32)
    options = dict(cache_seqlens=lengths, new_key=new, backend=backend)
    out = fa.attention_decode(query, cache, cache[..., :12], **options, new_value=new[..., :12])
    assert torch.equal(out, fa.attention_decode(query, cache.clone(), apart, **options, new_value=new[..., :12]))
    turned = dict(rotary_cos=torch.ones(8, 4), rotary_sin=torch.zeros(8, 4))
    for unlike in (dict(new_value=new[..., 2:14]), dict(new_value=new[..., :12], **turned)):
        with pytest.raises(ValueError, match="^value_cache: expected "):
            fa.attention_decode(query, cache, cache[..., :12], **options, **unlike)


@pytest.mark.parametrize("backend", [None, "naive", "cpu"])
@pytest.mark.parametrize("name", FROZEN)
def test_a_cache_of_inference_mode_is_written_to_in_it_alone(name, backend, monkeypatch):
    """A cache made in inference mode is refused outside of that mode; torch itself would raise only after the write."""
    arguments = CACHED | {name: FROZEN[name].clone() for name in FROZEN} | dict(backend=backend)
    frozen = {name: FROZEN[name]}
    monkeypatch.setattr(decode, "_check_writable", lambda *_: None)  # kernels may write to it
    assert_named(fa.attention_decode, arguments, wrong(name, **frozen))
    before, (new_key, new_value) = FROZEN[name].clone(), new(1).values()
    with torch.inference_mode():
        fa.attention_decode(**arguments | frozen | dict(new_key=new_key * 2, new_value=new_value * 2))
        assert not torch.equal(FROZEN[name], before)
        FROZEN[name].copy_(before)
    fa.attention_decode(**arguments | frozen | NEITHER)


@pytest.mark.parametrize("name", "query new_key new_value rotary_cos rotary_sin bias alibi_slopes sinks".split())
def test_nothing_has_a_gradient(name):
    arguments = CACHED | {cache: CACHED[cache].clone() for cache in FROZEN}
    plain, learned = fa.attention_decode(**arguments), {name: arguments[name].clone().requires_grad_()}
    assert_named(fa.attention_decode, arguments, wrong(name, **learned))
    with torch.no_grad():
        again = fa.attention_decode(**arguments | learned)
    assert torch.equal(again, plain) and not again.requires_grad
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(arguments[name], torch.ones_like(arguments[name]))
        assert_named(fa.attention_decode, arguments, wrong(name, **{name: dual}))


def test_the_default_device_is_not_where_pages_are_looked_for():
    pool, lengths = torch.zeros(4, 2, 4, 8), torch.tensor([3], dtype=torch.int32)
    new, table = torch.ones(1, 2, 1, 8), torch.tensor([[0, 1]], dtype=torch.int32)
    caches = dict(key_cache=pool, value_cache=pool.clone(), cache_seqlens=lengths, block_table=table)
    want = fa.attention_decode(new, **caches, new_key=new, new_value=new)
    with torch.device("meta"):
        assert torch.equal(fa.attention_decode(new, **caches, new_key=new, new_value=new), want)
