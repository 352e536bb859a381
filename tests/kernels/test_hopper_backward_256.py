"""The backward for Hopper of wide heads, elsewhere as `gluon` has it: its numbers, and what a slip would do."""

import pytest
import torch

pytest.importorskip("triton", reason="kernels need Triton")

import fusedattn as fa
from fusedattn.launch import hopper, run, tuned
from fusedattn.launch.tiles import Backward

from .. import cases, sample
from ..cases import Case

if hopper.missing is not None:
    pytest.skip(hopper.missing, allow_module_level=True)

from fusedattn.kernels.hopper import ring, steps, wide

from . import test_hopper
from .test_hopper import check, emulate, halved, launches, slipped, slipped_in, takes

BF16 = dict(dtype=torch.bfloat16)
WIDE = dict(D=256, Dv=256)
CASES = [
    Case("many blocks", B=2, Hq=4, Hkv=2, Sq=70, Sk=50, **WIDE, **BF16),
    Case("one column more", Sq=40, Sk=50, D=136, Dv=136, **BF16),
    Case("causal", Hq=2, Hkv=1, Sq=40, Sk=50, D=192, Dv=136, causal=True, **BF16),
    Case("wide queries alone", Sq=40, Sk=33, D=200, Dv=16, **BF16),
    Case("wide values alone", Sq=40, Sk=33, D=16, Dv=200, **BF16),
    Case("values of 128", Sq=40, Sk=33, D=192, Dv=128, dtype=torch.float16),
    Case("a window", Sq=40, Sk=50, window=(9, 5), **WIDE, dtype=torch.float16),
    Case("keys that nobody sees", Sq=20, Sk=90, causal=True, align="top_left", **WIDE, **BF16),
    Case("more queries than keys", Sq=90, Sk=41, causal=True, grads="out and lse", **WIDE, **BF16),
    Case("one key", Sq=40, Sk=1, **WIDE, **BF16),
    Case("one row", Sq=1, Sk=40, **WIDE, **BF16),
]
# The named cases that the kernel for Hopper takes, each once, with wider heads.
NAMED = [case._replace(D=144, Dv=136) for case in map(halved, cases.SINGLE + cases.SHAPES)]
NAMED = {case._replace(name=""): case for case in NAMED if takes(case)}


@pytest.fixture(autouse=True)
def adding(monkeypatch):
    """Calls take the backward of wide heads that adds to dq."""
    monkeypatch.setattr(tuned, "prefers_stored", lambda *_: False)


@pytest.fixture
def launched(monkeypatch):
    """The names of kernels, as they are launched."""
    return launches(monkeypatch)


@pytest.mark.parametrize(
    "case, form",
    [pytest.param(case, Backward(16, 2), id=case.name) for case in CASES]
    + [pytest.param(CASES[0], Backward(16, 3), id="three stages")]
    + [pytest.param(CASES[0], Backward(32, 2), id="blocks of more rows")],
)
def test_a_case(case, form, monkeypatch, launched, poison):
    emulate(monkeypatch, way_back=form)
    check(case, "cpu")
    assert "hopper_bwd_256" in launched and "dkdv" not in launched


@pytest.mark.parametrize("case", sample.one_in(2, sample.named(NAMED.values())))
def test_a_named_case(case, monkeypatch, poison):
    emulate(monkeypatch)
    check(case, "cpu")


# What a slip in the kernel would do to a GPU: each is a line that becomes another.
SLIPS = {
    "q is given back while it is read": (
        "    dk = warpgroup_mma_wait(num_outstanding=PRODUCTS, deps=(dk,))\n    ring.release(shared.q, step)",
        "    ring.release(shared.q, step)\n    dk = warpgroup_mma_wait(num_outstanding=PRODUCTS, deps=(dk,))",
        "changed while it was read",
    ),
    "do is given back while the first reads it": (
        "        dv = warpgroup_mma_wait(num_outstanding=1, deps=(dv,))\n"
        "        ring.release(shared.do, step)\n"
        "        ring.wait(shared.ds, step)\n",
        "        ring.release(shared.do, step)\n"
        "        dv = warpgroup_mma_wait(num_outstanding=1, deps=(dv,))\n"
        "        ring.wait(shared.ds, step)\n",
        "changed while it was read",
    ),
    "do is given back while the second reads it": (
        "        dv = warpgroup_mma_wait(num_outstanding=1, deps=(dv,))\n"
        "        ring.release(shared.do, step)\n"
        "        ring.release(shared.p, step)\n",
        "        ring.release(shared.do, step)\n"
        "        dv = warpgroup_mma_wait(num_outstanding=1, deps=(dv,))\n"
        "        ring.release(shared.p, step)\n",
        "changed while it was read",
    ),
    "the first do is read before it is there": (
        "    ring.wait(shared.do, 0, pred=steps > 0)\n", "", "changed while it was read",
    ),
    "the next do is read before it is there": (
        "        ring.wait(shared.do, step + 1, pred=step + 1 < steps)\n", "", "changed while it was read|'query':",
    ),
    "dp of the next step is not waited for": (
        "num_outstanding=0, deps=(next_dp,)", "num_outstanding=1, deps=(next_dp,)", "not waited for",
    ),
    "p is given back while the second reads it": (
        "        dv = warpgroup_mma_wait(num_outstanding=1, deps=(dv,))\n"
        "        ring.release(shared.do, step)\n"
        "        ring.release(shared.p, step)\n",
        "        ring.release(shared.p, step)\n"
        "        dv = warpgroup_mma_wait(num_outstanding=1, deps=(dv,))\n"
        "        ring.release(shared.do, step)\n",
        "changed while it was read",
    ),
    "p is written before it is free": (
        "        ring.put(shared.p, step + 1, p)\n",
        "        ring.tile(shared.p, step + 1).store(p)\n"
        "        fence_async_shared()\n"
        "        ring.publish(shared.p, step + 1)\n",
        "changed while it was read",
    ),
    "p is not fenced": (
        "        ring.put(shared.p, step + 1, p)\n",
        "        ring.claim(shared.p, step + 1)\n"
        "        ring.tile(shared.p, step + 1).store(p)\n"
        "        ring.publish(shared.p, step + 1)\n",
        "before a fence",
    ),
    "p is read before it is there": (
        "        ring.wait(shared.p, step)\n", "", "changed while it was read|'value':|wait for each other",
    ),
    "ds is read before it is there": ("        ring.wait(shared.ds, step)\n", "", "changed while it was read|'key':"),
    "ds is never given back": ("        ring.release(shared.ds, step)\n", "", "wait for each other"),
    "ds is given back while it is read": (
        "        dq = warpgroup_mma_wait(num_outstanding=0, deps=(dq,))\n        ring.release(shared.ds, step)\n",
        "        ring.release(shared.ds, step)\n        dq = warpgroup_mma_wait(num_outstanding=0, deps=(dq,))\n",
        "changed while it was read",
    ),
    "q is given back, and rows, before they are read": (
        "        delta = across(shared.rows, step, 2, S_LAYOUT)\n",
        "        ring.release(shared.q, step)\n        delta = across(shared.rows, step, 2, S_LAYOUT)\n",
        "changed while it was read|more arrivals|wait for each other",
    ),
    "rows are those of another step": (
        "delta = across(shared.rows, step, 2,", "delta = across(shared.rows, step + 1, 2,", None,
    ),
    "rows are not expected with q": (
        "Q.block_type.nbytes + Rows.block_type.nbytes", "Q.block_type.nbytes", None,
    ),
    "the weights are of the step itself": ("gl.minimum(step + 1, steps - 1)", "gl.minimum(step, steps - 1)", None),
    "the weights are masked as those of the step before": (
        "_weights(s, shared, ahead, block, full,",
        "_weights(s, shared, ahead, gl.maximum(block - 1, begin), full,",
        None,
    ),
    "keys are written over while the other reads them": (
        "    mbarrier.wait(shared.met, 0)\n", "", "changed while it was read",
    ),
    "dq is added before it is there": ("                ring.wait(dq, use // 2)\n", "                pass\n", None),
    "tiles of dq are waited for one by one": ("ring.wait(dq, use // 2)", "ring.wait(dq, use)", None),
    "the second tile of two is waited for": ("if part % 2 == 0:", "if part % 2 == 1:", None),
    "dq is never given back": ("            ring.release(dq, use)\n", "", "wait for each other"),
    "dk is stored before it is there": ("    mbarrier.wait(shared.out, 0)\n", "", None),
    "dk is stored with one half": ("mbarrier.init(out, count=2)", "mbarrier.init(out, count=1)", None),
    "dk is not fenced": (
        ".store(dv.to(dtype))\n    fence_async_shared()\n", ".store(dv.to(dtype))\n", "before a fence",
    ),
    "all parts of dq go to the same columns": ("* PARTS + part) * LINES", "* PARTS) * LINES", "'query':"),
    "the last columns before D are not added": (
        "(32 * LINES // BLOCK_M) < D:", "(32 * LINES // BLOCK_M) < D - 32:", "'query':",
    ),
    "the last columns of dq of the first are those of the step": (
        "_give_columns(0, shared, step - 1, PRODUCTS - 1,", "_give_columns(0, shared, step, PRODUCTS - 1,", None,
    ),
    "the last columns of dq of the first are given as others": (
        "_give_columns(0, shared, step - 1, PRODUCTS - 1,", "_give_columns(0, shared, step - 1, PRODUCTS - 2,", None,
    ),
    "the last columns of dq of the first are never given": (
        "    if steps > 0:\n        _give_columns(0, shared, steps - 1, PRODUCTS - 1, PRODUCTS, dq)\n",
        "",
        "wait for each other",
    ),
    "the last columns of dq of the second are not waited for": (
        "num_outstanding=1, deps=(dq,)", "num_outstanding=2, deps=(dq,)", "not waited for",
    ),
    "columns of dq are not waited for": (
        "warpgroup_mma_wait(PRODUCTS - 1 - i,", "warpgroup_mma_wait(PRODUCTS - i,", "not waited for",
    ),
    "the two tiles of a product change places": ("PRODUCTS + i, one, other)", "PRODUCTS + i, other, one)", "'query':"),
    "every second column of a product is a tile": (
        ".reshape([2, LINES, 32]).permute((1, 2, 0))", ".reshape([LINES, 32, 2])", "'query':",
    ),
}  # fmt: skip
MASKED = "    if (block < full) | (block >= full_end):\n        p = hide(p, block * s.shape[1], earliest, band)\n"
# Of what other heads have, too, or other kernels.
SLIPS_IN_COMMON = {
    "both have the same columns": ("slice(h * HALF, HALF", "slice(0, HALF", "'query':|'key':"),
    "the diagonal takes no mask": (MASKED, MASKED.replace("(block < full) | ", ""), "'query':|'key':"),
    "the far end of a window takes no mask": (
        MASKED, MASKED.replace("(block >= full_end)", "(block > full_end)"), "'query':|'key':|'value':",
    ),
    "dq lies in another order": ("permute((4, 0, 2, 3, 5, 1, 6))", "permute((4, 0, 2, 3, 1, 5, 6))", "'query':"),
    "two tiles of dq are not fenced": (
        "    fence_async_shared()\n    publish(ring, pair)\n", "    publish(ring, pair)\n", "before a fence",
    ),
    "the second tile of dq is not fenced": (
        "    claim(ring, 2 * pair + 1)\n    tile(ring, 2 * pair + 1).store(other)\n    fence_async_shared()\n",
        "    fence_async_shared()\n    claim(ring, 2 * pair + 1)\n    tile(ring, 2 * pair + 1).store(other)\n",
        "before a fence",
    ),
    "two tiles of dq are said to be there before a fence": (
        "    fence_async_shared()\n    publish(ring, pair)\n",
        "    publish(ring, pair)\n    fence_async_shared()\n",
        "before a fence",
    ),
    "the first tile of dq is written over while it is added": (
        "    claim(ring, 2 * pair)\n    tile(ring, 2 * pair).store(one)\n",
        "    tile(ring, 2 * pair).store(one)\n",
        "changed while it was stored",
    ),
    "the second tile of dq is written over while it is added": (
        "    claim(ring, 2 * pair + 1)\n", "", "changed while it was stored",
    ),
    "two tiles of dq are never said to be there": ("    publish(ring, pair)\n", "", "wait for each other"),
}  # fmt: skip
SLIP = Case("slip", Hkv=1, Sq=80, Sk=70, D=256, Dv=136, window=(60, 0), scale=0.5, **BF16)
SOME = "'query':|'key':|'value':|wait for each other|before a fence|changed while|more arrivals"


@pytest.mark.parametrize("slip", sample.planted(map(pytest.param, SLIPS)))
def test_a_slip_is_found(slip, tmp_path, monkeypatch):
    before, after, said = SLIPS[slip]
    emulate(monkeypatch, wide=slipped(wide, before, after, tmp_path))
    with pytest.raises(Exception, match=said or SOME):
        check(SLIP, "cpu")


@pytest.mark.parametrize("slip", sample.planted(map(pytest.param, SLIPS_IN_COMMON)))
def test_a_slip_in_common_is_found(slip, tmp_path, monkeypatch):
    before, after, said = SLIPS_IN_COMMON[slip]
    modules = slipped_in((steps, ring), before, after, tmp_path)
    monkeypatch.setattr(test_hopper, "ring", modules.pop("ring", ring))
    emulate(monkeypatch, **modules)
    with pytest.raises(Exception, match=said):
        check(SLIP, "cpu")


@pytest.mark.parametrize("hidden", [True, False])
def test_keys_past_the_end_weigh_nothing(hidden, tmp_path, monkeypatch):
    """Where every score is far below 0, a score of 0 would weigh more than float32 can hold."""
    slip = slipped(steps, MASKED, MASKED.replace(" | (block >= full_end)", ""), tmp_path)
    emulate(monkeypatch, steps=steps if hidden else slip)
    inputs = [torch.full((1, 1, size, 144), value) for size, value in ((20, 3.0), (35, -3.0), (35, 1.0))]
    inputs = [(x + torch.randn_like(x) / 8).to(torch.bfloat16).requires_grad_() for x in inputs]
    incoming = torch.randn(1, 1, 20, 144, dtype=torch.bfloat16)
    gradients = torch.autograd.grad(fa.attention(*inputs, backend="hopper"), inputs, incoming)
    assert gradients[0].isfinite().all() == hidden


def test_which_heads_it_takes():
    inputs = [torch.empty(1, 1, 9, size, dtype=torch.bfloat16, device="meta") for size in (128, 128, 136)]
    call = fa.call.rules.checked(fa.call.form.Arguments(*inputs), named=True)
    assert run.backward_on_hopper(call, False) == "hopper_bwd_256"
    narrower = call._replace(value=call.key)
    assert run.backward_on_hopper(narrower, True) == "hopper_ordered"
