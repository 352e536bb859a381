"""Tests numerics of the naive path, and its blocks: they fit a cache, and hold only visible keys."""

import functools
import pickle

import pytest
import torch

import fusedattn as fa
from fusedattn.naive import decode, formula, varlen
from fusedattn.testing.compare import with_gradients

from .. import cases
from ..caches import Cached, in_float64, one_by_one
from ..close import assert_as_good, assert_close, assert_like
from ..inside import Seen, alike as draw
from ..sequences import attention_varlen, by_sequence, offsets


@pytest.fixture
def budget(monkeypatch):
    """Return a function of (cache, scores): it limits the bytes of one block's scores, and of all saved scores."""

    def limit(cache, scores=formula.BUDGET):
        monkeypatch.setattr(formula, "CACHE", cache)
        monkeypatch.setattr(formula, "BUDGET", max(scores, cache))
        monkeypatch.setattr(torch, "get_num_threads", lambda: 1)

    return limit


@pytest.fixture
def computed(monkeypatch):
    """Return a list that gets the arguments of each softmax, and the shape of its scores."""
    seen, softmax = [], formula.softmax

    def record(scores, need_lse, **more):
        seen.append(dict(shape=scores.shape, **more))
        return softmax(scores, need_lse, **more)

    monkeypatch.setattr(formula, "softmax", record)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    return seen


SCORES = dict(softcap=2.0, dropout=0.4, alibi="own", sinks=True, grads="out, lse and weights")
CASES = [
    cases.Case("plain", B=2),
    cases.Case("masks", B=2, mask="pairs", key_mask="own", query_mask="own", causal=True),
    cases.Case("grouped", Hq=4, Hkv=2, window=(9, 3), mask="keys"),
    cases.Case("half", dtype=torch.float16, causal=True),
    cases.Case("window", B=2, Hq=4, Hkv=1, window=(4, 2)),
    cases.Case("fewer rows", Sq=9, Sk=45, causal=True, window=(3, None)),
    cases.Case("fewer keys", Sq=45, Sk=9, window=(2, 1), align="top_left"),
    cases.Case("window from the left", B=2, window=(None, 2), align="top_left"),
    cases.Case("window of the past", B=2, window=(3, None)),
    cases.Case("scores", B=2, Hq=4, Hkv=2, window=(5, 3), key_mask="own", bias="heads", **SCORES),
    cases.Case("all scores", B=2, Hq=4, Hkv=2, key_mask="own", bias="pairs", dtype=torch.float64, **SCORES),
]


@pytest.mark.parametrize("cache", [4 * 45 * 10, 4 * 45 * 80, 1], ids=["ten rows", "planes", "rows"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.one_in(2)
def test_blocks_change_nothing_but_rounding(case, cache, budget, monkeypatch):
    tensors, options = case.draw("cpu")
    for scores in (formula.BUDGET, 1):
        budget(cache, scores)
        got = with_gradients(fa.reference.attention, tensors, options, case.grads)
        monkeypatch.undo()  # the naive path judges, too: it must not cut its scores in the same way
        assert_close(got, tensors, options, case.grads)


@pytest.mark.parametrize("options, part", [({}, 1.0), (dict(causal=True), 0.6), (dict(window=(64, 0)), 0.2)], ids=str)
def test_no_score_is_computed_that_no_row_of_a_block_sees(computed, options, part):
    fa.attention(*draw(1, 2, 1024, 8), backend="naive", **options)
    assert sum(x["shape"].numel() for x in computed) <= part * 2 * 1024**2


@pytest.mark.parametrize("options", [{}, dict(causal=True), dict(window=(64, 0))], ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 600, 8), (3, 2, 200, 8), (2, 10, 300, 8)], ids=str)
def test_blocks_fit_a_cache(computed, shape, options, budget):
    budget(2**19)
    fa.attention(*draw(*shape), backend="naive", **options)
    assert max(x["shape"].numel() for x in computed) * 4 <= 2**19


def saved(function, *tensors):
    sizes = {}

    def keep(x):
        sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = function(*tensors, backend="naive")
    assert out.requires_grad
    return sum(sizes.values())


@pytest.mark.parametrize("causal", [False, True])
def test_grouped_heads_copy_no_key_and_no_value(causal):
    query, key, value = (torch.randn(2, heads, 16, 64, requires_grad=True) for heads in (8, 2, 2))
    weights = 2 * 8 * 16 * 16
    kept = saved(functools.partial(fa.attention, causal=causal), query, key, value)
    assert kept == 4 * (query.numel() + key.numel() + value.numel() + weights)


def test_weights_are_kept_for_the_backward_within_the_budget(computed, budget, monkeypatch):
    tensors, weights = draw(1, 2, 256, 8, requires_grad=True), 4 * 2 * 256 * 256

    def passes():
        computed.clear()
        out = fa.attention(*tensors, backend="naive")
        forward = len(computed)
        out.sum().backward()
        return forward, len(computed)

    budget(2**16, weights)
    assert passes() == (8, 8)
    assert saved(fa.attention, *tensors) >= weights
    budget(2**16, weights - 1)
    monkeypatch.setattr(formula, "RECOMPUTED", 2**17)
    assert passes() == (4, 8)  # four larger blocks, each computed again in the backward
    assert saved(fa.attention, *tensors) < weights / 2


def test_half_precision_is_converted_once(budget):
    budget(2**16)
    tensors = draw(1, 2, 256, 8, dtype=torch.bfloat16, requires_grad=True)
    inputs, weights = 4 * 3 * 2 * 256 * 8, 4 * 2 * 256 * 256
    assert saved(functools.partial(fa.attention, causal=True), *tensors) <= inputs + weights


@pytest.mark.parametrize("name", ["causal", "bias", "weights", "dropout"])
def test_one_long_sequence_does_not_make_all_as_long(name, computed, monkeypatch):
    rows, keys = (3, 40, 0, 5, 37, 2), (4, 45, 3, 6, 45, 1)
    monkeypatch.setattr(varlen, "SLACK", 0)
    options = {"causal": dict(causal=True), "bias": dict(bias="batch"), "weights": dict(grads="weights")}
    options["dropout"] = dict(dropout=0.3, grads="out and weights")
    case = cases.Case(name, B=6, Sq=40, Sk=45)._replace(**options[name])
    tensors, options = case.draw()
    got = with_gradients(attention_varlen(rows, keys, "naive"), tensors, options, case.grads)
    assert sum(x["shape"].numel() for x in computed) < 0.7 * 6 * 2 * 40 * 45
    of = dict(apply=lambda function: by_sequence(function, rows, keys), lengths=(rows, keys))
    assert_close(got, tensors, options, case.grads, **of)


def test_the_gradient_of_a_part_is_no_larger_than_the_part(monkeypatch):
    monkeypatch.setattr(varlen, "SLACK", 0)
    lengths = (9, 1, 1, 1) * 8
    tensors = [torch.randn(sum(lengths), 2, 8, requires_grad=True) for _ in range(3)]
    out = fa.attention_varlen(*tensors, offsets(lengths), offsets(lengths), dropout_p=0.5, seed=1)
    with Seen() as seen:
        out.sum().backward()
    assert sum(size == out.numel() for _, size, _ in seen.made) < 30  # with slices: 3 or more for each of 16 parts


@pytest.mark.parametrize("page", [None, 8], ids=["rows", "pages"])
def test_decode_reads_no_further_than_the_lengths(page, computed, monkeypatch):
    monkeypatch.setattr(decode, "WORTH", 0)
    arguments = Cached("lengths", page=page, lengths=(5, 5, 33, 0), causal=True, Sq=2).draw()
    got = fa.attention_decode(**arguments, return_lse=True, return_weights=True, backend="naive")
    # One block for each of the three lengths.
    assert [x["shape"][3] for x in computed] == [5, 33, 0]
    eager, oracle = (one_by_one(fa.reference.eager, x)[0].values() for x in (arguments, in_float64(arguments)))
    for each in zip(got, eager, oracle, strict=True):
        assert_as_good(*each)


def test_half_precision_is_computed_in_float32():
    query, key, value = (torch.randn(1, 2, 40, 16).bfloat16() for _ in range(3))
    wide = fa.reference.attention(query.float(), key.float(), value.float()).bfloat16()
    assert torch.equal(fa.reference.attention(query, key, value), wide)


def test_anomaly_detection_finds_no_nan():
    """Rows that see no key make no NaN in the backward, not even one that a later step drops."""
    query, key, value = (torch.randn(1, 1, n, 8, requires_grad=True) for n in (9, 4, 4))
    with torch.autograd.set_detect_anomaly(True):
        out, lse = fa.reference.attention(query, key, value, causal=True, return_lse=True)
        (out.sum() + lse[..., 5:].sum()).backward()


@pytest.mark.parametrize("softcap", [1e-320, 1e-45, 1e38])
def test_a_cap_that_float32_can_hardly_divide_by(softcap):
    inputs = [torch.randn(2, 2, 9, 8, requires_grad=True) for _ in range(3)]
    out = fa.reference.attention(*inputs, softcap=softcap)
    scale = 1e-30 if softcap < 1 else None  # all scores are equal, or none is capped
    assert_like(out, lambda: fa.reference.eager(*inputs, scale=scale))
    assert all(x.isfinite().all() for x in torch.autograd.grad(out.sin().sum(), inputs))


@pytest.mark.parametrize("name", ["attention", "attention_varlen", "attention_decode", "eager"])
def test_a_function_pickles(name):
    function = getattr(fa.reference, name)
    assert pickle.loads(pickle.dumps(function)) is function
