"""Tests of the contract besides the tolerance: unchanged bits, empty rows, sizes of 0, extreme numbers, layouts."""

import pytest
import torch

import fusedattn as fa
from fusedattn.testing.compare import INPUTS, LEARNED, with_gradients

from .. import sample
from ..cases import Case
from ..close import assert_close, assert_like
from ..inside import same


@pytest.fixture(params=["naive", "triton", "cpu"])
def backend(request, device):
    return request.param


def results(case, device, backend, tensors=None, options=None):
    drawn, asked = case.draw(device)
    return with_gradients(fa.attention, tensors or drawn, options or asked, case.grads, backend=backend)


def same_bits(a, b):
    return {name: torch.equal(a[name], b[name]) for name in a} == dict.fromkeys(a, True)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("kind", ["key_mask", "query_mask"])
def test_hidden_tokens_change_no_bit(kind, device, backend):
    case = Case("hidden", B=2, Sq=33, Sk=33, causal=True, grads="out, lse and weights", **{kind: "own"})
    tensors, options = case.draw(device)
    plain = {name: x.nan_to_num(0.5, 0.5, 0.5) for name, x in tensors.items()}
    wild, tame = results(case, device, backend), results(case, device, backend, plain, options)
    assert same_bits(wild, tame)
    hidden, names = ~options[kind], ("key", "value") if kind == "key_mask" else ("query", "out")
    for name in names:
        assert (wild[name].movedim(1, 2)[hidden] == 0).all()


@pytest.mark.parametrize("options", [{}, dict(softcap=3.0), dict(sinks=torch.zeros(2))], ids=["plain", "cap", "sinks"])
@pytest.mark.parametrize("name, value", [("query", "nan"), ("key", "nan"), ("key", "inf")])
@pytest.mark.parametrize("backend", ["naive", "triton"])  # "cpu" promises less: see the contract
def test_nan_reaches_the_rows_that_see_it_and_no_others(name, value, options, device, backend):
    tensors = {each: torch.ones(1, 2, 40, 16, device=device) for each in ("query", "key", "value")}
    tensors[name][0, 1, 20, 3] = float(value)
    options = {each: x.to(device) if isinstance(x, torch.Tensor) else x for each, x in options.items()}
    out, lse = fa.attention(**tensors, **options, causal=True, return_lse=True, backend=backend)
    reached = torch.zeros(1, 2, 40, dtype=torch.bool, device=device)
    reached[0, 1, 20 : 21 if name == "query" else None] = True
    if options.keys() == {"softcap"} and value == "inf":
        assert out.isfinite().all() and lse.isfinite().all()  # tanh(inf) is 1
    else:
        assert torch.equal(lse.isfinite(), ~reached) and torch.equal(out.isnan().all(-1), reached)
        assert torch.equal(out.isnan().any(-1), reached)


@pytest.mark.parametrize("length", [8, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_padding_on_the_left_may_be_nan(dtype, length, device, backend):
    """Rows of padding see nothing in a causal call, so they are 0, and their weights too, whatever their query is."""
    real = torch.arange(length, device=device) >= torch.tensor([[3], [0]], device=device)
    inputs = torch.randn(3, 2, 2, length, 16, device=device, dtype=dtype)
    inputs.masked_fill_(~real[:, None, :, None], float("nan"))
    for more in ({}, dict(sinks=torch.randn(2, device=device))):
        options = dict(causal=True, key_mask=real, return_lse=True, return_weights=True, backend=backend) | more
        wild, tame = (fa.attention(*x, **options) for x in (inputs, inputs.nan_to_num()))
        assert all(map(torch.equal, wild, tame))


def test_hidden_rows_have_no_weight_of_a_key_that_is_nan(device, backend):
    inputs = torch.randn(3, 1, 1, 4, 16, device=device)
    inputs[1, 0, 0, 1, 0] = float("nan")
    real = torch.tensor([True, True, False, False], device=device)
    out, weights = fa.attention(*inputs, query_mask=real, return_weights=True, backend=backend)
    assert (out[0, 0, 2:] == 0).all() and (weights[0, 0, 2:] == 0).all()


def test_a_row_that_sees_nothing_is_zero_and_has_zero_gradient(device, backend):
    case = Case("empty rows", Sq=40, Sk=10, causal=True)  # rows before the first key
    tensors, options = case.draw(device)
    tensors["lse"][:, :, :30] = float("inf")  # as a loss of lse ** 2 gives for -inf
    got = results(case, device, backend, tensors, options)
    assert (got["out"][:, :, :30] == 0).all() and (got["query"][:, :, :30] == 0).all()
    assert (got["lse"][:, :, :30] == float("-inf")).all() and got["lse"][:, :, 30:].isfinite().all()
    assert all(got[name].isfinite().all() for name in ("out", *INPUTS))


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_incoming_gradients_of_hidden_rows_are_ignored(packed, device, backend):
    """Incoming gradients of hidden rows change no gradient, not even the sink's, which such a row's lse equals."""
    inputs = [torch.randn(2, 2, 7, 4, device=device) for _ in range(3)]
    real = torch.rand(2, 7, device=device) < 0.5
    learned = dict(sinks=torch.randn(2, device=device), alibi_slopes=torch.rand(2, device=device))
    learned["bias"] = torch.randn(2, 2, 7, 7, device=device)
    function, options = fa.attention, dict(query_mask=real, backend=backend, return_lse=True, return_weights=True)
    if packed:
        offsets = torch.tensor([0, 7, 14], dtype=torch.int32, device=device)
        inputs = [x.transpose(1, 2).flatten(0, 1) for x in inputs]
        function, options["query_mask"] = fa.attention_varlen, real.flatten()
        options |= dict(cu_seqlens_q=offsets, cu_seqlens_k=offsets)
    inputs = [x.requires_grad_() for x in (*inputs, *learned.values())]
    results = function(*inputs[:3], **options, **dict(zip(learned, inputs[3:], strict=True)))
    hidden = ~options["query_mask"]  # (B, Sq); packed (T,), for out (T, H, Dv), lse (H, T), weights (H, T, S)
    if packed:
        rows = [hidden[:, None, None], hidden[None], hidden[None, :, None]]
    else:
        rows = [hidden[:, None, :, None], hidden[:, None], hidden[:, None, :, None]]
    incoming = [torch.randn_like(x) for x in results]

    def grads(hidden, seen):
        pairs = zip(rows, incoming, strict=True)
        given = [x.where(~row, hidden) if seen else hidden.where(row, 0 * x) for row, x in pairs]
        return torch.autograd.grad(results, inputs, given, retain_graph=True)

    nan = torch.tensor(float("nan"), device=device)
    assert all((grad == 0).all() for grad in grads(nan, seen=False))
    assert all(torch.equal(a, b) for a, b in zip(grads(nan, seen=True), grads(nan * 0 + 1, seen=True), strict=True))


@pytest.mark.parametrize("sink", [None, 0.5, float("-inf")])
def test_rows_without_a_visible_key(sink, device, backend):
    """Their lse is the sink, which then gets the gradient of the lse, unless query_mask hides the row."""
    case = Case("all hidden", grads="out, lse and weights")
    tensors, _ = case.draw(device)
    no_keys = tensors | {name: tensors[name][:, :, :0] for name in ("key", "value")}
    no_keys["weights"] = tensors["weights"][..., :0]
    sinks = {} if sink is None else dict(sinks=torch.full((case.Hq,), sink, device=device))
    lse = torch.full_like(tensors["lse"], float("-inf") if sink is None else sink)
    for given, options in (
        (tensors, dict(mask=torch.zeros(37, 45, dtype=torch.bool, device=device))),
        (tensors, dict(key_mask=torch.zeros(1, 45, dtype=torch.bool, device=device))),
        (tensors, dict(query_mask=torch.zeros(1, 37, dtype=torch.bool, device=device))),
        (no_keys, {}),
    ):
        got = results(case, device, backend, given, options | sinks)
        assert all((got[name] == 0).all() for name in ("out", "weights", *INPUTS))
        torch.testing.assert_close(got["lse"], lse)
        if sinks:
            passed = sink > float("-inf") and "query_mask" not in options
            torch.testing.assert_close(got["sinks"], tensors["lse"].sum((0, 2)) * passed)


EVERYTHING = dict(bias="pairs", softcap=2.0, alibi="own", dropout=0.3, mask="batch", grads="out, lse and weights")
EMPTY = dict(B=0), dict(Hq=0, Hkv=0), dict(Sq=0), dict(Sk=0)


@pytest.mark.parametrize("sizes, options", sample.product(EMPTY, [{}, EVERYTHING, dict(key_mask="own")]))
def test_sizes_of_zero(sizes, options, device, backend, poison):
    lacks = ("softcap", "dropout") if backend == "cpu" else ()
    case = Case("zero", **sizes, **{name: x for name, x in options.items() if name not in lacks})
    got = results(case, device, backend)
    assert all((got[name] == 0).all() for name in LEARNED if name in got)
    assert got["out"].shape == (case.B, case.Hq, case.Sq, case.Dv)
    assert got["lse"].shape == (case.B, case.Hq, case.Sq)
    assert all((got[name] == 0).all() for name in ("out", *INPUTS))
    assert (got["lse"] == float("-inf")).all()


@pytest.mark.parametrize("scale", [0.25, -0.25])
def test_equal_scores_of_any_size_share_their_weight(scale, device, backend):
    """The weights of n equal keys are exactly 1 / n, even if float32 cannot hold score + log(n)."""
    for size in (1e2, 1e4, 3e5, 1.2e7):
        tensors, options = Case("ties", Sq=20, Sk=24, scale=scale).draw(device)
        tensors["query"], tensors["key"] = torch.full_like(tensors["query"], size), torch.full_like(tensors["key"], 1.0)
        got = results(Case("ties"), device, backend, tensors, options)
        mean = tensors["value"].double().mean(2, keepdim=True).expand_as(got["out"])
        grad = tensors["out"].double().mean(2, keepdim=True).expand_as(got["value"]) * (20 / 24)
        assert_like([got["out"], got["value"]], [mean, grad])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scores_up_to_a_million_meet_the_tolerance(dtype, device, backend):
    case = Case("large", dtype=dtype, scale=1.0, grads="out")
    tensors, options = case.draw(device)
    # Multiples of 1024: each product and sum is exact in float32.
    tensors["query"] = (tensors["query"] * 4).round().clamp(-8, 8) * 32
    tensors["key"] = (tensors["key"] * 4).round().clamp(-8, 8) * 32
    largest = (tensors["query"].float() @ tensors["key"].float().mT).abs().max()
    assert 2**17 < largest <= 2**20
    got = results(case, device, backend, tensors, options)
    assert_close(got, tensors, options, case.grads)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("sinks", [False, True])
def test_a_large_common_part_of_scores_cancels(sinks, sign, device, backend):
    case = Case("common part", Sk=150, scale=1.0, sinks=sinks)
    tensors, options = case.draw(device)
    for name, common in ("query", 512.0), ("key", sign * 512.0):  # each score is exact in float32
        tensors[name] = (tensors[name] * 4).round().clamp(-8, 8) / 4
        tensors[name][..., 0] = common
    if sinks:
        options["sinks"] = options["sinks"].round() + 8 + sign * 2.0**18
    got = results(case, device, backend, tensors, options)
    assert_close(got, tensors, options, case.grads)


@pytest.mark.parametrize("size, sign", sample.one_in(3, sample.product([1e5, 133120.0, 1e10, 1e15, 4e18], [1, -1])))
def test_larger_scores_are_finite(size, sign, device, backend):
    tensors, _ = Case("huge", Sq=20, Sk=24).draw(device)
    tensors["query"] = torch.full_like(tensors["query"], size)
    tensors["key"] = torch.full_like(tensors["key"], sign * size)
    tensors["key"][:, :, 5] *= 1.05
    tensors["query"][:, :, 10:] *= -1
    got = results(Case("huge"), device, backend, tensors, dict(scale=1.0))
    assert all(x.isfinite().all() for x in got.values())
    assert same_bits(got, results(Case("huge"), device, backend, tensors, dict(scale=1.0)))
    # One key outweighs all others.
    assert_like(got["out"][:, :, 0 if sign > 0 else 10], tensors["value"][:, :, 5].double())


@pytest.mark.parametrize("dims", ["bhsd", "bshd", "sbhd", "hbsd"])
def test_results_lie_in_memory_as_their_inputs_do(dims, device, backend):
    axes = ["bhsd".index(axis) for axis in dims]
    back = [axes.index(axis) for axis in range(4)]

    def draw(*shape):
        return torch.randn([shape[axis] for axis in axes], device=device).permute(back).requires_grad_()

    query, key, value = draw(2, 4, 9, 16), draw(2, 2, 11, 16), draw(2, 2, 11, 8)
    out = fa.attention(query, key, value, backend=backend)
    grads = torch.autograd.grad(out.sum(), query) if backend == "triton" else ()  # autograd chooses naive's strides
    for result in (out, *grads):
        in_memory = [result.shape[axis] for axis in axes]
        assert result.stride() == torch.empty(in_memory).permute(back).stride()


def test_a_dimension_of_one_element_does_not_change_the_order(device, backend):
    query = torch.randn(1, 5, 3, 16, device=device).permute(2, 0, 1, 3)  # strides (16, 240, 48, 1)
    out = fa.attention(query, query, query, backend=backend)
    assert [out.stride(axis) for axis in (0, 2, 3)] == [query.stride(axis) for axis in (0, 2, 3)]


def test_lower_ranks_are_one_head_and_one_batch(device, backend):
    query, key, value = (torch.randn(3, 1, 20, 16, device=device) for _ in range(3))
    mask, key_mask = torch.rand(3, 20, 20, device=device) < 0.7, torch.rand(3, 20, device=device) < 0.7
    options = dict(return_lse=True, backend=backend)
    want, want_lse = fa.attention(query, key, value, mask=mask[:, None], key_mask=key_mask, **options)
    out, lse = fa.attention(query[:, 0], key[:, 0], value[:, 0], mask=mask, key_mask=key_mask, **options)
    if (backend, device) == ("naive", "cuda"):
        pytest.skip("cuBLAS sums one head in another order")
    same([out, lse], [want[:, 0], want_lse[:, 0]])
    out, lse = fa.attention(*(x[1, 0] for x in (query, key, value)), mask=mask[1], key_mask=key_mask[1], **options)
    same([out, lse], [want[1, 0], want_lse[1, 0]])


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("side", sample.one_in(3, sample.product([2**31, 2**31 - 1, 2**70])))
def test_a_window_wider_than_any_tensor_is_unbounded(side, device, backend):
    tensors, _ = Case("wide", Sq=40, Sk=20).draw(device)
    for window, like in (((side, side), None), ((side, 0), (None, 0)), ((None, side), None)):
        got = results(Case("wide"), device, backend, tensors, dict(window=window))
        assert same_bits(got, results(Case("wide"), device, backend, tensors, dict(window=like)))


@pytest.mark.parametrize("scale", sample.one_in(2, sample.product([1e-45, 1e-38, 3e38, 1e30, -3e38, 1e-30])))
def test_scales_at_the_ends_of_float32(scale, device, backend):
    tensors, _ = Case("ends", spread=min(1 / abs(scale), 1.0), grads="out").draw(device)
    got = results(Case("ends", grads="out"), device, backend, tensors, dict(scale=scale))
    assert_like(got["out"], lambda: fa.reference.eager(*(tensors[name] for name in INPUTS), scale=scale))
    assert all(x.isfinite().all() for x in got.values())
