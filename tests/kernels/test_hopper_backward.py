"""The backward for Hopper, elsewhere as `gluon` has it: its numbers, what a slip would do, and when it is taken."""

import random

import pytest
import torch

pytest.importorskip("triton", reason="kernels need Triton")

import fusedattn as fa
from fusedattn.call.form import Arguments
from fusedattn.call.rules import checked
from fusedattn.launch import failures, hopper, run
from fusedattn.launch.backward import passes
from fusedattn.launch.tiles import Backward
from fusedattn.operators import attention
from fusedattn.testing.tolerance import verdict

from .. import sample
from ..cases import Case
from ..close import assert_like
from ..inside import draw

if hopper.missing is not None:
    pytest.skip(hopper.missing, allow_module_level=True)

from fusedattn.kernels.hopper import backward, halves, steps

from .test_hopper import CASES as NAMED, check, emulate, launches, slipped, slipped_in

BF16 = dict(dtype=torch.bfloat16)
# With heads of up to 64 a warpgroup has half of the rows of dq, with wider ones half of the columns. The former have
# blocks of twice the rows of a form: see `emulate`.
CASES = [
    Case("many blocks", B=2, Hq=4, Hkv=2, Sq=70, Sk=90, **BF16),
    Case("wide", Sq=40, Sk=70, D=80, **BF16),
    Case("wide, causal", Hq=2, Hkv=1, Sq=40, Sk=50, D=72, causal=True, **BF16),
    Case("wide queries alone", Sq=20, Sk=33, D=80, Dv=16, **BF16),
    Case("wide values alone", Sq=20, Sk=33, D=16, Dv=80, **BF16),
    Case("wide, a window", Sq=40, Sk=50, D=72, window=(9, 5), dtype=torch.float16),
    Case("keys that nobody sees", Sq=20, Sk=90, causal=True, align="top_left", **BF16),
    Case("more queries than keys", Sq=90, Sk=41, causal=True, grads="out and lse", **BF16),
    Case("one key", Sq=40, Sk=1, **BF16),
    Case("one row", Sq=1, Sk=70, D=72, **BF16),
]


@pytest.mark.parametrize(
    "case, form",
    [pytest.param(case, Backward(16, 2), id=case.name) for case in CASES]
    + [pytest.param(CASES[0], Backward(16, 3), id="three stages")]
    + [pytest.param(case, Backward(32, 2), id=f"{case.name}, blocks of more rows") for case in (*CASES[:3], CASES[6])],
)
def test_a_case(case, form, monkeypatch, poison):
    emulate(monkeypatch, way_back=form)
    launched = launches(monkeypatch)
    check(case, "cpu")
    assert "hopper_bwd" in launched and "dkdv" not in launched


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_case_whose_sums_have_an_order(case, monkeypatch, poison, two_passes):
    """A program that waited for a turn that never comes would be an error, too."""
    emulate(monkeypatch, way_back=Backward(16, 2))
    launched = launches(monkeypatch)
    check(case, "cpu")
    assert "hopper_ordered" in launched and "dq" not in launched


# Every second one: what multiplies is the code of those whose sums have no order, which `test_hopper` runs with all.
@pytest.mark.parametrize("case", sample.one_in(2, sample.named([*NAMED.values()][::2])))
def test_a_named_case_whose_sums_have_an_order(case, monkeypatch, poison, two_passes):
    emulate(monkeypatch)
    check(case, "cpu")


@pytest.mark.parametrize("block", [16, 32])
def test_each_block_of_keys_has_its_turn(block, monkeypatch, two_passes):
    """For any lengths and bands: what adds to a block of rows counts from 0 on, without a gap."""
    emulate(monkeypatch, way_back=Backward(block, 2))
    draw = random.Random(block)
    for _ in range(20):
        rows, keys = draw.randint(1, 90), draw.randint(1, 130)
        window = tuple(draw.choice((None, 0, 1, 7, 16, 33, 70)) for _ in range(2))
        align = draw.choice(("top_left", "bottom_right"))
        inputs = [torch.randn(1, 1, n, 16, dtype=torch.bfloat16, requires_grad=True) for n in (rows, keys, keys)]
        out = fa.attention(*inputs, window=window, align=align, backend="hopper")
        torch.autograd.grad(out, inputs, torch.randn_like(out))


ORDERED_SLIPS = {
    "another has the turn": ("last - first // KEYS", "last - first // KEYS + 1"),
    "a block counts as its first row": ("(block + 1) * BLOCK_M - 1 + band.high", "block * BLOCK_M + band.high"),
    "both warpgroups at once": ("return counter + g,", "return counter,"),
    "a turn has no end": ("            turns.end(counter, turn)\n", "            pass\n"),
}  # fmt: skip


@pytest.mark.parametrize("slip", sample.planted(map(pytest.param, ORDERED_SLIPS)))
def test_a_slip_in_the_order_is_found(slip, tmp_path, monkeypatch, two_passes):
    emulate(monkeypatch, backward=slipped(backward, *ORDERED_SLIPS[slip], tmp_path))
    with pytest.raises(Exception, match="none does|wait for each other"):
        check(Case("slip", Sq=80, Sk=70, causal=True, **BF16), "cpu")


MASKED = "    if (block < full) | (block >= full_end):\n        p = hide(p, block * shared.q"
# What a slip in the kernel would do to a GPU: each is a line that becomes another.
SLIPS = {
    "the ones are not fenced": (
        "    fence_async_shared()\n    first = block * 2 * KEYS\n", "    first = block * 2 * KEYS\n", "before a fence",
    ),
    "q is given back while it is read": (
        "        dk, ds = warpgroup_mma_wait(num_outstanding=3 + GROUPS, deps=(dk, ds))\n"
        "        ring.release(shared.q, step)\n",
        "        ring.release(shared.q, step)\n"
        "        dk, ds = warpgroup_mma_wait(num_outstanding=3 + GROUPS, deps=(dk, ds))\n",
        "changed while it was read",
    ),
    "the weights are given up while they are read": (
        "dv, w = warpgroup_mma_wait(num_outstanding=1, deps=(dv, w))",
        "dv = warpgroup_mma_wait(num_outstanding=1, deps=(dv,))",
        "registers given up too soon",
    ),
    "ds is given up while it is read": (
        "dk, ds = warpgroup_mma_wait(num_outstanding=3 + GROUPS, deps=(dk, ds))",
        "dk = warpgroup_mma_wait(num_outstanding=3 + GROUPS, deps=(dk,))",
        "registers given up too soon",
    ),
    "the next scores are not waited for": (
        "s = warpgroup_mma_wait(num_outstanding=GROUPS, deps=(next_s,))", "s = next_s", "its products|not waited for",
    ),
    "the logarithm of the next scores is not waited for": (
        "num_outstanding=GROUPS, deps=(next_s,)", "num_outstanding=GROUPS + 1, deps=(next_s,)", "not waited for",
    ),
    "the first q is not waited for": (
        "    ring.wait(shared.q, 0, pred=steps > 0)\n", "", "changed while it was read|'query':",
    ),
    "the next q is not waited for": (
        "        ring.wait(shared.q, step + 1, pred=step + 1 < steps)\n", "", "changed while it was read|'query':",
    ),
    "the numbers of the next scores are those of the step": (
        "begin_scores(k, next_q, shared, step + 1, zero)", "begin_scores(k, next_q, shared, step, zero)",
        "changed while it was read|'query':|'key':",
    ),
    "the weights of the next step are masked as those of the step": (
        "        block, member = following(block, member, begin, end, GROUP)\n"
        "        p = weights(s, shared, block, full, full_end, earliest, band, scale)\n",
        "        p = weights(s, shared, block, full, full_end, earliest, band, scale)\n"
        "        block, member = following(block, member, begin, end, GROUP)\n",
        "'query':|'key':",
    ),
    "dp of a step is of do of the next": (
        "begin_dp(v, do.permute", "begin_dp(v, ring.at(shared.do, step + 1).permute",
        "changed while it was read|'query':|'key':",
    ),
    "delta of a step is that of the next": (
        "permute((1, 0)), shared, step, zero)", "permute((1, 0)), shared, step + 1, zero)",
        "changed while it was read|'query':|'key':",
    ),
    "ds is not fenced": (
        ".store(ds)\n        fence_async_shared()\n", ".store(ds)\n", "before a fence",
    ),
    "the gradient of the weights is not waited for": (
        "num_outstanding=1, deps=(dp,)", "num_outstanding=2, deps=(dp,)", "not waited for",
    ),
    "dq is not waited for": (
        "num_outstanding=0, deps=(dq,)", "num_outstanding=1, deps=(dq,)", "not waited for",
    ),
    "ds has one place for two steps": ("step % 2 * GROUPS", "step % 1 * GROUPS", "changed while it was read"),
    "the ds of the other is not waited for": (
        "        mbarrier.wait(shared.met, step & 1)\n", "", "changed while it was read|'query':",
    ),
    "keys are written over while the other reads them": (
        "    mbarrier.wait(shared.met, steps & 1)\n", "", "changed while it was read",
    ),
    "dq is not fenced": (
        "        ring.put(shared.dq, step * GROUPS + g, lines(dq))\n",
        "        ring.claim(shared.dq, step * GROUPS + g)\n"
        "        ring.tile(shared.dq, step * GROUPS + g).store(lines(dq))\n"
        "        ring.publish(shared.dq, step * GROUPS + g)\n",
        "before a fence",
    ),
    "dq is written over while it is added": (
        "        ring.put(shared.dq, step * GROUPS + g, lines(dq))\n",
        "        ring.tile(shared.dq, step * GROUPS + g).store(lines(dq))\n"
        "        fence_async_shared()\n"
        "        ring.publish(shared.dq, step * GROUPS + g)\n",
        "changed while it was stored",
    ),
    "dq is added before it is there": (
        "        ring.wait(shared.dq, step * GROUPS + g)\n",
        "",
        "changed while it was stored|'query':|wait for each other",
    ),
    "dq is never given back": ("        ring.release(shared.dq, step * GROUPS + g)\n", "", "wait for each other"),
    "both add to the same lines of dq": ("(block * GROUPS + g) * LINES", "block * GROUPS * LINES", "'query':"),
    "dk is stored before it is there": (
        "    mbarrier.wait(shared.out.index(g), 0)\n", "", "changed while it was stored|'key':",
    ),
    "dk is not fenced": (
        ".store(dv.to(dtype))\n    fence_async_shared()\n", ".store(dv.to(dtype))\n", "before a fence",
    ),
    "both have the same columns of dq": ("slice(g * PART, PART", "slice(0, PART", "'query':"),
    "the diagonal takes no mask": (MASKED, MASKED.replace("(block < full)", "(block < 0)"), "'query':|'key':"),
    "a row before all that see a key sees it": (
        "(r - earliest).to(gl.uint32) <= (band.high - band.low).to(gl.uint32)",
        "r - earliest <= band.high - band.low",
        "'query':|'key':",
    ),
    "the far end of a window takes no mask": (MASKED, MASKED.replace(">= full_end", "> full_end"), "'query':|'key':"),
}  # fmt: skip
SLIPS_OF_NARROW_HEADS = {
    "q is given back while it is read": (
        "        dv, w1, dk, ds1 = warpgroup_mma_wait(num_outstanding=3 + GROUPS, deps=(dv, w1, dk, ds1))\n"
        "        ring.release(shared.q, step)\n",
        "        ring.release(shared.q, step)\n"
        "        dv, w1, dk, ds1 = warpgroup_mma_wait(num_outstanding=3 + GROUPS, deps=(dv, w1, dk, ds1))\n",
        "changed while it was read",
    ),
    "weights of the first half are given up while they are read": (
        "s1, dv, w0 = warpgroup_mma_wait(num_outstanding=3, deps=(s1, dv, w0))",
        "s1, dv = warpgroup_mma_wait(num_outstanding=3, deps=(s1, dv))",
        "registers given up too soon",
    ),
    "ds of the first half is given up while it is read": (
        "dp1, dk, ds0 = warpgroup_mma_wait(num_outstanding=1, deps=(dp1, dk, ds0))",
        "dp1, dk = warpgroup_mma_wait(num_outstanding=1, deps=(dp1, dk))",
        "registers given up too soon",
    ),
    "weights and ds of the second half are given up while they are read": (
        "dv, w1, dk, ds1 = warpgroup_mma_wait(num_outstanding=3 + GROUPS, deps=(dv, w1, dk, ds1))",
        "dv, dk = warpgroup_mma_wait(num_outstanding=3 + GROUPS, deps=(dv, dk))",
        "registers given up too soon",
    ),
    "the gradient of the weights is not waited for": (
        "num_outstanding=0, deps=(next_dp,)", "num_outstanding=1, deps=(next_dp,)", "not waited for",
    ),
    "the gradient of the weights of the second half is not waited for": (
        "num_outstanding=1, deps=(dp1, dk, ds0)", "num_outstanding=3, deps=(dp1, dk, ds0)", "not waited for",
    ),
    "the scores of the second half are not waited for": (
        "warpgroup_mma_wait(num_outstanding=3, deps=(s1,",
        "warpgroup_mma_wait(num_outstanding=5, deps=(s1,",
        "not waited for",
    ),
    "the next scores are not waited for": (
        "num_outstanding=2 + GROUPS, deps=(next_s,)", "num_outstanding=3 + GROUPS, deps=(next_s,)", "not waited for",
    ),
    "dq is not waited for": (
        "num_outstanding=2, deps=(dq,)", "num_outstanding=3, deps=(dq,)", "not waited for",
    ),
    "the first q is not waited for": (
        "    ring.wait(shared.q, 0, pred=steps > 0)\n", "", "changed while it was read|'query':",
    ),
    "the next q is not waited for": (
        "        ring.wait(shared.q, step + 1, pred=step + 1 < steps)\n", "", "changed while it was read|'query':",
    ),
    # Read into registers, as by Triton up to 3.8: products that read them in shared memory mostly come late enough.
    "the keys are not waited for": (
        "        ring.wait(shared.k, other)\n    k, v = ring.tile(shared.k, g), ring.at(shared.v, g)\n"
        "    if OPERANDS_STAY:",
        "        pass\n    k, v = ring.tile(shared.k, g), ring.at(shared.v, g)\n    if True:",
        "changed while it was read|'query':",
    ),
    "ds is not fenced": (
        "        fence_async_shared()\n        mbarrier.arrive(shared.met, count=1)\n",
        "        mbarrier.arrive(shared.met, count=1)\n", "before a fence",
    ),
    "the ds of the other is not waited for": (
        "        mbarrier.wait(shared.met, step & 1)\n", "", "changed while it was read|'query':",
    ),
    "ds has one place for two steps": ("step % 2 * GROUPS", "step % 1 * GROUPS", "changed while it was read"),
    "both have the same rows of dq": (".permute((1, 0)), g)", ".permute((1, 0)), 0)", "'query':"),
    "both add to the same rows of dq": ("(block * GROUPS + g) * LINES", "block * GROUPS * LINES", "'query':"),
    "the second half has the numbers of the first": (
        "begin_scores(k, _columns(q, 1), shared, step, zero, 1, 2)",
        "begin_scores(k, _columns(q, 1), shared, step, zero, 0, 2)",
        "'query':|'key':",
    ),
    "the second half has the delta of the first": (
        "begin_dp(v, _columns(do, 1), shared, step, zero, 1, 2)",
        "begin_dp(v, _columns(do, 1), shared, step, zero, 0, 2)",
        "'query':|'key':",
    ),
    "the numbers of the next scores are those of the step": (
        "begin_scores(k, next_q, shared, step + 1, zero, 0, 2)", "begin_scores(k, next_q, shared, step, zero, 0, 2)",
        "changed while it was read|'query':|'key':",
    ),
    "delta of the next step is that of the step": (
        "begin_dp(v, next_do, shared, step + 1, zero, 0, 2)", "begin_dp(v, next_do, shared, step, zero, 0, 2)",
        "changed while it was read|'query':|'key':",
    ),
    "dp of the next step is of do of the step": (
        "_columns(ring.at(shared.do, step + 1), 0)", "_columns(ring.at(shared.do, step), 0)",
        "changed while it was read|'query':|'key':",
    ),
    "the second half is where the first is": (
        "tile.slice(half * ROWS, ROWS, dim=1)", "tile.slice(0, ROWS, dim=1)", "'query':",
    ),
    "the second half is masked as the first": (
        "earliest, band, scale, 1)", "earliest, band, scale)", "'query':|'key':",
    ),
    "the weights of the next step are masked as those of the step": (
        "        block, member = following(block, member, begin, end, GROUP)\n"
        "        p0 = weights(s0, shared, block, full, full_end, earliest, band, scale)\n",
        "        p0 = weights(s0, shared, block, full, full_end, earliest, band, scale)\n"
        "        block, member = following(block, member, begin, end, GROUP)\n",
        "'query':|'key':",
    ),
    "the diagonal takes no mask": (MASKED, MASKED.replace("(block < full) | ", ""), "'query':|'key':"),
    "the far end of a window takes no mask": (MASKED, MASKED.replace(">= full_end", "> full_end"), "'query':|'key':"),
}  # fmt: skip
# Of what all heads of up to 128 have in common: the numbers of rows, which products add, and the order of dq.
SLIPS_OF_ROWS = {
    "the numbers are those of another step": (
        "rows.index(step % rows.shape[0])", "rows.index((step + 1) % rows.shape[0])",
        "changed while it was read|'query':|'key':",
    ),
    "scores have the numbers of dp": (
        "_numbers(shared.rows, step, 0, part, PARTS)", "_numbers(shared.rows, step, 1, part, PARTS)",
        "'query':|'key':|'value':",
    ),
    "dp has the numbers of scores": (
        "_numbers(shared.rows, step, 1, part, PARTS)", "_numbers(shared.rows, step, 0, part, PARTS)",
        "'query':|'key':",
    ),
    "the ones change places": ("(column // 8 == which)", "(column // 8 != which)", "'query':|'key':"),
    "both ones add up the same columns": ("(column // 8 == which)", "(column // 8 == 0 * which)", "'value':"),
    "the pivot is left out": (
        "s = warpgroup_mma(_of(shared.one, 0), table,", "s = warpgroup_mma(_of(shared.one, 1), table,", "'value':",
    ),
    "the logarithm is left out": ("(column // 8 == which)", "(column // 8 == 2 * which)", "'value':"),
    "delta is left out": (
        "_of(shared.one, 0), _numbers(shared.rows, step, 1,", "_of(shared.one, 1), _numbers(shared.rows, step, 1,",
        "'query':|'key':",
    ),
    # Who waits for products counts them, and mostly finds one missing.
    "the product of the logarithm is left out": (
        "return warpgroup_mma(_of(shared.one, 1), table, s, is_async=True)", "return s",
        "not waited for|given up too soon|'value':",
    ),
    "the product of delta is left out": (
        "return warpgroup_mma(_of(shared.one, 0), _numbers(shared.rows, step, 1, part, PARTS), dp, is_async=True)",
        "return dp",
        "not waited for|given up too soon|'query':|'key':",
    ),
    "the halves of 16 rows of dq lie apart": (
        "permute((4, 0, 2, 3, 5, 1, 6))", "permute((4, 0, 1, 2, 3, 5, 6))", "'query':",
    ),
    "the columns of a row of dq lie together": (
        "permute((4, 0, 2, 3, 5, 1, 6))", "permute((4, 0, 2, 3, 1, 5, 6))", "'query':",
    ),
    "all columns of 16 rows of dq lie together": (
        "permute((4, 0, 2, 3, 5, 1, 6))", "permute((0, 4, 2, 3, 5, 1, 6))", "'query':",
    ),
}  # fmt: skip
SOME = "'query':|'key':|'value':|wait for each other|before a fence"


@pytest.mark.parametrize("slip", sample.planted(map(pytest.param, SLIPS)))
def test_a_slip_is_found(slip, tmp_path, monkeypatch):
    before, after, said = SLIPS[slip]
    emulate(monkeypatch, **slipped_in((backward, steps), before, after, tmp_path))
    with pytest.raises(Exception, match=said or SOME):
        # Many steps, so that what may come at any moment does, and scores that are far from 0.
        check(Case("slip", Sq=80, Sk=70, D=72, window=(60, 0), scale=2.0, **BF16), "cpu")


@pytest.mark.parametrize("slip", sample.planted(map(pytest.param, SLIPS_OF_NARROW_HEADS)))
def test_a_slip_of_narrow_heads_is_found(slip, tmp_path, monkeypatch):
    before, after, said = SLIPS_OF_NARROW_HEADS[slip]
    module = backward if slip == "both add to the same rows of dq" else halves
    emulate(monkeypatch, **slipped_in((module, steps), before, after, tmp_path))
    with pytest.raises(Exception, match=said):
        check(Case("slip", Hq=4, Hkv=1, Sq=100, Sk=90, D=16, window=(40, 0), scale=2.0, **BF16), "cpu")


@pytest.mark.parametrize("slip", sample.planted(map(pytest.param, SLIPS_OF_ROWS)))
@pytest.mark.parametrize("width", [16, 72])
def test_a_slip_in_what_rows_have_is_found(width, slip, tmp_path, monkeypatch):
    before, after, said = SLIPS_OF_ROWS[slip]
    emulate(monkeypatch, steps=slipped(steps, before, after, tmp_path), way_back=Backward(32, 2))
    with pytest.raises(Exception, match=said):
        check(Case("slip", Sq=150, Sk=40, D=width, scale=2.0, **BF16), "cpu")


@pytest.mark.parametrize("hidden", [True, False])
def test_keys_past_the_end_weigh_nothing(hidden, tmp_path, monkeypatch):
    """Where every score is far below 0, a score of 0 would weigh more than float32 can hold."""
    slip = slipped(steps, "span.masked_past(ranges, first + KEYS, band.keys)", "ranges", tmp_path)
    emulate(monkeypatch, steps=steps if hidden else slip)
    # 40 rows: a block of 32 that all see the keys that are there takes no other mask.
    inputs = [torch.full((1, 1, size, 16), value) for size, value in ((40, 8.0), (35, -8.0), (35, 1.0))]
    inputs = [(x + torch.randn_like(x) / 8).to(torch.bfloat16).requires_grad_() for x in inputs]
    incoming = torch.randn(1, 1, 40, 16, dtype=torch.bfloat16)
    gradients = torch.autograd.grad(fa.attention(*inputs, backend="hopper"), inputs, incoming)
    assert gradients[0].isfinite().all() == hidden


@pytest.mark.parametrize("width", [16, 72])
@pytest.mark.parametrize("first", [True, False])
def test_a_pivot_is_added_before_the_logarithm(first, width, tmp_path, monkeypatch):
    """Where scores are as large as here, their sum in float32 would lose it: each of the 40 keys would weigh 1."""
    before = """    s = warpgroup_mma(_of(shared.one, 0), table, s, is_async=True)
    return warpgroup_mma(_of(shared.one, 1), table, s, is_async=True)
"""
    after = before.replace("one, 0", "one, 2").replace("one, 1", "one, 0").replace("one, 2", "one, 1")
    emulate(monkeypatch, steps=steps if first else slipped(steps, before, after, tmp_path))
    query, key = (torch.full((1, 1, size, width), 2.0**15, dtype=torch.bfloat16) for size in (70, 40))
    inputs = [x.requires_grad_() for x in (query, key, torch.randn(1, 1, 40, width, dtype=torch.bfloat16))]
    incoming = torch.randn(1, 1, 70, width, dtype=torch.bfloat16)
    (got,) = torch.autograd.grad(fa.attention(*inputs, backend="hopper"), inputs[2], incoming)
    (eager,) = torch.autograd.grad(fa.reference.eager(*inputs), inputs[2], incoming)
    want = incoming.double().mean(2, keepdim=True).expand_as(key) * 70 / 40
    assert verdict(got, eager, want).ok == first


@pytest.mark.parametrize("width", [16, 72])
def test_scores_may_be_larger_than_a_number_of_16_bits(width, monkeypatch):
    """What bfloat16 would round to infinity: float32 holds it."""
    emulate(monkeypatch)
    query, key = (torch.zeros(1, 1, size, width, dtype=torch.bfloat16) for size in (40, 33))
    query[..., 0], key[..., 0] = 2.0**64, 2.0**63
    query[..., 1], key[..., 1] = 2.0**60, 2.0**67 - 2.0**59  # together 2**128 - 2**119
    query[..., 2], key[..., 2] = 2.0**60, 2.0**58
    inputs = [x.requires_grad_() for x in (query, key, torch.randn(1, 1, 33, width, dtype=torch.bfloat16))]
    scores = query[0, 0].double() @ key[0, 0].double().T
    assert 3.3962e38 < scores.max() < torch.finfo(torch.float32).max
    out = fa.attention(*inputs, scale=1.0, backend="hopper")
    gradients = torch.autograd.grad(out, inputs, torch.randn_like(out))
    assert all(x.isfinite().all() for x in gradients)


@pytest.mark.parametrize("case", [CASES[0], CASES[6]], ids=lambda case: case.name)
def test_keys_and_values_may_lie_in_registers(case, tmp_path, monkeypatch, poison):
    """As they do with narrow heads by Triton up to 3.8, or stay in shared memory, as they do by others."""
    emulate(monkeypatch, halves=slipped(halves, "if OPERANDS_STAY:", f"if {not steps.OPERANDS_STAY.value}:", tmp_path))
    check(case, "cpu")


def _taken(names="hopper_bwd", need=(True, True, True), **options):
    query, key, value = draw("cpu", dtype=torch.bfloat16)
    call = checked(Arguments(query, key, value, **options), named=True)
    need = [*need, *(getattr(call, name) is not None for name in ("bias", "alibi_slopes", "sinks"))]
    return names in passes(call, need, "hopper")


def test_what_it_takes(monkeypatch):
    assert _taken() and _taken(causal=True) and _taken(window=(3, 4)) and _taken(scale=0.3)
    bias = torch.zeros(9, 11)
    for other in (dict(bias=bias), dict(softcap=3.0), dict(scale=-1.0), dict(sinks=torch.zeros(2))):
        assert not _taken(**other), other
    assert not _taken(need=(True, True, False)) and not _taken(need=(False, True, True))
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert not _taken() and _taken("hopper_ordered")


def test_it_is_taken_where_hopper_is_named(monkeypatch):
    emulate(monkeypatch)
    inputs = [x.requires_grad_() for x in draw("cpu", dtype=torch.bfloat16)]
    said = fa.explain(*inputs, causal=True, backend="hopper")
    assert said.tiles["hopper_bwd"] == Backward(32, 2) and "one_pass" not in said.tiles
    assert "one_pass" in fa.explain(*inputs, backend="triton").tiles


def _fails(monkeypatch, kernel):
    """A kernel fails wherever it is launched; returns the names of those that ran."""
    launched, run_kernel = [], run.run_kernel

    def failing(name, *given, **options):
        if name == kernel:
            raise failures.remember((name, torch.device("cpu")), RuntimeError("ptxas error"))
        launched.append(name)
        run_kernel(name, *given, **options)

    failures.forget()
    monkeypatch.setattr(run, "run_kernel", failing)
    return launched


def test_a_preferred_backward_that_fails_leaves_the_call_to_the_kernels_of_every_gpu(monkeypatch):
    emulate(monkeypatch)
    monkeypatch.setattr(run, "capability", lambda device: 90)
    launched = _fails(monkeypatch, "hopper_bwd")
    inputs = [x.requires_grad_() for x in draw("cpu", dtype=torch.bfloat16)]
    try:
        out, *_ = attention.run(checked(Arguments(*inputs), named=False), False, False)
        with pytest.warns(UserWarning, match="takes a slower path: the kernel 'hopper_bwd'"):
            torch.autograd.grad(out, inputs, torch.randn_like(out))
    finally:
        failures.forget()
    assert launched[-3:] == ["preprocess", "one_pass", "postprocess"]


def test_what_the_copy_engine_cannot_read_another_kernel_takes(monkeypatch):
    """A sum has one gradient for all of its terms."""
    emulate(monkeypatch)
    launched = launches(monkeypatch)
    inputs = [x.requires_grad_() for x in draw("cpu", dtype=torch.bfloat16)]
    fa.attention(*inputs, backend="hopper").sum().backward()
    assert "one_pass" in launched and "hopper_bwd" not in launched
    eagerly = lambda: torch.autograd.grad(fa.reference.eager(*inputs).sum(), inputs)  # noqa: E731
    assert_like([x.grad for x in inputs], eagerly)
