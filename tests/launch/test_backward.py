"""Tests the backward in one pass and in two: which kernels run, and results in any order of programs."""

import random

import pytest
import torch

import fusedattn as fa
from fusedattn.testing.compare import with_gradients

from .. import cases, sample
from ..cases import Case
from ..close import assert_case, assert_close, assert_computes

ONE, TWO = ["preprocess", "one_pass", "postprocess"], ["preprocess", "dq", "dkdv"]
# (inputs that need a gradient, fields of the case, kernels, kernels if torch asks for determinism)
LAUNCHED = [
    ("query key value", {}, ONE, TWO),
    ("query value", {}, ONE, TWO),
    ("query", {}, ["preprocess", "dq"], ["preprocess", "dq"]),
    ("key value", {}, ["preprocess", "dkdv"], ["preprocess", "dkdv"]),
    ("query value", dict(softcap=1.0, grads="out and weights"), ONE, TWO),
    ("query bias", dict(bias="keys", softcap=1.0, dropout=0.3), ONE, TWO),
    ("key", dict(softcap=1.0, grads="out and weights"), ["preprocess", "dkdv"], ["preprocess", "dkdv"]),
    ("query key value", dict(D=129), TWO, TWO),
    ("query key value", dict(Dv=129), TWO, TWO),
    ("query key value", dict(D=128, Dv=1), ONE, TWO),
    ("query key value alibi_slopes", dict(alibi="own"), TWO, TWO),  # a gradient that needs the sum over a whole row
    ("query key value sinks", dict(sinks=True), TWO, TWO),
    ("query key value bias", dict(bias="rows"), TWO, TWO),
    ("query key value bias", dict(bias="one a head", Sk=1), TWO, TWO),
    ("query key value", dict(alibi="own", sinks=True, bias="rows"), ONE, TWO),
    ("bias", dict(bias="rows"), ["preprocess", "dq"], ["preprocess", "dq"]),
    ("bias", dict(bias="keys"), ["preprocess", "dkdv"], ["preprocess", "dkdv"]),
    ("bias", dict(bias="pairs"), ["preprocess", "dq"], ["preprocess", "dq"]),
    ("bias", dict(bias="batch"), ["preprocess", "dbias"], ["preprocess", "dbias"]),
    ("bias", dict(bias="rank 2"), ["preprocess", "dbias"], ["preprocess", "dbias"]),
    ("bias", dict(bias="one a head"), ["preprocess", "dq"], ["preprocess", "dq"]),
    ("value bias", dict(bias="pairs"), ["preprocess", "dkdv"], ["preprocess", "dkdv"]),
    ("query bias", dict(bias="pairs"), ["preprocess", "dq"], ["preprocess", "dq"]),
    ("query key value bias", dict(bias="pairs"), ONE, TWO),
    ("query key value bias", dict(bias="keys"), ONE, TWO),
    ("query key value bias", dict(bias="batch"), [*ONE, "dbias"], [*TWO, "dbias"]),
    ("sinks", dict(sinks=True), ["preprocess", "dq"], ["preprocess", "dq"]),
    ("key alibi_slopes", dict(alibi="shared"), TWO, TWO),
]
NAMES = ("query", "key", "value", "bias", "alibi_slopes", "sinks")


@pytest.fixture
def names(launched):
    """Return a function that lists the launched kernels, except for those that prepare masks."""
    return lambda: [name for name, _ in launched if name not in ("block_mask", "tile_lists")]


@pytest.mark.parametrize("same_each_time", [False, True])
@pytest.mark.parametrize("needed, fields, one, two", LAUNCHED, ids=str)
@pytest.mark.one_in(11)
def test_only_the_gradients_asked_for_are_computed(needed, fields, one, two, same_each_time, device, names, passes):
    if device == "cuda":
        pytest.skip("what is launched is the same, and each of these compiles for long")
    case = Case("subset", B=2, Sq=33, Sk=33)._replace(**fields)
    tensors, options = case.draw(device)
    grads = case.grads if "weights" in case.grads else "out"
    inputs = {name: {**tensors, **options}.get(name) for name in NAMES}
    inputs = {name: x.detach().requires_grad_(name in needed.split()) for name, x in inputs.items() if x is not None}
    results = fa.attention(**options | inputs, return_weights="weights" in grads, backend="triton")
    results = results if isinstance(results, tuple) else (results,)
    passes(1 + same_each_time)
    torch.autograd.backward(results, [tensors["out"], tensors["weights"]][: len(results)])
    weights = ["weights"] * (len(results) - 1)
    assert names() == ["forward", *weights, *(two if same_each_time else one)]
    found = {name: x.grad for name, x in inputs.items() if x.grad is not None}
    assert set(found) == set(needed.split())
    others = with_gradients(fa.reference.eager, tensors, options, grads)
    assert_close(others | found, tensors, options, grads)


TOGETHER = [case for case in cases.TRIPLES if case.dtype != torch.float64][::8]
FEW = [case if case.dtype != torch.float64 else case._replace(dtype=torch.float32) for case in cases.covering(6)]
ALONE = [case for case in cases.SINGLE + cases.SHAPES if case.dtype == torch.float32]


@pytest.mark.parametrize("case", sample.named(FEW) + sample.matrix(*sample.named(ALONE + TOGETHER)))
@pytest.mark.one_in(9)
def test_two_passes(case, device, poison, two_passes, names):
    if device == "cuda" and case in FEW + TOGETHER:
        pytest.skip("each compiles for long, and test_kernels has them in one pass")
    assert_case(case, device, backend="triton")
    assert "one_pass" not in names()


@pytest.fixture
def shuffled(monkeypatch):
    """Return a function: shuffled(seed) makes later launches run their programs in random order."""
    upstream = pytest.importorskip("triton.runtime.interpreter", reason="kernels need Triton")
    builder = upstream.interpreter_builder
    set_dim, set_index = builder.set_grid_dim, builder.set_grid_idx

    def shuffle(seed):
        order = []

        def dim(x, y, z):
            order[:] = range(x)
            random.Random(seed).shuffle(order)
            return set_dim(x, y, z)

        monkeypatch.setattr(builder, "set_grid_dim", dim)
        monkeypatch.setattr(builder, "set_grid_idx", lambda x, y, z: set_index(order[x], y, z))

    return shuffle


ORDERED = [  # at least three visible blocks of keys (a bias hides half): with two, 0 + a + b equals 0 + b + a
    Case("plain", Sq=17, Sk=101, Hq=2, Hkv=1, D=24, causal=True),
    Case("bias of keys", Sq=17, Sk=205, Hq=2, Hkv=1, bias="keys"),
    Case("sums of rows", Sq=17, Sk=101, Hq=1, Hkv=1, bias="rows", alibi="own", sinks=True),
    Case("bias over heads", Sq=17, Sk=205, bias="batch"),
    Case("bias of pairs", Sq=21, Sk=135, bias="pairs", window=(90, 60)),
    Case("masks", Sq=17, Sk=101, mask="batch", key_mask="own", dropout=0.2),
    Case("weights", Sq=17, Sk=101, grads="weights", softcap=2.0),
]


@pytest.mark.parametrize("case", ORDERED, ids=lambda case: case.name)
@pytest.mark.parametrize("passed", [1, 2])
@pytest.mark.one_in(7)
def test_in_which_order_programs_run_is_seen_in_dq_alone(passed, case, shuffled, device, passes):
    """The order of programs changes only the rounding of dq, and nothing if torch wants determinism."""
    if device == "cuda":
        pytest.skip("a GPU has orders of its own: test_gpu")
    passes(passed)
    tensors, options = case.draw(device)
    found = []
    for seed in range(3):
        shuffled(seed)
        found.append(with_gradients(fa.attention, tensors, options, case.grads, backend="triton"))
    differ = {name for got in found[1:] for name in got if not torch.equal(got[name], found[0][name])}
    assert differ == ({"query"} if passed == 1 and case.name != "sums of rows" else set())
    assert_close(found[-1], tensors, options, case.grads)


@pytest.mark.parametrize("fields", [{}, dict(causal=True), dict(mask="batch"), dict(key_mask="own")], ids=str)
@pytest.mark.one_in(2)
def test_what_is_past_the_last_key_gives_nothing_to_dq(fields, device):
    """Keys past the end add nothing to dq, although their score of 0 is far above all real scores."""
    case = Case("past", B=2, Sq=40, Sk=41, dtype=torch.float16)._replace(**fields)
    tensors, options = case.draw(device)
    tensors["query"].abs_().add_(3), tensors["key"].abs_().add_(3).neg_()
    options |= dict(scale=1.0)
    if "mask" in options:
        options["mask"][:] = True
        options["mask"][..., :16] = False
    lse = assert_computes(fa.attention, tensors, options, backend="triton")["lse"]
    assert lse[lse > float("-inf")].max() < -100


def test_sums_over_rows_are_float64(device):
    """Large gradients of two equal rows cancel in the gradient of a sink."""
    query, key = torch.randn(1, 1, 3, 16, device=device), torch.randn(1, 1, 5, 16, device=device)
    query[:, :, 2] = query[:, :, 0]
    incoming, found = torch.randn(1, 1, 3, 16, device=device), []
    for large in (0.0, 2.0**30):
        incoming[:, :, 0], incoming[:, :, 2] = large, -large
        sinks = torch.zeros(1, device=device, requires_grad=True)
        out = fa.attention(query, key, key, sinks=sinks, backend="triton")
        found.append(torch.autograd.grad(out, sinks, incoming)[0])
    torch.testing.assert_close(*found)
