"""The backward for Hopper, elsewhere as `gluon` has it: its numbers, what a slip would do, and when it is taken."""

import random

import pytest
import torch

pytest.importorskip("triton", reason="kernels need Triton")

import fusedattn as fa
from bench import providers
from fusedattn.call.form import Arguments
from fusedattn.call.rules import checked
from fusedattn.cli.tune import child
from fusedattn.launch import failures, hopper, run, tuned
from fusedattn.launch.backward import passes
from fusedattn.launch.tiles import Backward
from fusedattn.operators import attention

from .. import sample
from ..cases import Case
from ..inside import draw

if hopper.missing is not None:
    pytest.skip(hopper.missing, allow_module_level=True)

from fusedattn.kernels.hopper import backward, halves, steps

from .test_hopper import CASES as NAMED, check, emulate, launches, slipped, slipped_in

BF16 = dict(dtype=torch.bfloat16)
# With heads of up to 64 a warpgroup has half of the rows of dq, with wider ones half of the columns.
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
    + [pytest.param(case, Backward(32, 2), id=f"{case.name}, as many rows as keys") for case in (CASES[0], CASES[6])],
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


@pytest.mark.parametrize("slip", ORDERED_SLIPS)
def test_a_slip_in_the_order_is_found(slip, tmp_path, monkeypatch, two_passes):
    emulate(monkeypatch, backward=slipped(backward, *ORDERED_SLIPS[slip], tmp_path))
    with pytest.raises(Exception, match="none does|wait for each other"):
        check(Case("slip", Sq=80, Sk=70, causal=True, **BF16), "cpu")


# What a slip in the kernel would do to a GPU: each is a line that becomes another.
SLIPS = {
    "q is given back while it is read": (
        "        dk, ds, dq = warpgroup_mma_wait(num_outstanding=1, deps=(dk, ds, dq))\n"
        "        ring.release(shared.q, step)\n",
        "        ring.release(shared.q, step)\n"
        "        dk, ds, dq = warpgroup_mma_wait(num_outstanding=1, deps=(dk, ds, dq))\n",
        "changed while it was read",
    ),
    "the weights are given up while they are read": (
        "dv, w = warpgroup_mma_wait(num_outstanding=1 + GROUPS, deps=(dv, w))",
        "dv = warpgroup_mma_wait(num_outstanding=1 + GROUPS, deps=(dv,))",
        "registers given up too soon",
    ),
    "the next scores are not waited for": (
        "s = warpgroup_mma_wait(num_outstanding=0, deps=(next_s,))", "s = next_s", "its products|'Product'",
    ),
    "the first q is not waited for": (
        "    ring.wait(shared.q, 0, pred=steps > 0)\n", "", "changed while it was read|'query':",
    ),
    "the halves of the rows change places": ("gl.join(early, late)", "gl.join(late, early)", "'query':|'key':"),
    "ds is not fenced": (
        ".store(ds)\n        fence_async_shared()\n", ".store(ds)\n", "before a fence",
    ),
    "the gradient of the weights is not waited for": (
        "num_outstanding=1, deps=(dp,)", "num_outstanding=2, deps=(dp,)", "not waited for",
    ),
    "ds has one place for two steps": ("step % 2 * GROUPS", "step % 1 * GROUPS", "changed while it was read"),
    "the ds of the other is not waited for": (
        "        mbarrier.wait(shared.met, step & 1)\n", "", "changed while it was read|'query':",
    ),
    "keys are written over while the other reads them": (
        "    mbarrier.wait(shared.met, steps & 1)\n", "", "changed while it was read",
    ),
    "dq is not fenced": (
        "        ring.put(shared.dq, step * GROUPS + g, dq)\n",
        "        ring.claim(shared.dq, step * GROUPS + g)\n"
        "        ring.tile(shared.dq, step * GROUPS + g).store(dq)\n"
        "        ring.publish(shared.dq, step * GROUPS + g)\n",
        "before a fence",
    ),
    "dq is written over while it is added": (
        "        ring.put(shared.dq, step * GROUPS + g, dq)\n",
        "        ring.tile(shared.dq, step * GROUPS + g).store(dq)\n"
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
    "dk is stored before it is there": (
        "    mbarrier.wait(shared.out.index(g), 0)\n", "", "changed while it was stored|'key':",
    ),
    "dk is not fenced": (
        ".store(dv.to(dtype))\n    fence_async_shared()\n", ".store(dv.to(dtype))\n", "before a fence",
    ),
    "both have the same columns of dq": ("slice(g * PART, PART", "slice(0, PART", "'query':"),
    "the diagonal takes no mask": ("(block < full)", "(block < begin)", "'query':|'key':"),
    "a row before all that see a key sees it": (
        "(r - earliest).to(gl.uint32) <= (band.high - band.low).to(gl.uint32)",
        "r - earliest <= band.high - band.low",
        "'query':|'key':",
    ),
    "the far end of a window takes no mask": ("(block >= full_end)", "(block > full_end)", "'query':|'key':"),
}  # fmt: skip
SLIPS_OF_NARROW_HEADS = {
    "q is given back while it is read": (
        "        dv, w1, dk, ds1 = warpgroup_mma_wait(num_outstanding=1 + GROUPS, deps=(dv, w1, dk, ds1))\n"
        "        ring.release(shared.q, step)\n",
        "        ring.release(shared.q, step)\n"
        "        dv, w1, dk, ds1 = warpgroup_mma_wait(num_outstanding=1 + GROUPS, deps=(dv, w1, dk, ds1))\n",
        "changed while it was read",
    ),
    "weights of the first half are given up while they are read": (
        "s1, dv, w0 = warpgroup_mma_wait(num_outstanding=2, deps=(s1, dv, w0))",
        "s1, dv = warpgroup_mma_wait(num_outstanding=2, deps=(s1, dv))",
        "registers given up too soon",
    ),
    "ds of the first half is given up while it is read": (
        "dp1, dk, ds0 = warpgroup_mma_wait(num_outstanding=1, deps=(dp1, dk, ds0))",
        "dp1, dk = warpgroup_mma_wait(num_outstanding=1, deps=(dp1, dk))",
        "registers given up too soon",
    ),
    "the gradient of the weights is not waited for": (
        "dp0 = warpgroup_mma_wait(num_outstanding=2", "dp0 = warpgroup_mma_wait(num_outstanding=3", "not waited for",
    ),
    "the scores of the second half are not waited for": (
        "warpgroup_mma_wait(num_outstanding=2, deps=(s1,",
        "warpgroup_mma_wait(num_outstanding=4, deps=(s1,",
        "not waited for",
    ),
    "the first q is not waited for": (
        "    ring.wait(shared.q, 0, pred=steps > 0)\n", "", "changed while it was read|'query':",
    ),
    "the keys are not waited for": (
        "        ring.wait(shared.k, other)\n", "        pass\n", "changed while it was read|'query':",
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
    "both add to the same rows of dq": (
        "below = g * shared.dq.tiles.shape[3]", "below = 0 * shared.dq.tiles.shape[3]", "'query':",
    ),
    "the second half has the numbers of the first": (
        "step, LAYOUT, half, 2), scale)", "step, LAYOUT, 0, 2), scale)", "'query':|'key':",
    ),
    "the second half is where the first is": (
        "tile.slice(half * ROWS, ROWS, dim=1)", "tile.slice(0, ROWS, dim=1)", "'query':",
    ),
    "the diagonal takes no mask": ("(block < full) | (block >= full_end)", "block >= full_end", "'query':|'key':"),
    "the far end of a window takes no mask": ("(block >= full_end)", "(block > full_end)", "'query':|'key':"),
}  # fmt: skip
SOME = "'query':|'key':|'value':|wait for each other|before a fence"


@pytest.mark.parametrize("slip", SLIPS)
def test_a_slip_is_found(slip, tmp_path, monkeypatch):
    before, after, said = SLIPS[slip]
    emulate(monkeypatch, **slipped_in((backward, steps), before, after, tmp_path))
    with pytest.raises(Exception, match=said or SOME):
        # Many steps, so that what may come at any moment does, and scores that are far from 0.
        check(Case("slip", Sq=80, Sk=70, D=72, window=(60, 0), scale=2.0, **BF16), "cpu")


@pytest.mark.parametrize("slip", SLIPS_OF_NARROW_HEADS)
def test_a_slip_of_narrow_heads_is_found(slip, tmp_path, monkeypatch):
    before, after, said = SLIPS_OF_NARROW_HEADS[slip]
    give = slip == "both add to the same rows of dq"
    emulate(monkeypatch, **slipped_in((backward if give else halves,), before, after, tmp_path))
    with pytest.raises(Exception, match=said):
        check(Case("slip", Sq=80, Sk=70, D=16, window=(40, 0), scale=2.0, **BF16), "cpu")


@pytest.mark.parametrize("hidden", [True, False])
def test_keys_past_the_end_weigh_nothing(hidden, tmp_path, monkeypatch):
    """Where every score is far below 0, a score of 0 would weigh more than float32 can hold."""
    slip = slipped(steps, "span.masked_past(ranges, first + KEYS, band.keys)", "ranges", tmp_path)
    emulate(monkeypatch, steps=steps if hidden else slip)
    inputs = [torch.full((1, 1, size, 16), value) for size, value in ((20, 8.0), (35, -8.0), (35, 1.0))]
    inputs = [(x + torch.randn_like(x) / 8).to(torch.bfloat16).requires_grad_() for x in inputs]
    incoming = torch.randn(1, 1, 20, 16, dtype=torch.bfloat16)
    gradients = torch.autograd.grad(fa.attention(*inputs, backend="hopper"), inputs, incoming)
    assert gradients[0].isfinite().all() == hidden


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
    assert said.tiles["hopper_bwd"] == Backward(16, 2) and "one_pass" not in said.tiles
    assert "one_pass" in fa.explain(*inputs, backend="triton").tiles


@pytest.mark.parametrize("name", ["hopper_bwd", "hopper_ordered"])
def test_a_benchmark_and_tune_take_it_alone(name, monkeypatch):
    """As `bench/providers.py` and the process of `fusedattn tune` have it: by its form, and right."""
    emulate(monkeypatch)
    launched = launches(monkeypatch)
    inputs = [x.requires_grad_() for x in draw("cpu", dtype=torch.bfloat16)]
    with providers.by_way_back(name, Backward(16, 3)):
        out = fa.attention(*inputs, backend="hopper")
        torch.autograd.grad(out, inputs, torch.randn_like(out))
        assert run.form_on_hopper(name, out) == Backward(16, 3)
    assert name in launched
    form = Backward(16, 2)
    candidate = tuned.Candidate(name, "bfloat16", 64, "plain", form)
    for constant in ("TIMES", "BATCHES", "REPEATS"):
        monkeypatch.setattr(child, constant, 2)
    with child.asked(candidate, tuned.NOTHING, "cpu") as (backend, taken):
        assert backend == "hopper"
        found = child.prove(candidate, backend, "cpu", lambda what: None, taken, few=True)
    assert found.status == tuned.PASSED, found.why


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


def test_tune_says_of_a_kernel_that_fails_that_it_does(monkeypatch):
    emulate(monkeypatch)
    monkeypatch.setattr(child, "TIMES", 2)
    candidate = tuned.Candidate("hopper_bwd", "bfloat16", 64, "plain", Backward(16, 2))
    with child.asked(candidate, tuned.NOTHING, "cpu") as (backend, taken):
        _fails(monkeypatch, "hopper_bwd")
        found = child.prove(candidate, backend, "cpu", lambda what: None, taken, few=True)
    failures.forget()
    assert found.status == "fails" and "ptxas error" in found.why


def test_tune_finds_a_backward_wrong_whose_bits_change(monkeypatch):
    emulate(monkeypatch)
    monkeypatch.setattr(child, "TIMES", 2)
    monkeypatch.setattr(child, "repeats", lambda *_: False)
    candidate = tuned.Candidate("hopper_ordered", "bfloat16", 64, "plain", Backward(16, 2))
    with child.asked(candidate, tuned.NOTHING, "cpu") as (backend, taken):
        found = child.prove(candidate, backend, "cpu", lambda what: None, taken, few=True)
    assert found.status == "wrong" and "same bits" in found.why


def test_a_preferred_backward_that_fails_leaves_the_call_to_the_kernels_of_every_gpu(monkeypatch):
    emulate(monkeypatch)
    tuned.ask(tuned.Choices({}, {}, faster=frozenset([("hopper_bwd", "bfloat16", 64, False)])))
    launched = _fails(monkeypatch, "hopper_bwd")
    inputs = [x.requires_grad_() for x in draw("cpu", dtype=torch.bfloat16)]
    try:
        out, *_ = attention.run(checked(Arguments(*inputs), named=False), False, False)
        torch.autograd.grad(out, inputs, torch.randn_like(out))
    finally:
        tuned.ask(None)
        failures.forget()
    assert launched[-3:] == ["preprocess", "one_pass", "postprocess"]


def test_what_the_copy_engine_cannot_read_another_kernel_takes(monkeypatch):
    """A sum has one gradient for all of its terms."""
    emulate(monkeypatch)
    launched = launches(monkeypatch)
    inputs = [x.requires_grad_() for x in draw("cpu", dtype=torch.bfloat16)]
    fa.attention(*inputs, backend="hopper").sum().backward()
    assert "one_pass" in launched and "hopper_bwd" not in launched
    want = torch.autograd.grad(fa.attention(*(x.double() for x in inputs)).sum(), inputs)
    for x, gradient in zip(inputs, want, strict=True):
        torch.testing.assert_close(x.grad, gradient, atol=0.02, rtol=0.02)
