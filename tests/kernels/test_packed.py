"""Tests that packed sequences are independent: each has the results of a separate call."""

import pytest
import torch

import fusedattn as fa

from .. import cases, sample
from ..cases import Case
from ..close import assert_computes, assert_like
from ..guard import PLAUSIBLE, Guard
from ..inside import leaves, same
from ..sequences import attention_varlen, draw_packed, offsets

# (lengths in rows, lengths in keys) of the sequences; tiles of the interpreter are 32 by 16.
PACKINGS = [
    ((7, 0, 37, 5), (45, 4, 13, 0)),
    ((32, 1, 16), (32, 1, 16)),
    ((20, 20), (13, 33)),
    ((3, 33, 0, 0, 64), (17, 16, 0, 1, 48)),
]
# options that set the lengths are left out
ALONE = {name: options for name, options in cases.FEATURES.items() if not {"Sq", "Sk", "expanded"} & set(options)}
ALONE |= {f"D {D} Dv {Dv}": dict(D=D, Dv=Dv) for D, Dv in cases.WIDTHS}
TOGETHER = [case for case in cases.OPTION_PAIRS if case.Sq == 37 and case.Sk == 45 and not case.expanded]
FEW = cases.covering(8, cases.OPTIONS)
PACKED_FEW = [pytest.param(len(case.name), case, id=case.name) for case in FEW]  # the name's length chooses the packing
PACKED_TOGETHER = [pytest.param(number, case, id=case.name) for number, case in enumerate(TOGETHER)]


def draw(case, number, device):
    """Return (rows, keys, tensors, options) of a case with lengths from PACKINGS, of which `number` picks one."""
    rows, keys = PACKINGS[number % len(PACKINGS)]
    tensors, options = case._replace(B=len(rows), Sq=max(rows), Sk=max(keys)).draw(device)
    return rows, keys, tensors, options


def run(case, number, device, backend):
    rows, keys, tensors, options = draw(case, number, device)
    assert_computes(attention_varlen(rows, keys, backend), tensors, options, case.grads, lengths=(rows, keys))


def named(names):
    return [pytest.param(number, name, id=name) for number, name in enumerate(names)]


@pytest.mark.parametrize(("number", "name"), sample.one_in(5, named(["plain", *ALONE])))
def test_an_option_alone(number, name, device, poison):
    dtype = cases.DTYPES[number % (4 if device == "cpu" else 3)]
    run(Case(name, dtype=dtype)._replace(**ALONE.get(name, {})), number, device, "triton")


@pytest.mark.parametrize(("number", "name"), sample.one_in(9, named(["plain", *ALONE])))
def test_an_option_alone_naively(number, name):
    run(Case(name, dtype=torch.float32)._replace(**ALONE.get(name, {})), number + 1, "cpu", "naive")


@pytest.mark.parametrize(("number", "case"), PACKED_FEW + sample.matrix(*PACKED_TOGETHER[::18]))
@pytest.mark.one_in(12)
def test_options_together(number, case, device, poison):
    if case.dtype == torch.float64 and device == "cuda":
        case = case._replace(dtype=torch.float16)
    run(case, number, device, "triton")


@pytest.mark.matrix
@pytest.mark.parametrize("number", range(1, len(TOGETHER), 9), ids=lambda number: TOGETHER[number].name)
def test_options_together_naively(number):
    run(TOGETHER[number]._replace(dtype=torch.float32), number, "cpu", "naive")


@pytest.mark.parametrize("options", [{}, dict(causal=True), dict(window=(5, 3), dropout_p=0.3, seed=3)], ids=str)
@pytest.mark.one_in(3)
def test_equal_lengths_are_a_batch_bit_for_bit(options, device, two_passes):
    query, key, value, grad = draw_packed((33, 33), (33, 33), device)
    cu = offsets((33, 33), device)
    results = fa.attention_varlen(query, key, value, cu, cu, return_lse=True, backend="triton", **options)
    grads = torch.autograd.grad(results[0], (query, key, value), grad)
    batch = [x.detach().unflatten(0, (2, 33)).transpose(1, 2).requires_grad_() for x in (query, key, value)]
    out, lse = fa.attention(*batch, return_lse=True, backend="triton", **options)
    whole = torch.autograd.grad(out, batch, grad.unflatten(0, (2, 33)).transpose(1, 2))
    same([results[0], *grads], [x.transpose(1, 2).flatten(0, 1) for x in (out, *whole)])
    same(results[1], lse.transpose(0, 1).flatten(1, 2))


@pytest.mark.parametrize("way", ["two passes", "one pass", "copy engine", "naive"])
@pytest.mark.one_in(2)
def test_a_sequence_does_not_see_its_neighbours(way, device, passes, tiles):
    backend = "naive" if way == "naive" else "triton"
    passes(1 + (way == "two passes"))
    if way == "copy engine" and device == "cpu":
        tiles.change("one_pass", bulk=True)
    rows, keys = (20, 33, 9), (17, 40, 16)
    query, key, value, grad = draw_packed(rows, keys, device, dims=(20, 8))
    cu = offsets(rows, device), offsets(keys, device)

    def middle(*inputs):
        inputs, rows, keys = leaves(*inputs), slice(20, 53), slice(17, 57)
        results = fa.attention_varlen(*inputs, *cu, causal=True, return_lse=True, return_weights=True, backend=backend)
        assert all(x.is_contiguous() for x in results)
        dq, dk, dv = torch.autograd.grad(results[0], inputs, grad)
        return [results[0][rows], *(x[:, rows] for x in results[1:]), dq[rows], dk[keys], dv[keys]]

    want = middle(query, key, value)
    for x, lengths in zip((query, key, value), (rows, keys, keys), strict=True):
        x.data[: lengths[0]] = float("nan")
        x.data[lengths[0] + lengths[1] :] = float("inf")
    same(middle(query, key, value), want)


@pytest.mark.parametrize("backend", ["triton", "naive", None])
def test_maximum_lengths_are_optional(backend, device):
    rows, keys = (5, 0, 20), (9, 3, 12)
    query, key, value, _ = draw_packed(rows, keys, device)
    cu = offsets(rows, device), offsets(keys, device)
    call = dict(return_lse=True, return_weights=True, causal=True, backend=backend)
    want = fa.attention_varlen(query, key, value, *cu, **call)
    assert want[2].shape == (4, 25, 12)
    got = fa.attention_varlen(query, key, value, *cu, max_seqlen_q=50, max_seqlen_k=60, **call)
    naively = lambda: fa.attention_varlen(query, key, value, *cu, **call | dict(backend="naive"))  # noqa: E731
    for results in ((*got[:2], got[2][..., :12]), want):
        assert_like(results, naively)
    assert not got[2][..., 12:].any()
    assert not want[2][:, :5, 9:].any()  # the first sequence has 9 keys
    assert_like(want[2].sum(-1), (want[1] > float("-inf")).double())


@pytest.mark.parametrize(
    ("rows", "keys"), [((), ()), ((0, 0), (0, 0)), ((0, 0), (3, 0)), ((3, 2), (0, 0)), ((0,), (0,))], ids=str
)
def test_empty_sequences(rows, keys, backend, device, poison):
    query, key, value, grad = draw_packed(rows, keys, device)
    cu, options = (offsets(rows, device), offsets(keys, device)), dict(return_lse=True, return_weights=True)
    out, lse, weights = fa.attention_varlen(query, key, value, *cu, **options, backend=backend)
    assert out.shape == grad.shape and lse.shape == (4, sum(rows))
    assert weights.shape == (4, sum(rows), max(keys, default=0))
    assert not out.any() and (lse == float("-inf")).all()
    for x, found in zip((query, key, value), torch.autograd.grad(out, (query, key, value), grad), strict=True):
        assert found.shape == x.shape and not found.any()


def test_results_lie_as_the_query_does(device):
    rows = (5, 20)
    query, key, value, _ = draw_packed(rows, rows, device)
    cu = offsets(rows, device)
    for made in (query, query.detach().transpose(0, 1).contiguous().transpose(0, 1)):
        out = {name: fa.attention_varlen(made, key, value, cu, cu, backend=name) for name in ("triton", "naive")}
        assert out["triton"].stride() == out["naive"].stride() == torch.empty_like(made[..., :8]).stride()


@pytest.mark.parametrize("rows, token_masks", [(5, ()), (3, ("key_mask",))], ids=["outside", "past the bound"])
def test_rows_without_results_change_no_shared_gradient(rows, token_masks, device, unchecked, poison):
    *inputs, grad = draw_packed((5, 9), (5, 9), device)
    (slopes, sinks), cu = leaves(*torch.rand(2, 4, device=device)), offsets((5,), device)
    options = dict(alibi_slopes=slopes, sinks=sinks, max_seqlen_q=3, max_seqlen_k=5, align="top_left")
    options |= dict.fromkeys(token_masks, torch.ones(14, dtype=torch.bool, device=device))

    def found(backend):
        out = fa.attention_varlen(*inputs, cu, cu, **options, backend=backend)
        return torch.autograd.grad(out[:rows], (slopes, sinks), grad[:rows])

    assert_like(found("triton"), found, "naive")


# A mask hides some blocks and shows others in full. In the latter, token masks hide tokens.
TOKENS = {"pairs alone": (), "keys": ("key_mask",), "queries": ("query_mask",), "both": ("key_mask", "query_mask")}


@pytest.mark.parametrize("tokens, planned", sample.one_in(3, sample.product(TOKENS, [False, True])))
def test_blocks_that_are_fully_visible_or_hidden(tokens, planned, device, two_passes):
    rows, keys = (40, 33), (50, 20)
    query, key, value, grad = draw_packed(rows, keys, device)
    mask = torch.rand(40, 50, device=device) < 0.5
    mask[:, 16:32], mask[:, :16], mask[16:, 32:48] = False, True, True
    lengths = dict(query_mask=sum(rows), key_mask=sum(keys))
    options = {name: torch.rand(lengths[name], device=device) < 0.8 for name in TOKENS[tokens]}
    for x, name, hidden in ((query, "query_mask", "nan"), (key, "key_mask", "nan"), (value, "key_mask", "inf")):
        if name in options:
            x.data[~options[name]] = float(hidden)
    tensors = query, key, value, offsets(rows, device), offsets(keys, device)

    def found(backend):
        given = fa.plan(mask) if planned and backend == "triton" else mask
        out = fa.attention_varlen(*tensors, mask=given, backend=backend, causal=planned, **options)
        return [out, *torch.autograd.grad(out, tensors[:3], grad)]

    assert_like(found("triton"), found, "naive")


# The first offsets claim more rows than there are.
WRONG = [(0, 80, 0, 80), (0, 30, 10, 80), (5, 10, 20, 30), (-9, 50, 90, 2**31 - 1), (0, 0, 90, 20), (80, 30, 20, 0)]


@pytest.mark.parametrize("wrong, most", sample.one_in(9, sample.product(WRONG, [None, (17, 19), (0, 19), (17, 0)])))
def test_wrong_offsets_write_nothing_outside(wrong, most, device, unchecked, monkeypatch):
    if device == "cuda":
        pytest.skip("test_gpu_packed tests this")
    guard = Guard(PLAUSIBLE)
    *inputs, grad = (guard.inside(x).requires_grad_() for x in draw_packed((40, 40), (40, 40)))
    cu = torch.tensor(wrong, dtype=torch.int32)
    options = dict(alibi_slopes=torch.rand(3, 4), sinks=torch.rand(4)) if most is None else {}
    options |= dict(causal=True, return_lse=True, query_mask=torch.rand(80) < 0.9, backend="triton")
    if most is not None:
        options |= dict(mask=torch.rand(3, 1, *most) < 0.5, bias=torch.rand(1, 4, *most), key_mask=torch.rand(80) < 0.9)
        options |= dict(max_seqlen_q=most[0], max_seqlen_k=most[1], return_weights=True)
    learned = [*inputs, *(options[x].requires_grad_() for x in ("bias", "alibi_slopes", "sinks") if x in options)]
    guard.allocates(monkeypatch)
    out, lse, *weights = fa.attention_varlen(*inputs, cu, cu.flip(0), **options)
    torch.autograd.grad((out, lse, *weights), learned, (grad, lse.detach(), *map(torch.ones_like, weights)))
    guard.check()
