"""Every wrong argument of `attention_decode` raises, in one line that names it, before anything is written."""

import shutil

import pytest
import torch

import fusedattn as fa
from fusedattn.call import cached

from ..close import assert_like
from .test_rules import unreached

B, Hq, Hkv, Sq, C, D, Dv, PAGES, PAGE = 2, 4, 2, 2, 8, 6, 10, 5, 4
META = torch.device("meta")


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def given(**changed):
    good = dict(query=torch.randn(B, Hq, Sq, D), key_cache=torch.randn(B, Hkv, C, D))
    good |= dict(value_cache=torch.randn(B, Hkv, C, Dv), cache_seqlens=ints(3, 6))
    return {**good, **changed}


def paged(*table, **changed):
    pool = dict(key_cache=torch.randn(PAGES, Hkv, PAGE, D), value_cache=torch.randn(PAGES, Hkv, PAGE, Dv))
    return given(**pool, block_table=ints(*(table or ((0, 3), (2, 4)))), **changed)


def new(rows=2, **changed):
    return dict(new_key=torch.randn(B, Hkv, rows, D), new_value=torch.randn(B, Hkv, rows, Dv), **changed)


def rotary(rows=9, half=3, **changed):
    return dict(rotary_cos=torch.randn(rows, half), rotary_sin=torch.randn(rows, half), **changed)


def floats(*shape):
    return torch.ones(shape)


# argument it must name, error, what the sentence must say, the arguments, a neighbour that is right
WRONG = [
    ("query", TypeError, "a tensor, got list", given(query=[1.0]), given()),
    ("query", TypeError, "a floating dtype, got torch.int64", given(query=torch.ones(B, Hq, Sq, D).long()), given()),
    ("query", TypeError, "a strided tensor", given(query=floats(3, 4).to_sparse()), given()),
    ("query", ValueError, "rank 4, got (4, 2, 6)", given(query=floats(Hq, Sq, D)), given()),
    ("query", ValueError, "1 or more", given(query=floats(B, Hq, Sq, 0)), given()),
    ("key_cache", TypeError, "a tensor, got NoneType", given(key_cache=None), given()),
    ("value_cache", TypeError, "a tensor, got int", given(value_cache=3), given()),
    ("key_cache", TypeError, "torch.float32, got torch.float16", given(key_cache=floats(B, Hkv, C, D).half()), given()),
    ("key_cache", TypeError, "a strided tensor", given(key_cache=floats(3, 4).to_sparse()), given()),
    (
        "key_cache",
        ValueError,
        "the device of query, cpu, got meta",
        given(key_cache=floats(B, Hkv, C, D).to(META)),
        given(),
    ),
    ("value_cache", TypeError, "got torch.float64", given(value_cache=floats(B, Hkv, C, Dv).double()), given()),
    ("value_cache", TypeError, "a strided tensor", given(value_cache=floats(3, 4).to_sparse()), given()),
    ("value_cache", ValueError, "the device of query", given(value_cache=floats(B, Hkv, C, Dv).to(META)), given()),
    ("key_cache", ValueError, "rank 4", given(key_cache=floats(B, C, D)), given()),
    ("value_cache", ValueError, "rank 4", given(value_cache=floats(B, C, D)), given()),
    ("key_cache", ValueError, "the head dimension of query, 6", given(key_cache=floats(B, Hkv, C, D + 1)), given()),
    ("value_cache", ValueError, "as in key_cache, (2, 2, 8, 6)", given(value_cache=floats(B, Hkv, C + 1, D)), given()),
    ("value_cache", ValueError, "1 or more", given(value_cache=floats(B, Hkv, C, 0)), given()),
    (
        "key_cache",
        ValueError,
        "divides the 4 of query, got 3 heads",
        given(key_cache=floats(B, 3, C, D), value_cache=floats(B, 3, C, Dv)),
        given(key_cache=floats(B, 1, C, D), value_cache=floats(B, 1, C, Dv)),
    ),
    (
        "key_cache",
        ValueError,
        "the batch size of query, 2, or a block_table",
        given(key_cache=floats(3, Hkv, C, D), value_cache=floats(3, Hkv, C, Dv)),
        paged(),
    ),
    ("cache_seqlens", TypeError, "a tensor of torch.int32, got int", given(cache_seqlens=3), given()),
    ("cache_seqlens", TypeError, "got torch.int64", given(cache_seqlens=ints(3, 6).long()), given()),
    ("cache_seqlens", TypeError, "a strided tensor", given(cache_seqlens=ints(3, 6).to_sparse()), given()),
    ("cache_seqlens", ValueError, "the device of query", given(cache_seqlens=ints(3, 6).to(META)), given()),
    ("cache_seqlens", ValueError, "shape (2,), got (3,)", given(cache_seqlens=ints(3, 6, 1)), given()),
    ("cache_seqlens", ValueError, "from 0 to the capacity, 8, got -1", given(cache_seqlens=ints(3, -1)), given()),
    (
        "cache_seqlens",
        ValueError,
        "from 0 to the capacity, 8, got 9",
        given(cache_seqlens=ints(9, 1)),
        given(cache_seqlens=ints(8, 0)),
    ),
    (
        "cache_seqlens",
        ValueError,
        "the capacity, 8, got 9",
        paged(cache_seqlens=ints(9, 1)),
        paged(cache_seqlens=ints(8, 0)),
    ),
    ("block_table", TypeError, "a tensor of torch.int32, got list", paged() | dict(block_table=[0]), paged()),
    ("block_table", TypeError, "got torch.int64", paged() | dict(block_table=ints((0, 3), (2, 4)).long()), paged()),
    ("block_table", TypeError, "a strided tensor", paged() | dict(block_table=ints((0, 3)).to_sparse()), paged()),
    ("block_table", ValueError, "the device of query", paged() | dict(block_table=ints((0, 3)).to(META)), paged()),
    ("block_table", ValueError, "shape (2, pages of a sequence), got (1, 2)", paged((0, 3)), paged()),
    ("block_table", ValueError, "shape (2, pages of a sequence), got (2,)", paged(0, 3), paged()),
    (
        "block_table",
        ValueError,
        "pages from 0 to 4 where the lengths reach, got 5",
        paged((0, 3), (2, 5)),
        paged((0, 5), (2, 4)),
    ),
    ("block_table", ValueError, "got -1", paged((-1, 3), (2, 4)), paged((1, -1), (2, 4))),
    ("block_table", ValueError, "got -1", paged((1, -1), (2, 4), **new()), paged((1, -1), (2, 4), **new(1))),
    (
        "block_table",
        ValueError,
        "a place of its own for each new key, got one that two sequences write to",
        paged((0, 3), (3, 0), cache_seqlens=ints(2, 6), **new()),
        paged((0, 3), (3, 1), cache_seqlens=ints(2, 6), **new()),
    ),
    (
        "block_table",
        ValueError,
        "a place of its own for each new key, got one where a sequence has an old key",
        paged((0, 3), (3, 0), cache_seqlens=ints(2, 4), **new()),
        paged((0, 3), (3, 0), cache_seqlens=ints(2, 4)),
    ),
    ("block_table", ValueError, "an old key", paged((1, 1), (2, 4), **new()), paged((1, 1), (2, 4))),
    ("new_key", ValueError, "a tensor beside new_value, got None", given(new_value=floats(B, Hkv, 1, Dv)), given()),
    ("new_value", ValueError, "a tensor beside new_key, got None", given(new_key=floats(B, Hkv, 1, D)), given()),
    (
        "new_key",
        TypeError,
        "the dtype of query, torch.float32, got float",
        given(**new() | dict(new_key=1.0)),
        given(**new()),
    ),
    ("new_key", TypeError, "a strided tensor", given(**new() | dict(new_key=floats(3, 4).to_sparse())), given(**new())),
    (
        "new_key",
        ValueError,
        "the device of query",
        given(**new() | dict(new_key=floats(B, Hkv, 2, D).to(META))),
        given(**new()),
    ),
    ("new_value", TypeError, "got torch.float16", given(**new() | dict(new_value=floats(1).half())), given(**new())),
    (
        "new_value",
        TypeError,
        "a strided tensor",
        given(**new() | dict(new_value=floats(3, 4).to_sparse())),
        given(**new()),
    ),
    (
        "new_value",
        ValueError,
        "the device of query",
        given(**new() | dict(new_value=floats(1).to(META))),
        given(**new()),
    ),
    ("new_key", ValueError, "shape (2, 2, new, 6)", given(**new() | dict(new_key=floats(B, Hq, 2, D))), given(**new())),
    (
        "new_value",
        ValueError,
        "shape (2, 2, 2, 10)",
        given(**new() | dict(new_value=floats(B, Hkv, 1, Dv))),
        given(**new()),
    ),
    ("new_key", ValueError, "at most 2 rows after the 6 of a sequence of 8, got 3", given(**new(3)), given(**new(2))),
    ("new_key", ValueError, "at most 2 rows after the 6", paged(**new(3)), paged(**new(2))),
    (
        "key_cache",
        ValueError,
        "with no dimension expanded",
        given(key_cache=floats(B, 1, C, D).expand(-1, Hkv, -1, -1), **new()),
        given(key_cache=floats(B, 1, C, D).expand(-1, Hkv, -1, -1)),
    ),
    (
        "value_cache",
        ValueError,
        "with no dimension expanded",
        given(value_cache=floats(1, Hkv, C, Dv).expand(B, -1, -1, -1), **new()),
        given(value_cache=floats(1, Hkv, C, Dv).expand(B, -1, -1, -1)),
    ),
    ("rotary_cos", ValueError, "a tensor beside rotary_sin, got None", given(rotary_sin=floats(9, 3)), given()),
    ("rotary_sin", ValueError, "a tensor beside rotary_cos, got None", given(rotary_cos=floats(9, 3)), given()),
    ("rotary_cos", TypeError, "a floating tensor, got int", given(**rotary() | dict(rotary_cos=1)), given(**rotary())),
    (
        "rotary_cos",
        TypeError,
        "a strided tensor",
        given(**rotary() | dict(rotary_cos=floats(9, 3).to_sparse())),
        given(**rotary()),
    ),
    (
        "rotary_cos",
        ValueError,
        "the device of query",
        given(**rotary() | dict(rotary_cos=floats(9, 3).to(META))),
        given(**rotary()),
    ),
    (
        "rotary_sin",
        TypeError,
        "a floating tensor, got torch.bool",
        given(**rotary() | dict(rotary_sin=floats(9, 3).bool())),
        given(**rotary()),
    ),
    (
        "rotary_sin",
        TypeError,
        "a strided tensor",
        given(**rotary() | dict(rotary_sin=floats(9, 3).to_sparse())),
        given(**rotary()),
    ),
    (
        "rotary_sin",
        ValueError,
        "the device of query",
        given(**rotary() | dict(rotary_sin=floats(9, 3).to(META))),
        given(**rotary()),
    ),
    ("rotary_cos", ValueError, "a rotary_dim of at most 6", given(**rotary(half=4)), given(**rotary(half=1))),
    ("rotary_cos", ValueError, "of 1 position or more", given(**rotary(rows=0)), given(**rotary())),
    (
        "rotary_sin",
        ValueError,
        "the shape of rotary_cos, (9, 3)",
        given(**rotary() | dict(rotary_sin=floats(9, 2))),
        given(**rotary()),
    ),
    ("rotary_cos", ValueError, "a row for each of 6 positions, got 5 rows", given(**rotary(5)), given(**rotary(6))),
    (
        "rotary_cos",
        ValueError,
        "a row for each of 8 positions, got 7 rows",
        given(**rotary(7), **new()),
        given(**rotary(8), **new()),
    ),
    (
        "rotary_cos",
        ValueError,
        "a row for each of 2 positions",
        given(**rotary(1), align="top_left"),
        given(**rotary(2), align="top_left"),
    ),
    (
        "query",
        ValueError,
        "unless causal or a query_mask hides all keys from it, got 2 rows for 1 keys",
        given(**rotary(), cache_seqlens=ints(1, 4)),
        given(**rotary(), cache_seqlens=ints(1, 4), causal=True),
    ),
    (
        "query",
        ValueError,
        "no query that stands before position 0, unless",
        given(**rotary(), cache_seqlens=ints(1, 4), window=(None, 1)),
        given(**rotary(), cache_seqlens=ints(1, 4), window=(None, 0)),
    ),
    (
        "rotary_interleaved",
        TypeError,
        "a bool, got 1",
        given(**rotary(rotary_interleaved=1)),
        given(**rotary(rotary_interleaved=True)),
    ),
    ("mask", TypeError, "a bool tensor", given(mask=floats(Sq, C)), given(mask=floats(Sq, C).bool())),
    ("mask", TypeError, "a bool tensor", given(mask=fa.plan(floats(Sq, C).bool())), given()),
    (
        "mask",
        ValueError,
        "broadcastable to (2, 4, 2, 8)",
        given(mask=floats(Sq, 6).bool()),
        given(mask=floats(Sq, C).bool()),
    ),
    ("bias", ValueError, "broadcastable to (2, 4, 2, 8)", paged(bias=floats(Sq, 4)), paged(bias=floats(Sq, 8))),
    ("key_mask", ValueError, "shape (2, 8)", given(key_mask=floats(B, 6).bool()), given(key_mask=floats(B, C).bool())),
    ("window", ValueError, "no negative side", given(window=(-1, 0)), given(window=(1, 0))),
    ("scale", ValueError, "a finite number", given(scale=float("nan")), given(scale=0)),
    ("backend", ValueError, "None or one of", given(backend="cuda"), given(backend="naive")),
]
LEARNED = ("query", "key_cache", "value_cache", "new_key", "new_value", "rotary_cos", "rotary_sin")
OPTIONS = dict(bias=(Sq, C), alibi_slopes=(Hq,), sinks=(Hq,))


@pytest.mark.parametrize(
    "argument, error, text, wrong, neighbour", WRONG, ids=lambda x: x if isinstance(x, str) else ""
)
def test_a_wrong_argument_raises_and_nothing_is_written(argument, error, text, wrong, neighbour):
    for function in (fa.attention_decode, fa.reference.attention_decode):
        if argument == "backend" and function is fa.reference.attention_decode:
            continue
        before = {name: x.clone() for name, x in wrong.items() if isinstance(x, torch.Tensor)}
        with pytest.raises(error) as raised:
            function(**wrong)
        message = str(raised.value)
        assert message.startswith(f"{argument}: expected ") and ", got " in message and "\n" not in message
        assert text in message
        for name, x in before.items():
            assert x.is_meta or torch.equal(x.to_dense(), wrong[name].to_dense())
    fa.attention_decode(**neighbour)


def frozen(*shape):
    with torch.inference_mode():
        return floats(*shape)


@pytest.mark.parametrize("apart", [0, 3, 6, 9, 12])
def test_caches_share_no_memory_where_something_is_written(apart):
    """One tensor of twelve columns or of rows; a call that is replayed is looked at as well."""
    both = torch.zeros(1, 1, 8, 24)
    for key_cache, value_cache in ((both[..., :6], both[..., apart : apart + 6]), (both[..., :6], both[..., 6:12])):
        inputs = torch.randn(1, 1, 1, 6), key_cache, value_cache
        more = dict(cache_seqlens=torch.tensor([2], dtype=torch.int32), new_key=torch.randn(1, 1, 1, 6))
        for _ in range(2):
            if abs(key_cache.storage_offset() - value_cache.storage_offset()) < 6:
                with pytest.raises(ValueError, match="^value_cache: expected memory of its own beside new_key"):
                    fa.attention_decode(*inputs, **more, new_value=torch.randn(1, 1, 1, 6))
            else:
                fa.attention_decode(*inputs, **more, new_value=torch.randn(1, 1, 1, 6))
        fa.attention_decode(*inputs, cache_seqlens=more["cache_seqlens"])  # what is only read may be


INDUCTOR = pytest.mark.matrix, pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")


@pytest.mark.parametrize("pages", [False, True])
@pytest.mark.parametrize("backend", [None, "naive", "triton"])
def test_what_is_new_may_lie_in_a_cache(backend, pages):
    """As where rows are moved that others were appended before: what is read is what was there; replayed as well."""
    interpreted = pytest.importorskip("triton").knobs.runtime.interpret
    if backend == "triton" and not interpreted:
        pytest.skip("on a CPU kernels are interpreted")
    both, lengths = torch.randn(2, 2, Hkv, 12, 8), ints(3, 5)
    table = dict(block_table=ints([1], [0])) if pages else {}
    query = torch.randn(2, Hq, 1, 8)

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


class Labelled(torch.Tensor):
    """A tensor of another class."""


def _within(query, keys, values, lengths, backend):
    """A call whose new keys lie among old values, and new values among old keys."""
    new = dict(new_key=values[:, :, 2:6], new_value=keys.detach()[:, :, 1:5])
    return fa.attention_decode(query, keys, values, cache_seqlens=lengths, **new, backend=backend)


SEEN_BY = {
    "a subclass": lambda call, q, k, v, *rest: call(q, k.as_subclass(Labelled), v.as_subclass(Labelled), *rest),
    "functionalize": lambda call, q, k, v, n, by: torch.func.functionalize(lambda *x: call(*x, n, by))(q, k, v),
    "vmap": lambda call, *x: torch.vmap(call, (0, 0, 0, 0, None))(*(y[None] for y in x[:4]), x[4])[0],
    "aot_eager": lambda call, *x: torch.compile(call, backend="aot_eager", fullgraph=True)(*x),
    # Which takes out copies that it finds to be none, as where a cache of one sequence lies (1, C, H, D) in memory.
    "inductor": lambda call, *x: torch.compile(call, fullgraph=True)(*x),
}


@pytest.mark.parametrize(
    "seen_by", [name if name != "inductor" else pytest.param(name, marks=INDUCTOR) for name in SEEN_BY]
)
@pytest.mark.parametrize("backend", [None, "naive"])
def test_what_is_new_may_lie_in_a_cache_whoever_sees_the_call(seen_by, backend):
    if seen_by == "functionalize" and backend is None:
        pytest.skip("torch.func.functionalize takes no operators of others that write, and says so")
    memory, query, lengths = torch.randn(2, 1, 12, Hkv, 8), torch.randn(1, Hq, 1, 8), ints(3)
    (keys, values), (*expected,) = (memory.clone().transpose(2, 3).unbind() for _ in range(2))
    new = expected[1][:, :, 2:6].clone(), expected[0][:, :, 1:5].clone()
    arguments = dict(cache_seqlens=lengths, new_key=new[0], new_value=new[1], backend=backend)
    before = [x.clone() for x in expected]
    naively = lambda: fa.attention_decode(query, *(x.clone() for x in before), **arguments | dict(backend="naive"))  # noqa: E731
    fa.attention_decode(query, *expected, **arguments)
    assert_like(SEEN_BY[seen_by](_within, query, keys, values, lengths, backend).as_subclass(torch.Tensor), naively)
    assert torch.equal(keys, expected[0]) and torch.equal(values, expected[1])


@pytest.mark.parametrize("backend", [None, "naive"])
@pytest.mark.parametrize("name", ["key_cache", "value_cache"])
def test_a_cache_that_is_written_to_is_no_view_that_negates(name, backend):
    arguments = given() | new(rows=1)
    arguments[name] = torch._neg_view(arguments[name])
    before = {x: arguments[x].clone() for x in ("key_cache", "value_cache")}
    with pytest.raises(ValueError, match=f"^{name}: expected a cache that new keys can be written to, no view that"):
        fa.attention_decode(**arguments, backend=backend)
    assert all(torch.equal(arguments[x], before[x]) for x in before)
    del arguments["new_key"], arguments["new_value"]
    fa.attention_decode(**arguments, backend=backend)


@pytest.mark.parametrize("name", ["key_cache", "value_cache"])
def test_a_cache_is_mapped_where_what_is_written_there_is(name):
    arguments = given() | new(rows=1)
    dims = dict.fromkeys(("new_key", "new_value", "key_cache", "value_cache"), 0) | {name: None}
    mapped = [arguments.pop(x) for x in dims]
    mapped = [x if dim is None else torch.stack([x, x + 1]) for x, dim in zip(mapped, dims.values(), strict=True)]

    def append(*tensors):
        return fa.attention_decode(**arguments, **dict(zip(dims, tensors, strict=True)))

    with pytest.raises(ValueError, match=f"^{name}: expected a cache that torch.vmap maps over as it does what is new"):
        torch.vmap(append, tuple(dims.values()))(*mapped)


@pytest.mark.parametrize("backend", [None, "naive"])
def test_values_may_be_the_first_columns_of_keys(backend):
    """As where both are made of one latent vector: what is new must be alike, and not turned."""
    cache, apart, new = torch.zeros(1, 1, 8, 16), torch.zeros(1, 1, 8, 12), torch.randn(1, 1, 1, 16)
    query, lengths = torch.randn(1, 2, 1, 16), torch.tensor([0], dtype=torch.int32)
    options = dict(cache_seqlens=lengths, new_key=new, backend=backend)
    out = fa.attention_decode(query, cache, cache[..., :12], **options, new_value=new[..., :12])
    assert torch.equal(out, fa.attention_decode(query, cache.clone(), apart, **options, new_value=new[..., :12]))
    turned = dict(rotary_cos=torch.ones(8, 4), rotary_sin=torch.zeros(8, 4))
    for wrong in (dict(new_value=new[..., 2:14]), dict(new_value=new[..., :12], **turned)):
        with pytest.raises(ValueError, match="^value_cache: expected memory of its own"):
            fa.attention_decode(query, cache, cache[..., :12], **options, **wrong)


@pytest.mark.parametrize("backend", [None, "naive", "cpu"])
@pytest.mark.parametrize("name", ["key_cache", "value_cache"])
def test_a_cache_of_inference_mode_is_written_to_in_it_alone(name, backend):
    """torch lets nobody write to such a tensor outside, and says so after it was done."""
    arguments = given(**new(1), backend=backend)
    arguments[name] = frozen(*arguments[name].shape)
    before = arguments[name].clone()
    with pytest.raises(
        ValueError, match=f"^{name}: expected a cache .* of torch.inference_mode.*, got an inference tensor$"
    ):
        fa.attention_decode(**arguments)
    assert torch.equal(arguments[name], before)
    with torch.inference_mode():
        fa.attention_decode(**arguments)
    assert not torch.equal(arguments[name], before)
    fa.attention_decode(**arguments | dict(new_key=None, new_value=None))


def test_every_rule_has_a_row(monkeypatch):
    tables = cached.RULES, cached.WITHOUT_TABLE, cached.TABLE, cached.NEW, cached.ROTARY, (cached.INTERLEAVED,)
    calls = [wrong for _, _, _, wrong, _ in WRONG]
    for name, columns in (("key_cache", D), ("value_cache", Dv)):
        shape = B, Hkv, C, columns
        calls += [given(**new(1), **{name: wrong}) for wrong in (frozen(*shape), torch._neg_view(floats(*shape)))]
    assert unreached(monkeypatch, cached, tables, fa.attention_decode, calls) == []


@pytest.mark.parametrize("name", [*LEARNED, *OPTIONS])
def test_nothing_has_a_gradient(name):
    arguments = given(**new(1), **rotary(), **{option: floats(*shape) for option, shape in OPTIONS.items()})
    plain = fa.attention_decode(**arguments)
    arguments[name] = arguments[name].clone().requires_grad_()
    with pytest.raises(ValueError, match=f"^{name}: expected a tensor without a gradient, .*got one that requires it$"):
        fa.attention_decode(**arguments)
    with torch.no_grad():
        again = fa.attention_decode(**arguments)
    assert torch.equal(again, plain) and not again.requires_grad
    with torch.autograd.forward_ad.dual_level():
        arguments[name] = torch.autograd.forward_ad.make_dual(
            arguments[name].detach(), floats(1).expand(arguments[name].shape)
        )
        with pytest.raises(ValueError, match=f"^{name}: expected a tensor without a gradient"):
            fa.attention_decode(**arguments)


def test_a_backend_that_has_no_kernel_says_so():
    with pytest.raises(NotImplementedError, match="'hopper' cannot take this call: it has no kernel for caches"):
        fa.attention_decode(**given(backend="hopper"))
    with fa.use_backend("hopper"), pytest.raises(NotImplementedError):
        fa.attention_decode(**given())


def test_a_pool_without_pages():
    pool = dict(
        key_cache=floats(0, Hkv, PAGE, D), value_cache=floats(0, Hkv, PAGE, Dv), block_table=ints((0, 1), (2, 3))
    )
    with pytest.raises(ValueError, match="block_table: expected no lengths without pages, got 0"):
        fa.attention_decode(**given(**pool, cache_seqlens=ints(1, 0)))
    assert not fa.attention_decode(**given(**pool, cache_seqlens=ints(0, 0))).any()


def test_the_default_device_is_not_where_pages_are_looked_for():
    pool, lengths = torch.zeros(4, 2, 4, 8), torch.tensor([3], dtype=torch.int32)
    new, table = torch.ones(1, 2, 1, 8), torch.tensor([[0, 1]], dtype=torch.int32)
    caches = dict(key_cache=pool, value_cache=pool.clone(), cache_seqlens=lengths, block_table=table)
    want = fa.attention_decode(new, **caches, new_key=new, new_value=new)
    with torch.device("meta"):
        assert torch.equal(fa.attention_decode(new, **caches, new_key=new, new_value=new), want)


@pytest.mark.parametrize("backend", ["naive", "triton"])
def test_who_saved_a_cache_for_a_backward_hears_that_it_was_written_to(backend):
    if backend == "triton":
        pytest.importorskip("triton", reason="kernels need Triton")
    key_cache, value_cache = caches = [torch.zeros(1, 2, 4, 8) for _ in range(2)]
    new, weight = torch.ones(1, 2, 1, 8), torch.ones(8, requires_grad=True)
    saved = [(weight * x).sum() for x in caches]
    lengths = torch.tensor([3], dtype=torch.int32)
    fa.attention_decode(new, *caches, cache_seqlens=lengths, new_key=new, new_value=new, backend=backend)
    for loss in saved:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
