"""Tests that attention to parts of the keys, merged (also by `fa.merge`), equals attention to all keys."""

from itertools import pairwise

import pytest
import torch

import fusedattn as fa
from fusedattn import reference
from fusedattn.launch.failures import KernelUnavailable
from fusedattn.operators import partial
from fusedattn.testing.tolerance import verdicts

from ..close import assert_like, assert_ok
from ..inside import TRITON, alike, fields, interpreted, same
from ..mistakes import ints
from ..partial import at_once, by_parts, draw, oracle

CASES = {  # (options, options that get gradients, True if keys are hidden)
    "full": ({}, (), False),
    "causal": (dict(causal=True), (), False),
    "window": (dict(window=(20, 3)), (), False),
    "softcap": (dict(causal=True, softcap=2.0), (), False),
    "slopes": (dict(causal=True), ("alibi_slopes",), False),
    "sinks": (dict(causal=True), ("sinks",), False),
    "key mask": (dict(causal=True), (), True),
    "dropout": (dict(dropout_p=0.3, seed=7), (), False),
    "dropout, causal": (dict(dropout_p=0.3, seed=7, causal=True), (), False),
    "negative scale": (dict(scale=-0.3), (), False),
    "large scores": (dict(scale=200.0), (), False),
    "rather large scores": (dict(scale=20.0), (), False),
    "lowest bias": ({}, ("bias",), False),
}
ROWS, KEYS = 50, 71
CUTS = {
    "aligned": (slice(16, 50), (0, 32, 48, 71)),
    "odd": (slice(13, 49), (0, 7, 7, 40, 71)),
    "one": (slice(0, 50), (0, 71)),
}


@pytest.mark.parametrize("backend", ["naive", "cpu", TRITON])
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.one_in(3)
def test_parts_make_the_whole(name, cut, backend):
    options, learned, hidden = CASES[name]
    if backend == "cpu" and {"softcap", "dropout_p", "alibi_slopes"} & {*options, *learned}:
        pytest.skip("the backend cpu does not take it")
    if backend == "triton" and cut == "one" and name != "full":
        pytest.skip("the interpreter takes its time")
    rows, cuts = CUTS[cut]
    for dtype, tolerance in ((torch.float64, 1e-11), (torch.float32, None)):
        if dtype == torch.float32 and backend == "triton" and cut != "odd":
            continue  # the interpreter is slow
        tensors, more = draw(dtype, ROWS, KEYS, learned=learned)
        options = options | more
        key_mask = torch.rand(2, KEYS, generator=torch.Generator().manual_seed(1)) > 0.4 if hidden else None
        found = by_parts(tensors, options, rows, cuts, backend, key_mask)
        exact = oracle(reference.attention, tensors, options, rows, key_mask)
        if tolerance is None:
            eager = at_once(reference.eager, tensors, options, rows, key_mask)
            del found["lse"], eager["lse"]  # the lse is compared in float64 alone
            exact.pop("lse")
            assert_ok(verdicts(found, eager, exact))
        else:
            wrong = {name: _difference(found[name], exact[name]) for name in exact}
            assert all(error < tolerance for error in wrong.values()), wrong


@interpreted
@pytest.mark.parametrize("kernel", ["forward", "preprocess"])
@pytest.mark.parametrize("name", ["causal", "negative scale", "sinks", "dropout, causal"])
@pytest.mark.one_in(5)
def test_parts_whose_kernels_fail(name, kernel, monkeypatch):
    """If a kernel fails for the keys 7 to 39, the naive path computes that part, and all parts are merged."""
    from fusedattn.launch import run

    run_kernel = run.run_kernel

    def failing(some, programs, arguments, *rest, **options):
        if some == kernel and arguments["k_len"] == 40 - 7:
            raise KernelUnavailable(f"{kernel} fails in the test of {name}")
        return run_kernel(some, programs, arguments, *rest, **options)

    monkeypatch.setattr(run, "run_kernel", failing)
    options, learned, _ = CASES[name]
    tensors, more = draw(torch.float64, ROWS, KEYS, learned=learned)
    rows, cuts = CUTS["odd"]
    with pytest.warns(UserWarning, match=f"{kernel} fails"):
        found = by_parts(tensors, options | more, rows, cuts, "triton")
    exact = oracle(reference.attention, tensors, options | more, rows)
    assert all(_difference(found[name], x) < 1e-11 for name, x in exact.items())


def _difference(found, exact):
    """Return the largest difference of two tensors, relative to the largest element if that exceeds 1."""
    found, exact = (x.nan_to_num(0.0, 0.0, 0.0) for x in (found, exact))
    return float((found - exact).abs().max() / exact.abs().max().clamp_min(1.0))


@pytest.mark.parametrize("backend", ["naive", "cpu", TRITON])
def test_no_part_is_rounded_to_16_bits(backend):
    rows = slice(0, 20)
    tensors, _ = draw(torch.bfloat16, 20, 40)
    found, exact = by_parts(tensors, {}, rows, (0, 30, 40), backend), oracle(reference.attention, tensors, {}, rows)
    assert all(x.dtype == torch.float32 for x in found.values())
    if backend == "triton":  # its products round the weights
        return
    for name in ("out", "query", "key", "value"):
        rounded = exact[name].bfloat16() - exact[name]
        assert (found[name] - exact[name]).abs().max() < 0.01 * rounded.abs().max(), name


def test_narrow_heads_of_16_bits_take_the_kernel_for_cpus(monkeypatch):
    monkeypatch.delattr(partial.partial, "forward")
    partial.forward(fields(*alike(1, 1, 70, 8, dtype=torch.bfloat16), partial=True), "cpu")


@pytest.mark.parametrize("backend", ["naive", "cpu", TRITON])
@pytest.mark.parametrize("scale", [1e9, 1e30])
def test_large_scores_stay_finite(scale, backend):
    tensors, _ = draw(torch.float32, 9, 20)
    found = by_parts(tensors, dict(scale=scale), slice(0, 9), (0, 10, 20), backend)
    assert all(x.isfinite().all() for x in found.values()), {name: x.isfinite().all() for name, x in found.items()}


def test_packed_sequences_have_the_results_of_each():
    """Partial results of packed sequences equal those of each sequence. Rows 5 and 6 are outside all sequences."""
    inputs = [torch.randn(1, 2, length, 8) for length in (7, 9, 9)]
    cuts, of_keys = (0, 2, 2, 5), (0, 4, 6, 9)
    packed = dict(cu_seqlens_q=ints(*cuts), cu_seqlens_k=ints(*of_keys), max_seqlen_q=3, max_seqlen_k=4)
    out, stats = partial.forward(fields(*inputs, partial=True, **packed), "naive")
    assert out.dtype == stats.dtype == torch.float32
    assert (out[:, :, 5:] == 0).all() and (stats[:, :, 5:] == torch.tensor([-float("inf"), float("inf")])).all()
    for rows, keys in zip(pairwise(cuts), pairwise(of_keys), strict=True):
        rows, keys = slice(*rows), slice(*keys)
        one = fields(inputs[0][:, :, rows], *(x[:, :, keys] for x in inputs[1:]), partial=True)
        same([out[:, :, rows], stats[:, :, rows]], partial.forward(one, "naive"))


@pytest.mark.parametrize("backend", ["naive", "cpu", TRITON])
def test_rows_that_see_nothing_stay_empty(backend):
    tensors, _ = draw(torch.float32, ROWS, KEYS)
    options = dict(causal=True, align="top_left")
    key_mask = torch.arange(KEYS).expand(2, -1) > 10
    found = by_parts(tensors, options, slice(0, ROWS), (0, 5, 30, KEYS), backend, key_mask)
    assert (found["lse"][:, :, :11] == -float("inf")).all() and found["lse"][:, :, 11:].isfinite().all()
    assert (found["out"][:, :, :11] == 0).all() and (found["query"][:, :, :11] == 0).all()
    assert all(x[:, :, 11:].isfinite().all() for x in (found["out"], found["query"]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_two_parts_merge(dtype):
    shapes = (2, 4, 10, 8), (2, 2, 15, 8), (2, 2, 15, 8)
    query, key, value = (torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes)
    mask = torch.rand(2, 1, 10, 15) < 0.6
    mask[:, :, 0] = mask[:, :, 1, :7] = mask[:, :, 2, 7:] = False  # hidden in both parts, in the first, in the second
    halves = [
        fa.attention(query, key[:, :, part], value[:, :, part], mask=mask[..., part], return_lse=True)
        for part in (slice(0, 7), slice(7, 15))
    ]
    got = fa.merge(*halves[0], *halves[1])
    assert [x.dtype for x in got] == [x.dtype for x in halves[0]]
    assert (got[0][:, :, 0] == 0).all() and (got[1][:, :, 0] == float("-inf")).all()
    weights = [torch.randn_like(x) for x in got]
    weights[1] = weights[1].masked_fill(got[1].isinf(), 0.0)

    def with_gradients(results):
        return [*results, *torch.autograd.grad(results, (query, key, value), weights)]

    whole = lambda: with_gradients(fa.reference.eager(query, key, value, mask=mask, return_lse=True))  # noqa: E731
    assert_like(with_gradients(got), whole)


def test_gradients_of_first_and_second_order():
    out_a, out_b = (torch.randn(3, 2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    lse_a, lse_b = (torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(fa.merge, (out_a, lse_a, out_b, lse_b))
    assert torch.autograd.gradgradcheck(fa.merge, (out_a, lse_a, out_b, lse_b))


def test_large_log_sums_do_not_overflow():
    out = torch.ones(1, 1, 1, 2)
    merged, lse = fa.merge(out, torch.full((1, 1, 1), 3e38), out * 3, torch.full((1, 1, 1), 3e38))
    assert (merged == 2).all() and (lse == 3e38).all()
