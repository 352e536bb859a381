"""The backward for Hopper that stores gradients of scores, elsewhere as `gluon` has it; and what a slip would do."""

import itertools
import sys

import pytest
import torch

pytest.importorskip("triton", reason="kernels need Triton")

import fusedattn as fa
from fusedattn.call.form import Arguments
from fusedattn.call.rules import checked
from fusedattn.launch import hopper, run, tiles
from fusedattn.launch.backward import passes, reasons_not_on_hopper
from fusedattn.launch.tiles import Backward

from .. import cases, sample
from ..cases import Case

if hopper.missing is not None:
    pytest.skip(hopper.missing, allow_module_level=True)

import triton.language as tl
from fusedattn.kernels.hopper import ring, steps, stored
from fusedattn.kernels.vocabulary import span
from triton.experimental import gluon as language
from triton.experimental.gluon import language as gl

from . import gluon
from .test_hopper import check, emulate, halved, launches, slipped, takes

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
    Case("rows that see nothing", Hkv=1, Sq=90, Sk=40, window=(20, 0), align="top_left", **WIDE, **BF16),
    Case("more queries than keys", Sq=90, Sk=41, causal=True, grads="out and lse", **WIDE, **BF16),
    Case("one key", Sq=40, Sk=1, **WIDE, **BF16),
    Case("one row", Sq=1, Sk=40, **WIDE, **BF16),
]
# The named cases that the kernel for Hopper takes, each once, with wider heads.
NAMED = [case._replace(D=144, Dv=136) for case in map(halved, cases.SINGLE + cases.SHAPES)]
NAMED = {case._replace(name=""): case for case in NAMED if takes(case)}
EACH = ["hopper_stored", "hopper_dk", "hopper_dq"]  # what is launched for some heads


@pytest.fixture
def launched(monkeypatch):
    """The names of kernels, as they are launched."""
    return launches(monkeypatch)


@pytest.fixture(autouse=True)
def _same_bits(monkeypatch):
    """Of wide heads it is the one that has the same bits each time."""
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)


@pytest.mark.parametrize(
    "case, form",
    [pytest.param(case, Backward(16, 2), id=case.name) for case in CASES]
    + [pytest.param(CASES[2], Backward(16, 3), id="three stages")]
    + [pytest.param(CASES[i], Backward(32, 2), id=f"{CASES[i].name}, blocks of more rows") for i in (2, 7, 8)],
)
def test_a_case(case, form, monkeypatch, launched, poison):
    """What nobody stores of scores is NaN, and so is what would be made of it."""
    emulate(monkeypatch, way_back=form)
    check(case, "cpu")
    assert launched[-3:] == EACH and not {"dq", "dkdv", "postprocess"} & {*launched}


# Every second one: of most options there are two, which differ in dtype.
@pytest.mark.parametrize("case", sample.one_in(2, sample.named([*NAMED.values()][::2])))
def test_a_named_case(case, monkeypatch, poison):
    emulate(monkeypatch)
    check(case, "cpu")


def _two_at_a_time(case, monkeypatch):
    """Have gradients of scores of two kv heads, and no more, stored at a time."""
    monkeypatch.setattr(tiles, "SCORES_BYTES", 4 * case.Hq // case.Hkv * case.Sk * -(-case.Sq // 64) * 64)


# Heads that share keys, keys that nobody sees, and blocks of rows that see all of a block of keys, or some of them.
SLIP = Case("slip", Hq=2, Hkv=1, Sq=60, Sk=70, D=136, Dv=72, window=(50, 0), align="top_left", scale=0.5, **BF16)
BLIND = Case("blind rows", Hq=1, Hkv=1, Sq=90, Sk=30, D=136, Dv=16, window=(20, 0), align="top_left", **BF16)
ROUNDS = Case("batches", B=3, Hq=2, Hkv=1, Sq=20, Sk=40, D=136, Dv=16, **BF16)
MORE_ROUNDS = [
    ROUNDS._replace(name="heads", B=1, Hq=3, Hkv=3),
    ROUNDS._replace(name="heads of batches", Hq=3, Hkv=3, causal=True, align="top_left"),
]


@pytest.mark.parametrize("case", [ROUNDS, *MORE_ROUNDS], ids=lambda case: case.name)
def test_heads_are_done_two_at_a_time(case, monkeypatch, poison):
    """And the last of an odd number alone, by as many programs as that takes."""
    emulate(monkeypatch, multiprocessors=3)
    _two_at_a_time(case, monkeypatch)
    launched, run_kernel = [], run.run_kernel

    def counted(name, programs, *given, **options):
        launched.append((name, programs))
        run_kernel(name, programs, *given, **options)

    monkeypatch.setattr(run, "run_kernel", counted)
    check(case, "cpu")
    heads, group = case.B * case.Hkv, case.Hq // case.Hkv
    want = []
    for before in range(0, heads, 2):
        some = min(2, heads - before)
        # Two blocks of keys, and one of rows. Where all are alike three programs make several of those of products.
        most = 99 if case.causal else 3
        want += zip(EACH, (2 * some, min(most, 2 * some), min(most, group * some)), strict=True)
    assert some == 1 and launched[-len(want) :] == want and launched[-len(want) - 1][0] == "preprocess"


@pytest.mark.parametrize("size", [1, 1 << 13])
def test_heads_come_in_sections(size, monkeypatch, poison):
    """Of one head, or of two or four, of which the last has fewer."""
    emulate(monkeypatch)
    monkeypatch.setattr(tiles, "SECTION_BYTES", size << 1)
    check(Case("sections", B=3, Hq=2, Hkv=1, Sq=20, Sk=16, D=136, Dv=16, causal=True, **BF16), "cpu")
    check(Case("sections", B=5, Hq=2, Hkv=2, Sq=20, Sk=16, D=136, Dv=16, **BF16), "cpu")


def _sections(call, size, monkeypatch, multiprocessors=6):
    """How many heads come together of scores, of dk, and, of query, of dq."""
    monkeypatch.setattr(tiles, "SECTION_BYTES", size)
    batch, heads, rows, _ = call.query.shape
    scores, form = hopper.new_scores(call), Backward(64, 3)
    numbers = torch.empty(batch, heads, 4, rows, device="meta")
    made = [
        hopper.stored_arguments(call, call.query, numbers, scores, call.value, form, multiprocessors),
        hopper.product_arguments(call, scores, call.key, True, form, multiprocessors),
        hopper.product_arguments(call, scores, call.query, False, form, multiprocessors),
    ]
    return [each["section"] for each in made]


def test_how_many_heads_come_together(monkeypatch):
    """Of which what blocks read many times fits: q and do, or q, of all query heads that share one of key, or k."""
    call = _call(100, batch=9, heads=4)
    of_head = 4 * 100 * 2 * 136 * 2
    assert _sections(call, 3 * of_head, monkeypatch) == [3, 3, 12 * 4]  # query heads of 12 heads of key
    assert _sections(call, 1, monkeypatch) == [1, 1, 4]


@pytest.mark.parametrize("heads, together", [(7, 7), (8, 8), (20, 10), (40, 10), (43, 11)])
def test_with_a_band_there_are_blocks_enough_for_a_gpu(heads, together, monkeypatch):
    """Ten heads of a block are more than three to two multiprocessors; as many come in each section, nearly."""
    call = _call(100, batch=heads)._replace(right=0)
    assert _sections(call, 1, monkeypatch)[:2] == [together, together]
    assert _sections(_call(100, batch=heads), 1, monkeypatch)[:2] == [1, 1]
    assert _sections(call, 1 << 40, monkeypatch)[:2] == [heads, heads]


def _call(length, dim=136, batch=1, heads=1):
    """A checked call that names "hopper", of tensors without data."""
    query = torch.empty(batch, heads, length, dim, dtype=torch.bfloat16, device="meta")
    key = torch.empty(batch, 1, length, dim, dtype=torch.bfloat16, device="meta")
    return checked(Arguments(query, key, key), named=True)


def test_how_many_heads_are_done_at_a_time(monkeypatch):
    """As many as there is room for, and two where one of them fills it."""
    call = _call(128, batch=9)
    for room, some in ((100, 9), (9, 9), (8, 8), (3, 3), (1, 2)):
        monkeypatch.setattr(tiles, "SCORES_BYTES", room * 128 * 128 * 2)
        assert hopper.heads_at_a_time(call) == some and hopper.new_scores(call).shape == (some, 1, 128, 128)
    assert hopper.heads_at_a_time(_call(128)) == 1


def _order(seed, monkeypatch, late=False):
    """Have the stand-in choose another order; late: copies arrive when nobody can go on without them."""
    for name in EACH:
        run.KERNELS[name].random.seed(seed)
        if late:
            monkeypatch.setattr(run.KERNELS[name].random, "random", lambda: 1.0)


def test_bits_are_the_same_each_time(monkeypatch):
    """In whatever order warps and copies come."""
    emulate(monkeypatch)
    tensors, options = SLIP.draw()
    inputs = [tensors[name].requires_grad_() for name in ("query", "key", "value")]
    found = []
    for seed in range(2):
        _order(seed, monkeypatch, late=seed == 1)
        out = fa.attention(*inputs, backend="hopper", **options)
        found.append(torch.autograd.grad(out, inputs, tensors["out"]))
    assert all(map(torch.equal, *found))


@language.jit
def _met(Met, rows, keys, left, right, TOP_LEFT: gl.constexpr, TILE: gl.constexpr):
    """What each block of rows meets, and each of keys: (blocks, 4: begin and end of keys, begin and end of rows)."""
    band, block = span.band(rows, keys, left, right, TOP_LEFT), gl.program_id(0)
    begin, end = stored._met(band, block * TILE, TILE)
    tl.store(Met + 4 * block, begin)
    tl.store(Met + 4 * block + 1, end)
    begin, end = stored._met(span.flip(band), block * TILE, TILE)
    tl.store(Met + 4 * block + 2, begin)
    tl.store(Met + 4 * block + 3, end)


def _check_tiles(module):
    """What the first kernel stores, and the second reads for dk, it reads for dq, and each pair that is seen is there.

    Counted one by one, of lengths and bands of every kind.
    """
    kernel, size, sides = gluon.Emulator(_met, ring, steps, module, sys.modules[__name__]), 4, (None, 0, 1, 5, 9)
    for rows, keys, left, right, top in itertools.product((1, 7, 14), (1, 6, 8, 15), sides, sides, (False, True)):
        down, across = -(-rows // size), -(-keys // size)
        met = torch.zeros(max(down, across), 4, dtype=torch.int32)
        kernel[(len(met),)](Met=met, rows=rows, keys=keys, left=left, right=right, TOP_LEFT=top, TILE=size)
        met, level = met.tolist(), 0 if top else keys - rows
        read = {(r, k) for r in range(down) for k in range(*met[r][:2])}
        written = {(r, k) for k in range(across) for r in range(*met[k][2:])}
        seen = {
            (r // size, k // size)
            for r, k in itertools.product(range(rows), range(keys))
            if (left is None or k >= r + level - left) and (right is None or k <= r + level + right)
        }
        assert read == written, "what is read is not what is written"
        assert seen <= read <= {*itertools.product(range(down), range(across))}, "what is seen is not there"


def test_what_is_read_is_what_is_written():
    _check_tiles(stored)


SLIPS_OF_TILES = {
    "rows end before their block": ("gl.cdiv(band.rows, TILE) * TILE", "band.rows"),
    "the last tile is left out": ("begin, gl.maximum(begin, end)", "begin, gl.maximum(begin, end - 1)"),
    "the first tile is left out": ("return begin, gl.maximum(begin, end)", "return begin + 1, gl.maximum(begin, end)"),
    "tiles that take a mask are left out": ("begin, gl.maximum(begin, end)", "full, gl.maximum(full, full_end)"),
}


@pytest.mark.parametrize("slip", sample.planted(map(pytest.param, SLIPS_OF_TILES)))
def test_a_slip_in_the_tiles_is_found(slip, tmp_path):
    with pytest.raises(AssertionError, match="what is read is not|what is seen is not"):
        _check_tiles(slipped(stored, *SLIPS_OF_TILES[slip], tmp_path))


READ, WRITTEN, FOREVER = "changed while it was read", "changed while it was stored", "wait for each other"
NOT_YET, FENCE, GIVEN_UP = "not waited for", "before a fence", "registers given up too soon"
QUERY, KEY, VALUE = "{'query': ", "{'key': ", "{'value': "  # the first gradient that is wrong
PUT = """    ring.claim(shared.ds, 2 * step + g)
    ring.tile(shared.ds, 2 * step + g).store(ds.to(shared.q.tiles.dtype))
    fence_async_shared()
    ring.publish(shared.ds, 2 * step + g)
"""  # what `ring.put` does
# What a slip in the kernels would do to a GPU: each is a line that becomes another.
SLIPS = {
    # The warp that copies.
    "values are not expected with keys": ("K.block_type.nbytes + V.block_type.nbytes", "K.block_type.nbytes", FOREVER),
    "both have the same keys": ("g, K, kv, first + g * KEYS", "g, K, kv, first", QUERY),
    "both have the same values": ("g, V, kv, first + g * KEYS", "g, V, kv, first", QUERY),
    "both halves of do are the first": ("h * GradOut.block_type.shape[3]", "0", QUERY),
    "all steps have the numbers of the first rows": ("0, block * BLOCK_M)", "0, begin * BLOCK_M)", QUERY),
    "all heads have the queries of the first": (
        "plane = span.query_head(kv, member, GROUP)", "plane = span.query_head(kv, 0, GROUP)", QUERY,
    ),
    "half of the rows are left out": ("end * (TILE // BLOCK_M)", "end", QUERY),
    "the band is not flipped": ("begin, end = _met(span.flip(band),", "begin, end = _met(band,", QUERY),
    "each round begins with the first head": ("order, 0, heads, before,", "order, 0, heads, 0,", "AssertionError"),
    "batches have as many heads as are done at a time": ("_take(order, 0, heads,", "_take(order, 0, planes,", QUERY),
    "blocks of keys are those of rows": ("gl.cdiv(k_len, 2 * KEYS), planes", "gl.cdiv(q_len, 2 * KEYS), planes", VALUE),
    # What is stored.
    "all rounds store scores where the first does not": ("GROUP).index - before * GROUP", "GROUP).index", QUERY),
    "scores are stored as those of the first head": (
        "here = span.query_head(kv, member, GROUP)", "here = span.query_head(kv, 0, GROUP)", QUERY,
    ),
    "ds is stored before it is there": ("        ring.wait(shared.ds, 2 * step + g)\n", "", f"{WRITTEN}|{FOREVER}"),
    "ds is given back while it is stored": (
        "        store_wait(0)\n        ring.release(shared.ds, 2 * step + g)\n",
        "        ring.release(shared.ds, 2 * step + g)\n        store_wait(0)\n",
        WRITTEN,
    ),
    "ds is never given back": ("        ring.release(shared.ds, 2 * step + g)\n", "", FOREVER),
    "ds is given to the other": ("ring.put(shared.ds, 2 * step + g,", "ring.put(shared.ds, 2 * step + 1 - g,", QUERY),
    "ds is written over while it is stored": (
        "    ring.put(shared.ds, 2 * step + g, ds.to(shared.q.tiles.dtype))\n",
        PUT.replace("    ring.claim(shared.ds, 2 * step + g)\n", ""),
        WRITTEN,
    ),
    "ds is not fenced": (
        "    ring.put(shared.ds, 2 * step + g, ds.to(shared.q.tiles.dtype))\n",
        PUT.replace("    fence_async_shared()\n", ""),
        FENCE,
    ),
    "dv is stored before it is there": ("    mbarrier.wait(shared.out.index(g), 0)\n", "", WRITTEN),
    "both store dv of the same keys": ("kv.head, first + g * KEYS, 0]", "kv.head, first, 0]", VALUE),
    "nobody waits until dv is stored": (
        "shared.v.index(g))\n    store_wait(0)\n", "shared.v.index(g))\n", "before its stores",
    ),
    # Halves.
    "the first half of dp is lost": (
        "other, dp, is_async", "other, dp, use_acc=False, is_async", QUERY,
    ),
    "the first half of do is not waited for": ("    ring.wait(shared.do, 2 * step, pred=there)\n", "", READ),
    "the second half of do is not waited for": ("    ring.wait(shared.do, 2 * step + 1, pred=there)\n", "", READ),
    "both halves of dv are of the second of do": (
        "ring.tile(shared.do, 2 * step), dv0", "ring.tile(shared.do, 2 * step + 1), dv0", VALUE,
    ),
    "the second half of dv is added to the first": ("2 * step + 1), dv1,", "2 * step + 1), dv0,", VALUE),
    "the first half of dv is stored as the second": ("half(v, 1).store(dv1", "half(v, 1).store(dv0", VALUE),
    # Gradients of scores.
    "delta is left out": ("(dp - across(shared.rows.tiles, step, 2, LAYOUT))", "dp", QUERY),
    "delta is that of the next step": ("shared.rows.tiles, step, 2,", "shared.rows.tiles, step + 1, 2,", QUERY),
    "rows are given back twice": (
        "    ds = p * (dp", "    ring.release(shared.rows, step)\n    ds = p * (dp", f"{FOREVER}|more arrivals",
    ),
    "rows are never given back": ("    ring.release(shared.rows, step)\n", "", FOREVER),
    # Before the first step.
    "both hide the same keys": ("cols = first + g * KEYS", "cols = first", QUERY),
    "the keys of the second take no mask": ("extent(band, first, 2 * KEYS,", "extent(band, first, KEYS,", QUERY),
    "keys are not waited for": ("    ring.wait(shared.k, g)\n", "", READ),
    "the first q is not waited for": ("0, some, begin * 0, zero", "0, False, begin * 0, zero", READ),
    "q is waited for where there is none": ("0, some, begin * 0, zero", "0, True, begin * 0, zero", FOREVER),
    "the first q is given back while it is read": (
        "    s = warpgroup_mma_wait(num_outstanding=0, deps=(s,))\n"
        "    ring.release(shared.q, 0, pred=some)\n",
        "    ring.release(shared.q, 0, pred=some)\n"
        "    s = warpgroup_mma_wait(num_outstanding=0, deps=(s,))\n",
        READ,
    ),
    "the first q is never given back": ("    ring.release(shared.q, 0, pred=some)\n", "", FOREVER),
    "the first scores are not waited for": (
        "num_outstanding=0, deps=(s,))\n    ring", "num_outstanding=1, deps=(s,))\n    ring", NOT_YET,
    ),
    "rows are waited for where there are none": ("shared.rows, 0, pred=some)", "shared.rows, 0)", FOREVER),
    "the first do is not waited for": ("0, some, zero", "0, False, zero", READ),
    "do is waited for where there is none": ("0, some, zero", "0, True, zero", FOREVER),
    "the first dp is of the values of the other": (
        "shared.v, g), shared, 0", "shared.v, 1 - g), shared, 0", f"{READ}|{QUERY}",
    ),
    "the first dp is not waited for": (
        "num_outstanding=0, deps=(dp,))\n    for step", "num_outstanding=1, deps=(dp,))\n    for step", NOT_YET,
    ),
    # A step.
    "nothing comes before the last step": ("more = step + 1 < steps", "more = step + 2 < steps", f"{READ}|{QUERY}"),
    "the next q is not waited for": ("step + 1, more, none, zero", "step + 1, False, none, zero", READ),
    "scores are of the keys of the other": ("shared.k, g + none", "shared.k, 1 - g + none", f"{READ}|{QUERY}"),
    "the first half of dv is not waited for": (
        "num_outstanding=2, deps=(dv0, w)", "num_outstanding=3, deps=(dv0, w)", READ,
    ),
    "weights are given up while the first half of dv reads them": (
        "dv0, w = warpgroup_mma_wait(num_outstanding=2, deps=(dv0, w))",
        "dv0 = warpgroup_mma_wait(num_outstanding=2, deps=(dv0,))",
        GIVEN_UP,
    ),
    "the first half of do is given back while it is read": (
        "        dv0, w = warpgroup_mma_wait(num_outstanding=2, deps=(dv0, w))\n"
        "        ring.release(shared.do, 2 * step)\n",
        "        ring.release(shared.do, 2 * step)\n"
        "        dv0, w = warpgroup_mma_wait(num_outstanding=2, deps=(dv0, w))\n",
        READ,
    ),
    "the first half of do is never given back": ("        ring.release(shared.do, 2 * step)\n", "", FOREVER),
    "the second half of dv is not waited for": (
        "num_outstanding=1, deps=(dv1, w)", "num_outstanding=2, deps=(dv1, w)", GIVEN_UP,
    ),
    "weights are given up while the second half of dv reads them": (
        "dv1, w = warpgroup_mma_wait(num_outstanding=1, deps=(dv1, w))",
        "dv1 = warpgroup_mma_wait(num_outstanding=1, deps=(dv1,))",
        GIVEN_UP,
    ),
    "the second half of do is never given back": ("        ring.release(shared.do, 2 * step + 1)\n", "", FOREVER),
    "the next scores are not waited for": (
        "num_outstanding=0, deps=(s,))\n        ring", "num_outstanding=1, deps=(s,))\n        ring", NOT_YET,
    ),
    "the next q is given back while it is read": (
        "        s = warpgroup_mma_wait(num_outstanding=0, deps=(s,))\n"
        "        ring.release(shared.q, step + 1, pred=more)\n",
        "        ring.release(shared.q, step + 1, pred=more)\n"
        "        s = warpgroup_mma_wait(num_outstanding=0, deps=(s,))\n",
        READ,
    ),
    "the next q is never given back": ("        ring.release(shared.q, step + 1, pred=more)\n", "", FOREVER),
    "the next do is not waited for": ("step + 1, more, zero", "step + 1, False, zero", READ),
    "q is waited for after the last step": ("step + 1, more, none, zero", "step + 1, True, none, zero", FOREVER),
    "do is waited for after the last step": ("step + 1, more, zero", "step + 1, True, zero", FOREVER),
    "rows are waited for after the last step": ("shared.rows, step + 1, pred=more)", "shared.rows, step + 1)", FOREVER),
    "the next dp is of the values of the other": ("shared.v, g + none", "shared.v, 1 - g + none", QUERY),
    "the next dp is of the do of the step": ("step + 1, more, zero", "step, more, zero", f"{FOREVER}|{READ}"),
    "the next weights have the numbers of the rows of the step": (
        "weights_of_rows(s, shared.rows.tiles, step + 1,", "weights_of_rows(s, shared.rows.tiles, step,", QUERY,
    ),
    "the next weights are masked as those of the step": (
        "shared.rows.tiles, step + 1, block,", "shared.rows.tiles, step + 1, gl.maximum(block - 1, begin),", QUERY,
    ),
    "the next dp is not waited for": (
        "num_outstanding=0, deps=(dp,))\n    v = ", "num_outstanding=1, deps=(dp,))\n    v = ", NOT_YET,
    ),
    "dv is not fenced": (
        "    fence_async_shared()\n    mbarrier.arrive(shared.out", "    mbarrier.arrive(shared.out", FENCE,
    ),
    "dv is never said to be there": ("    mbarrier.arrive(shared.out.index(g), count=1)\n", "", FOREVER),
    "dv is said to be that of the other": (
        "mbarrier.arrive(shared.out.index(g)", "mbarrier.arrive(shared.out.index(1 - g)", f"{WRITTEN}|{VALUE}",
    ),
    # What is shared.
    "q is given back by one": ("ring.ring(Q, 1, 2)", "ring.ring(Q, 1, 1)", f"{FOREVER}|{READ}"),
    "do is given back by one": ("ring.ring(GradOut, 3, 2)", "ring.ring(GradOut, 3, 1)", READ),
    "one half of do is there at a time": ("ring.ring(GradOut, 3, 2)", "ring.ring(GradOut, 1, 2)", FOREVER),
    "rows are given back by one": ("ring.ring(Rows, 2, 2)", "ring.ring(Rows, 2, 1)", FOREVER),
    "ds is given back by two": ("ring.ring(GradScores, 2, 1)", "ring.ring(GradScores, 2, 2)", FOREVER),
    "both warpgroups are the first": ("(_consume, (1, shared", "(_consume, (0, shared", FOREVER),
}  # fmt: skip
PUT_PRODUCT = """        ring.claim(factors.product, 2 * n + g)
        ring.tile(factors.product, 2 * n + g).store((total * scale).to(factors.product.tiles.dtype))
        fence_async_shared()
        ring.publish(factors.product, 2 * n + g)
"""
PRODUCT = "        ring.put(factors.product, 2 * n + g, (total * scale).to(factors.product.tiles.dtype))\n"
SLIPS_OF_PRODUCTS = {
    # The warp that copies.
    "others are not expected with ds": ("GradScores.block_type.nbytes + Others", "Others", f"{READ}|{FOREVER}"),
    "dk is of the queries of the first head": ("span.query_head(plane, member, GROUP)", "plane", KEY),
    "dk has one head of each group": (
        "MEMBERS: gl.constexpr = GROUP if OF_K else 1\n    step", "MEMBERS: gl.constexpr = 1\n    step", FOREVER,
    ),
    "heads follow each other before their blocks end": ("begin, end, MEMBERS)", "begin, end, 1)", KEY),
    "dk of each round is of scores of the first": ("other.index - before * GROUP", "other.index", KEY),
    "dq of each round is of scores of the first": ("plane.index - before * GROUP", "plane.index", QUERY),
    "rows and keys change places for dk": ("here, first, block * DEPTH)", "here, block * DEPTH, first)", KEY),
    "rows and keys change places for dq": ("here, block * DEPTH, first)", "here, first, block * DEPTH)", QUERY),
    "dq is of the keys of another head": ("other = span.kv_head(plane, GROUP)", "other = plane", QUERY),
    "ds goes with others of the first step": ("Others, other, block * DEPTH", "Others, other, begin * DEPTH", QUERY),
    "each block begins with the first tile of the ring": (
        "        first, plane, begin, end = _factors_of(work, n, factors, OF_K)\n        block",
        "        first, plane, begin, end = _factors_of(work, n, factors, OF_K)\n        step = 0\n        block",
        FOREVER,
    ),
    # The warps that store.
    "a product is stored before it is there": (
        "        ring.wait(factors.product, 2 * n + g)\n", "", f"{WRITTEN}|{FOREVER}|more arrivals",
    ),
    "both are stored in the same place": ("plane.head, first + g * ROWS, 0]", "plane.head, first, 0]", QUERY),
    "a product is given back while it is stored": (
        "        store_wait(0)\n        ring.release(factors.product, 2 * n + g)\n",
        "        ring.release(factors.product, 2 * n + g)\n        store_wait(0)\n",
        WRITTEN,
    ),
    "a product is never given back": ("        ring.release(factors.product, 2 * n + g)\n", "", FOREVER),
    # Warpgroups.
    "ds is not waited for": ("            ring.wait(factors.ds, step)\n", "", READ),
    "both multiply the same keys for dk": ("slice(g * ROWS, ROWS, dim=0)", "slice(0, ROWS, dim=0)", KEY),
    "both multiply the same rows for dq": ("slice(g * ROWS, ROWS, dim=1)", "slice(0, ROWS, dim=1)", QUERY),
    "others are given back while a product reads them": (
        "num_outstanding=1, deps=(total,)", "num_outstanding=2, deps=(total,)", READ,
    ),
    "ds is given back while it is read": ("step - 1, pred=i > 0)", "step)", f"{READ}|{FOREVER}|more arrivals"),
    "ds is given back before there is any": ("step - 1, pred=i > 0)", "step - 1)", f"{READ}|{FOREVER}|more arrivals"),
    "ds is never given back": ("            ring.release(factors.ds, step - 1, pred=i > 0)\n", "", FOREVER),
    "the last ds of a block is never given back": (
        "        ring.release(factors.ds, step - 1, pred=steps > 0)\n", "", FOREVER,
    ),
    "the last ds of a block is given back while it is read": (
        "        total = warpgroup_mma_wait(num_outstanding=0, deps=(total,))\n"
        "        ring.release(factors.ds, step - 1, pred=steps > 0)\n",
        "        ring.release(factors.ds, step - 1, pred=steps > 0)\n"
        "        total = warpgroup_mma_wait(num_outstanding=0, deps=(total,))\n",
        READ,
    ),
    "a ds is given back of a block that has none": (
        "step - 1, pred=steps > 0)", "step - 1)", f"{READ}|{FOREVER}|more arrivals",
    ),
    "the last ds is given back once more after a block that has none": ("pred=steps > 0)", "pred=step > 0)", READ),
    "a sum is not waited for": ("num_outstanding=0, deps=(total,)", "num_outstanding=1, deps=(total,)", NOT_YET),
    "a block begins with what the last one came to": (
        "total = gl.zeros([ROWS, WIDTH], gl.float32, LAYOUT)",
        "total = gl.zeros([ROWS, WIDTH], gl.float32, LAYOUT) if n == 0 else total",
        f"{KEY}|{QUERY}",
    ),
    "the scale is left out": ("(total * scale)", "total", QUERY),
    "a product is put where that of the other is": (
        "ring.put(factors.product, 2 * n + g,", "ring.put(factors.product, 2 * n + 1 - g,", QUERY,
    ),
    "a product is written over while it is stored": (
        PRODUCT, PUT_PRODUCT.replace("        ring.claim(factors.product, 2 * n + g)\n", ""), WRITTEN,
    ),
    "a product is not fenced": (PRODUCT, PUT_PRODUCT.replace("        fence_async_shared()\n", ""), FENCE),
    "a product is never said to be there": (
        PRODUCT, PUT_PRODUCT.replace("        ring.publish(factors.product, 2 * n + g)\n", ""), FOREVER,
    ),
    # Which blocks.
    "rounds of dq begin as those of dk": ("before * (GROUP // MEMBERS)", "before", "AssertionError"),
    "rounds of dk begin as those of dq": ("before * (GROUP // MEMBERS)", "before * GROUP", KEY),
    "each round makes those of the first": ("work.heads, work.before, TILE", "work.heads, 0, TILE", "AssertionError"),
    "dk has blocks of rows": ("k_len if OF_K else q_len", "q_len", KEY),
    "dq has blocks of keys": ("k_len if OF_K else q_len", "k_len", QUERY),
    "the band is not flipped for dk": ("    if OF_K:\n        band = span.flip(band)\n", "", KEY),
    "the band is flipped for dq": (
        "    if OF_K:\n        band = span.flip(band)\n", "    band = span.flip(band)\n", QUERY,
    ),
    "the last blocks of all planes are left out": (
        "schedule.Schedule(gl.cdiv(length, TILE),", "schedule.Schedule(gl.maximum(length // TILE, 1),", QUERY,
    ),
    "what nobody stored is read": ("begin * PARTS, end * PARTS", "begin, end * PARTS", KEY),
    "half of what was stored is left out": ("begin * PARTS, end * PARTS", "begin * PARTS, end", QUERY),
    "ds is given back by one": ("ring.ring(GradScores, STAGES, 2)", "ring.ring(GradScores, STAGES, 1)", READ),
    "both are the first": ("(_multiply, (1, factors", "(_multiply, (0, factors", FOREVER),
}  # fmt: skip
# Of weights, which other heads have, too.
SLIPS_IN_COMMON = {
    "both halves of columns are the first": ("h * HALF", "0", QUERY),
    "the diagonal takes no mask": (
        "softmax.weights(s, row, scale)\n    if (block < full) | (",
        "softmax.weights(s, row, scale)\n    if (",
        QUERY,
    ),
    "the far end of a window takes no mask": (
        "softmax.weights(s, row, scale)\n    if (block < full) | (block >= full_end)",
        "softmax.weights(s, row, scale)\n    if (block < full) | (block > full_end)",
        QUERY,
    ),
    "other rows are masked": ("hide(p, block * s.shape[1],", "hide(p, full * s.shape[1],", QUERY),
    "the logarithm is the pivot": ("across(rows, step, 1, LAYOUT))", "across(rows, step, 0, LAYOUT))", QUERY),
    "the numbers are those of the next rows": ("ring.at(rows, step).slice", "ring.at(rows, step + 1).slice", QUERY),
}
# What comes before others is mostly there when they are, unless it is the last to come.
LATE = {
    "the keys of the other are waited for": ("    ring.wait(shared.k, g)\n", "    ring.wait(shared.k, 1 - g)\n"),
    "the first rows are not waited for": ("    ring.wait(shared.rows, 0, pred=some)\n", ""),
    "the next rows are not waited for": ("        ring.wait(shared.rows, step + 1, pred=more)\n", ""),
}


def _is_found(said, monkeypatch):
    """In one round of all heads, or in several."""
    with pytest.raises(Exception, match=said):
        check(SLIP, "cpu")
        _two_at_a_time(ROUNDS, monkeypatch)
        check(ROUNDS, "cpu")


@pytest.mark.parametrize("slip", sample.planted(map(pytest.param, SLIPS)))
def test_a_slip_is_found(slip, tmp_path, monkeypatch, poison):
    before, after, said = SLIPS[slip]
    emulate(monkeypatch, stored=slipped(stored, before, after, tmp_path))
    _is_found(said, monkeypatch)


@pytest.mark.parametrize("slip", sample.planted(map(pytest.param, SLIPS_OF_PRODUCTS)))
def test_a_slip_in_products_is_found(slip, tmp_path, monkeypatch, poison):
    """Where one program makes all blocks of a round, the first of them, for dq, of rows that see nothing."""
    before, after, said = SLIPS_OF_PRODUCTS[slip]
    emulate(monkeypatch, stored=slipped(stored, before, after, tmp_path))
    monkeypatch.setattr(hopper, "product_programs", lambda *_: 1)
    with pytest.raises(Exception, match=said):
        check(SLIP, "cpu")
        check(BLIND, "cpu")
        monkeypatch.setattr(hopper, "_section", lambda *_: 1)  # then blocks of keys that nobody sees are not the last
        check(SLIP._replace(B=2), "cpu")
        _two_at_a_time(ROUNDS, monkeypatch)
        check(ROUNDS, "cpu")


@pytest.mark.parametrize("slip", sample.planted(map(pytest.param, SLIPS_IN_COMMON)))
def test_a_slip_in_common_is_found(slip, tmp_path, monkeypatch, poison):
    before, after, said = SLIPS_IN_COMMON[slip]
    emulate(monkeypatch, steps=slipped(steps, before, after, tmp_path))
    _is_found(said, monkeypatch)


@pytest.mark.parametrize("slip", sample.planted(map(pytest.param, LATE)))
def test_a_slip_is_found_where_copies_are_late(slip, tmp_path, monkeypatch, poison):
    """In one of a few orders."""
    emulate(monkeypatch, stored=slipped(stored, *LATE[slip], tmp_path))
    with pytest.raises(Exception, match=f"{READ}|{QUERY}|more arrivals"):
        for seed in range(6):
            _order(seed, monkeypatch, late=True)
            check(SLIP, "cpu")


@pytest.mark.parametrize("case", [SLIP, CASES[6]], ids=lambda case: case.name)
def test_weights_may_be_copied_for_each_product(case, tmp_path, monkeypatch, poison):
    """As they are by Triton from 3.9 on, or stay where they are, as by others."""
    slip = slipped(stored, "if OPERANDS_STAY:", f"if {not steps.OPERANDS_STAY.value}:", tmp_path)
    emulate(monkeypatch, stored=slip)
    check(case, "cpu")


NEED = True, True, True, False, False, False


def test_which_calls_it_takes():
    call = _call(16384)
    assert run.backward_on_hopper(call, True) == "hopper_stored" and not reasons_not_on_hopper(call, NEED, "hopper")
    assert passes(call, NEED, "hopper") == ("preprocess", "hopper_stored")
    assert run.backward_on_hopper(call, False) == "hopper_stored"
    assert run.backward_on_hopper(_call(9, dim=128), True) == "hopper_ordered"


@pytest.mark.parametrize("length, heads, size", [(32768, 1, 2048), (16384, 2, 1024)])
def test_what_takes_too_much_memory_it_does_not_take(length, heads, size):
    """Then the universal kernels do, in two passes."""
    call = _call(length, heads=heads)
    (said,) = reasons_not_on_hopper(call, NEED, "hopper")
    assert f"{size} MiB" in said and "no more than 512" in said
    assert passes(call, NEED, "hopper") == ("preprocess", "dq", "dkdv")


def test_explain_lists_it(monkeypatch):
    emulate(monkeypatch)
    inputs = [torch.randn(1, 2, 9, 136, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    said = fa.explain(*inputs, causal=True, backend="hopper")
    assert said.tiles["hopper_stored"] == Backward(16, 2) and not {"dq", "dkdv", "postprocess"} & {*said.tiles}
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
    assert "hopper_stored" in fa.explain(*inputs, backend="hopper").tiles
    monkeypatch.setattr(tiles, "SCORES_BYTES", 100)
    assert "dkdv" in fa.explain(*inputs, backend="hopper").tiles
