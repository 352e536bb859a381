"""Tests plans of mask functions: they equal the dense mask of the same function, in all backends."""

import copy
import functools
import io
import itertools
import pickle

import numpy
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import create_block_mask, create_mask

import fusedattn as fa
from fusedattn.testing.compare import with_gradients

from ..cases import Case
from ..inside import Seen
from ..mistakes import assert_named, bools, longs, of_values, wrong

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies
pytestmark = pytest.mark.usefixtures("deterministic")

IDS = [0, 0, 0, 1, 1, -1, -1, 2, 2, 2, 2, -1] * 6
SPANS, LENGTHS, MASKS = [IDS, IDS[::-1]], [3, 20], fa.masks
TABLE = [[True, False, True, False], [False, False, True, True]]
TABLES = [TABLE, TABLE[::-1]]
# name, function from `fa.masks`, the formula of one pair
PATTERNS = (
    ("causal", lambda: MASKS.causal, lambda b, h, i, j: i - j >= 0),
    ("window", lambda: MASKS.sliding_window(20, 3), lambda b, h, i, j: -3 <= i - j <= 20),
    ("keys after", lambda: MASKS.sliding_window(-1, 5), lambda b, h, i, j: 1 <= j - i <= 5),
    ("prefix", lambda: MASKS.prefix(torch.tensor(19)), lambda b, h, i, j: j in range(19)),
    ("prefixes", lambda: MASKS.prefix(torch.tensor(LENGTHS)), lambda b, h, i, j: j < LENGTHS[b]),
    ("documents", lambda: MASKS.documents(torch.tensor(IDS)), lambda b, h, i, j: IDS[i] == IDS[j]),
    ("spans", lambda: MASKS.spans(torch.tensor(SPANS)), lambda b, h, i, j: SPANS[b][i] == SPANS[b][j] >= 0),
    ("dilated", lambda: MASKS.dilated(3), lambda b, h, i, j: abs(i - j) in range(0, 100, 3)),
    ("table", lambda: MASKS.block_sparse(torch.tensor(TABLE), 20), lambda b, h, i, j: TABLE[i // 20][j // 20]),
    ("tables", lambda: MASKS.block_sparse(torch.tensor(TABLES), 20), lambda b, h, i, j: TABLES[h][i // 20][j // 20]),
    ("or", lambda: MASKS.or_(MASKS.causal, MASKS.prefix(9)), lambda b, h, i, j: j <= max(i, 8)),
    ("and", lambda: MASKS.and_(MASKS.causal, MASKS.not_(MASKS.prefix(9))), lambda b, h, i, j: 9 <= j <= i),
    ("nothing", lambda: lambda b, h, i, j: (i < 0) & (j < 0), lambda *at: False),
    ("all", lambda: lambda b, h, i, j: b.new_ones((), dtype=torch.bool), lambda *at: True),
)


def equal(function, mask, options=(), backends=("naive", "triton")):
    """Assert that calls with a plan of a function have the bits of calls with a mask (B, H, Sq, Sk)."""
    batch, heads, rows, keys = mask.shape
    case = Case("plan", B=batch, Hq=heads, Hkv=1, Sq=rows, Sk=keys, grads="out, lse and weights")
    tensors, _ = case.draw(mask.device)
    sizes = dict(batch=batch, heads=heads, rows=rows, keys=keys, device=mask.device)
    for backend in backends:
        got, want = (
            with_gradients(fa.attention, tensors, dict(options) | dict(mask=x), case.grads, backend=backend)
            for x in (fa.plan(function, **sizes), mask)
        )
        assert all(torch.equal(got[name], want[name]) for name in want), backend


@pytest.mark.parametrize(("name", "make", "formula"), PATTERNS, ids=[name for name, *_ in PATTERNS])
@pytest.mark.one_in(2)
def test_a_pattern_equals_its_formula(name, make, formula, device):
    with torch.device(device):
        function = make()
    places = itertools.product(range(2), range(2), range(40), range(70))
    mask = torch.tensor([formula(*place) for place in places], device=device).view(2, 2, 40, 70)
    equal(function, mask, backends=("naive", *["cpu"] * (device == "cpu")))
    if name in ("tables", "spans", "nothing"):  # kernels see bits, not patterns
        options = dict(causal=True, window=(30, None)) if name == "tables" else {}
        equal(function, mask if name == "spans" else mask[:1], options, backends=("triton",))


@hypothesis.settings(max_examples=3, deadline=None, derandomize=True, database=None)
@hypothesis.given(
    st.tuples(*[st.integers(1, 2)] * 2, *[st.integers(2, 40)] * 2),
    st.tuples(*[st.integers(-3, 3)] * 4), st.integers(1, 9), st.integers(0, 9), st.integers(0, 90),
)  # fmt: skip
def test_a_random_function(sizes, factors, period, residues, reach):
    def function(b, h, i, j):
        ramp = sum(factor * x for factor, x in zip(factors, (b, h, i, j), strict=True))
        ramped, near = ramp % period < residues, i + j < reach
        return ramped | near if reach % 2 else ramped & near

    mask = torch.tensor([bool(function(*map(torch.tensor, at))) for at in itertools.product(*map(range, sizes))])
    equal(function, mask.view(sizes))


def test_batches_rows_and_keys_of_none(device):
    for batch, rows, keys in ((0, 4, 4), (2, 0, 4), (2, 4, 0)):
        plan = fa.plan(MASKS.causal, batch=batch, rows=rows, keys=keys, device=device)
        query, key = torch.randn(batch, 2, rows, 8, device=device), torch.randn(batch, 2, keys, 8, device=device)
        assert torch.equal(fa.attention(query, key, key, mask=plan), torch.zeros_like(query))


@pytest.mark.parametrize("sizes", [dict(rows=1, keys=90), dict(rows=90, keys=1), dict(rows=1, keys=1)], ids=str)
def test_one_row_or_key_stands_for_all(sizes, device):
    query, function = torch.randn(1, 2, 90, 8, device=device), MASKS.dilated(3)
    mask = create_mask(function, None, None, sizes["rows"], sizes["keys"], device)
    plan = fa.plan(function, **sizes, device=device)
    assert plan.density == fa.plan(mask).density == pytest.approx(mask.double().mean().item())
    for backend in ("naive", "triton"):
        assert torch.equal(*(fa.attention(query, query, query, mask=x, backend=backend) for x in (plan, mask)))


@pytest.mark.parametrize("by_function", [True, False])
def test_density_counts_the_pairs_that_all_masks_show(by_function):
    rows, keys = torch.arange(130) % 3 > 0, torch.arange(200) < torch.tensor([[70], [200]])
    mask, sizes = (MASKS.dilated(2), dict(rows=130, keys=200)) if by_function else (None, {})
    plan = fa.plan(mask, keys, rows, **sizes)
    mask = ((torch.arange(130)[:, None] - torch.arange(200)) % 2 == 0) | (not by_function)
    assert plan.density == pytest.approx((mask & rows[:, None] & keys[:, None]).double().mean().item())


def test_chunks(monkeypatch):
    """A function is called for a bounded number of pairs at once, whatever the sizes."""
    monkeypatch.setattr("fusedattn.call.bits.CHUNK", 2**12)

    def function(b, h, i, j):
        return (i * 7 + j * (b + 1)) % (5 + h) == 0

    with Seen() as seen:
        plan = fa.plan(function, batch=2, heads=3, rows=200, keys=333)
    assert 2**11 < max(numel for name, numel, _ in seen.made if name == "aten.remainder.Tensor") <= 2**12
    mask = create_mask(function, 2, 3, 200, 333, "cpu")
    query, key = torch.randn(2, 3, 200, 16), torch.randn(2, 3, 333, 16)
    assert torch.equal(*(fa.attention(query, key, key, mask=x, backend="naive") for x in (plan, mask)))
    assert plan.density == pytest.approx(mask.double().mean().item())


def test_plans_of_fake_tensors():
    with FakeTensorMode():
        for x in (torch.randn(1, 2, n, 16) for n in (0, 70)):
            assert fa.attention(x, x, x, mask=fa.plan(MASKS.causal, rows=x.shape[2], keys=x.shape[2])).shape == x.shape


@pytest.mark.parametrize("numbers", [(numpy.int64(2),), (2, 3)], ids=["numpy", "dynamic"])
def test_integers_in_compiled_code(numbers):
    made = lambda n: fa.plan(MASKS.or_(MASKS.sliding_window(n, n), MASKS.prefix(n)), rows=6, keys=6)  # noqa: E731
    compiled = torch.compile(made, fullgraph=True, backend="eager")
    assert [compiled(n).density for n in numbers] == [made(n).density for n in numbers]


TABLE = torch.arange(70 * 70).view(70, 70) % 3 > 0
OF_ONE_PAIR = [
    lambda b, h, i, j: TABLE[i][j],
    lambda b, h, i, j: (j == torch.tensor([5, 66])).any(),
    lambda b, h, i, j: torch.stack([i >= j, j < 3]).any(),
    lambda b, h, i, j: TABLE[i].sum() > j,
]


@pytest.mark.parametrize("function", OF_ONE_PAIR)
def test_a_function_sees_one_pair(function):
    """Functions for FlexAttention may reduce and index in steps: each gets the indices of one pair."""
    plan, mask = fa.plan(function, rows=70, keys=70), create_mask(function, None, None, 70, 70, "cpu")
    query = torch.randn(1, 2, 70, 16)
    assert torch.equal(*(fa.attention(query, query, query, mask=x, backend="naive") for x in (plan, mask)))


@pytest.mark.parametrize(("of_blocks", "dtype"), [(20, torch.int16), (182, torch.int32)])
def test_what_a_plan_keeps(of_blocks, dtype, device):
    """Equal blocks, batches and heads are kept once. Entries of a block mask have 32 bits if 16 are too few."""
    unequal, broad = (lambda b, h, i, j: (i * i * 7919 + j * j * 104729) % 997 < 400), dict(batch=3, heads=2)
    size = fa.plan(MASKS.causal, rows=1, keys=1, device=device).mask_bits.shape[1]
    if (size, dtype) == (64, torch.int32):
        pytest.skip("takes a mask of 135 million pairs")
    sizes = dict(rows=of_blocks * size, keys=of_blocks * size - 3, device=device)
    plan = fa.plan(unequal, **sizes)
    assert plan.block_mask.dtype == dtype and len(plan.mask_bits) > (of_blocks - 1) ** 2
    query, key = (torch.randn(1, 1, n, 8, device=device) for n in (sizes["rows"], sizes["keys"]))
    rows, keys = (torch.arange(x.shape[2], device=device) for x in (query, key))
    mask = unequal(0, 0, rows[:, None], keys)
    assert torch.equal(*(fa.attention(query, key, key, mask=x, backend="naive") for x in (plan, mask)))
    few = fa.plan(MASKS.and_(MASKS.dilated(3), MASKS.causal), **sizes, **broad)
    assert few.block_mask.shape[:2] == (1, 1) and few.shape[:2] == (3, 2) and len(few.mask_bits) == 16
    with Seen() as seen:  # equal blocks are counted once
        assert 0.1 < few.density < 0.2
    assert max(numel for _, numel, _ in seen.made) < 2000 * of_blocks


def test_a_plan_moves_and_pickles(device):
    plan = fa.plan(MASKS.or_(MASKS.causal, MASKS.prefix(50)), rows=200, keys=200, device=device)
    x = torch.randn(1, 2, 200, 16, device=device)
    attend = functools.partial(fa.attention, x, x, x)
    want = attend(mask=plan)
    for same in (plan.to("cpu").to(device), pickle.loads(pickle.dumps(plan)), copy.deepcopy(plan)):
        assert torch.equal(attend(mask=same), want)
    assert plan.to("meta").block_mask.is_meta
    with torch.device("meta"):  # as libraries build models before they read weights
        assert fa.plan(MASKS.causal, rows=9, keys=9, device=device).density == 45 / 81
        assert fa.plan(MASKS.causal, rows=9, keys=9).block_mask.is_meta
    assert plan.nbytes == plan.block_mask.nbytes + plan.mask_bits.nbytes < 40000 / 4
    assert "(1, 1, 200, 200)" in str(plan) and f"{plan.density:.2%}" in str(plan)

    class Attend(torch.nn.Module):
        def forward(self, x, plan):
            return fa.attention(x, x, x, mask=plan)

    exported, file = torch.export.export(Attend(), (x, plan)), io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    compiled = torch.compile(Attend(), fullgraph=True, backend="aot_eager")
    for same in (exported.module(), torch.export.load(file).module(), compiled):
        assert torch.equal(same(x, plan), want)


SIZES = dict(rows=4, keys=4)
WRONG = [
    *of_values(dict(mask=[lambda *at: True, lambda b, h, i, j: i + j, lambda *at: bools(1)]), TypeError),
    *of_values(dict(mask=[lambda *at: bools().to("meta"), MASKS.documents(longs(0, 1, 2))])),
    wrong("rows", TypeError, rows=None),
    *of_values(dict(rows=[2**70], keys=[-1], device=["abc", "mps"], key_mask=[bools(5)])),
    wrong("key_mask", key_mask=bools(4), device="meta"),
    wrong("mask", mask=bools(4, 4), device="meta", rows=None, keys=None),
    wrong("rows", mask=bools(4, 4)),
    wrong("batch", mask=bools(4, 4), batch=2, rows=None, keys=None),
]


@pytest.mark.parametrize("row", WRONG)
def test_wrong_functions(row):
    assert_named(fa.plan, dict(mask=MASKS.causal) | SIZES, row)


@pytest.mark.parametrize(
    ("function", "row"),
    [
        (MASKS.sliding_window, wrong("left", left=2**70, right=0)),
        (MASKS.sliding_window, wrong("right", TypeError, left=0, right=None)),
        *[(MASKS.prefix, row) for row in of_values(dict(length=[-1, longs((1, 2))]))],
        (MASKS.documents, wrong("ids", TypeError, ids=[0, 1])),
        (MASKS.spans, wrong("ids", ids=torch.tensor(1))),
        (MASKS.dilated, wrong("step", step=0)),
        (MASKS.block_sparse, wrong("table", TypeError, table=longs((1, 0)), size=2)),
        (MASKS.block_sparse, wrong("size", table=bools(2, 2), size=0)),
    ],
)
def test_wrong_patterns(function, row):
    assert_named(function, {}, row)


@pytest.mark.parametrize("mask", [MASKS.causal, create_block_mask(MASKS.causal, None, None, 4, 4, "cpu")])
def test_a_function_that_is_no_plan_yet(mask):
    with pytest.raises(TypeError, match="^mask: .* pass i.* to fusedattn.plan$"):
        fa.attention(*torch.randn(3, 1, 1, 4, 8), mask=mask)


@pytest.mark.parametrize("size", [dict(rows=5), dict(keys=3), dict(batch=3), dict(heads=3)], ids=str)
def test_a_plan_for_other_sizes(size):
    """A plan for other sizes is found also if its blocks are as many, in a first call and in a replay."""
    good, bad = (fa.plan(MASKS.causal, **SIZES | more) for more in ({}, size))
    query = torch.randn(2, 2, 4, 16)
    for _ in range(3):
        fa.attention(query, query, query, mask=good, backend="triton")
    assert_named(functools.partial(fa.attention, query, query, query, backend="triton"), {}, wrong("mask", mask=bad))
