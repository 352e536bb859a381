"""Plants mistakes in the sources of kernels, which the tests of their compiled code must find.

No barrier is removed: Triton places barriers, and the fence before the copy of an output tile.
"""

import contextlib
import importlib
import pathlib
import pkgutil

import pytest

pytest.importorskip("triton", reason="kernels need Triton")

from fusedattn.kernels.vocabulary import copies
from triton.runtime.jit import JITFunction

from fusedattn import kernels
from fusedattn.launch import failures

from .. import sample
from . import calls
from .cases import ENTRIES
from .report import Fault

VOCABULARY = "span", "memory", "scores", "masks", "row_sums"
SPAN, TILES, SCORES, MASKS, SUMS = (f"vocabulary/{name}.py" for name in VOCABULARY)
RING, HOPPER, PRODUCER, WAY_BACK = (f"hopper/{name}.py" for name in ("ring", "forward", "producer", "backward"))
PAIRS, PLAIN, LONG, ONE_ROW = "mask of pairs", "plain D64", "hopper long", "hopper one row"
MANY, BIAS_OF_ROWS = "hopper many blocks a program", "hopper bias of rows, sinks D128 causal"
BITS, HEADS_BITS = "hopper mask, causal D128", "hopper mask, key mask, slopes"
SPLITS, SINKS = "hopper empty splits, causal D128", "hopper sinks, packed"
HIDDEN = "hopper sinks, query mask D256"
LISTED, LISTED_KEYS = "hopper mask, packed causal D256", "hopper key mask, packed window D256"
ADD = 'tl.atomic_add(pointers(of_rows(sums, plane), r, c), tile, mask=exists, sem="relaxed")'
LOAD_AND_STORE = """where = pointers(of_rows(sums, plane), r, c)
        tl.store(where, tl.load(where, mask=exists, other=0.0) + tile, mask=exists)"""
ADD_BOX = "sums.atomic_add(place, tile.reshape(sums.block_shape))"
LOAD_AND_STORE_BOX = "sums.store(place, sums.load(place) + tile.reshape(sums.block_shape))"
PLACE = "plane.head, first + plane.packed.row, 0]"
FENCED = """    fence_async_shared()
    shared = Shared"""

# Name, file, text, its replacement, call, capability. The interpreter does not find the mistakes of universal kernels.
UNSEEN = (
    ("additions that are no atomics", TILES, ADD, LOAD_AND_STORE, PLAIN, 80),
    ("additions of boxes that are no atomics", TILES, ADD_BOX, LOAD_AND_STORE_BOX, PLAIN, 90),
    ("dq in other rows", "dkdv.py", "first, band.rows, dq", "block * 16, band.rows, dq", PLAIN, 90),
    ("a split left out", "combine.py", "rows * splits", "rows * splits - rows", "decode: cache, split and merged", 90),
    ("sums of two sequences", SPAN, "ROWS + plane.batch + block", "ROWS + block", "hopper packed", 90),
    ("sinks without delta", "preprocess.py", "gradient.Row(row, delta,", "gradient.Row(row, dlse,", SINKS, 90),
    ("capped weights not dropped", "vocabulary/dropout.py", "(p & 0xFFFF) ^", "p ^", "hopper dropout, splits", 90),
    ("a bias without its sink", SUMS, "ds + _of_sink", "ds + 0 * _of_sink", BIAS_OF_ROWS, 90),
    ("hidden rows copied", "preprocess.py", "rows, exists, D)", "rows, rows < n, D)", HIDDEN, 90),
    ("hidden keys copied", "preprocess.py", "rows, exists, k_len", "rows, rows < k_len, k_len", LISTED_KEYS, 90),
    ("a slot too few", "sequences.py", "tl.minimum(used, size)", "tl.minimum(used - 1, size)", "hopper packed", 90),
    ("turns of an empty slot", WAY_BACK, "block = gl.maximum(block, 0)", "pass", "hopper packed D64, two passes", 90),
    ("stats without the largest score", "combine.py", "one, rows, state.row_max,", "one, rows, lse,", SPLITS, 90),
    ("dq in another sequence", TILES, f"[plane.batch * 0, {PLACE}", f"[plane.batch, {PLACE}", "packed causal", 90),
    ("other rows of q", PRODUCER, "band), first + g * ROWS)", "band), first + g * 16)", "hopper D64", 90),
    ("a phase of two stages", RING, "step // TILES & 1 ^ 1", "step // 2 & 1 ^ 1", MANY, 90),
    ("the other half of dq", WAY_BACK, "slice(g * PART, PART", "slice((1 - g) * PART, PART", "hopper causal D128", 90),
    ("four tiles of ds for one", WAY_BACK, "step % 2 * GROUPS", "step % 1 * GROUPS", "hopper causal D128", 90),
    ("bits in the wrong order", MASKS, "(shown[0] >> (c &", "(shown[0] >> (~c &", PAIRS, 80),
    ("a block in part taken for full", "block_mask.py", "cut, number, mark)", "cut, FULL, mark)", PAIRS, 80),
    ("the last ragged block", MASKS, "first < band.keys, band", "first + BLOCK <= band.keys, band", PAIRS, 90),
    ("the words of another block of keys", MASKS, "r, first + BLOCK, band", "r, first, band", PAIRS, 90),
    ("words of a mask by rows", "block_mask.py", "seen << bits[:, None], 0)", "seen << bits[None, :], 1)", BITS, 90),
    ("mbarriers that nobody fenced", HOPPER, FENCED, FENCED.split("\n")[1], ONE_ROW, 90),
)
if copies.LATER_UNFENCED.value:  # with a later Triton this is no mistake
    LATER = "vocabulary/attend.py", "copies.fence_later(spec.BY_THREADS)", "pass"
    UNSEEN += (("values that nobody fenced", *LATER, "keys by threads", 90),)
PACKED, PACKED_CAUSAL = "hopper packed", "hopper packed causal D128"
D128, D64, STORED = "hopper causal D128", "hopper window", "hopper causal D256, two passes"
KEYS, PAGES = "hopper key mask, causal", "decode: prefill D128, into pages"
DROPPED = "hopper dropout, key mask"
MIRRORED = "hopper mask, packed causal, two passes"
BIASED, BIAS_OF_KEYS = "hopper bias, slopes, two passes", "hopper bias of keys, cap fp16"
WAITED = "        ring.wait(tiles, at, pred=exists)\n"
PARTS, WIDEST = "hopper causal D192 Dv128", "hopper D512 causal"
RELEASED = "        ring.release(shared.q, step)\n"
DK = "        dk, ds = warpgroup_mma_wait(num_outstanding=FOR_S + GROUPS, deps=(dk, ds))\n"
ON_HOPPER = tuple(
    (name, f"hopper/{file}.py", text, becomes, call, 90)
    for name, file, text, becomes, call in (
        ("keys of two splits", "work", "(split + 1) * count //", "(split + 2) * count //", "hopper splits"),
        ("an empty split", "work", "begin, gl.cdiv(band.keys, BLOCK_N))", "begin, begin)", SPLITS),
        ("keys of another head", "work", "span.kv_head(plane, results.splits), plane", "plane, plane", SPLITS),
        ("hidden values stay", "ring", "gl.where(seen[:, None], part.load(LINES), 0.0)", "part.load(LINES)", KEYS),
        ("hidden values not fenced", "ring", "0.0))\n        fence_async_shared()\n", "0.0))\n", KEYS),
        ("a tile list read too far", "producer", "entry(lists, i + 1)", "entry(lists, i + 2)", KEYS),
        ("keys past the end of a cache", "producer",
         "gl.minimum(gl.maximum(band.keys - block * BLOCK_N, 0), BLOCK_N)", "BLOCK_N", "decode: prefill"),
        ("the page of the block before", "producer",
         "            page = _page(work, K, kv, block - 1, PAGE, BLOCK_N)\n", "", PAGES),
        ("a cache taken for full", "work", "paging.length(work.caches, plane, band.keys)", "band.keys", PAGES),
        ("lists of the mirrored block", "backward", "p.slot + block - mirrored", "p.slot", MIRRORED),
        ("words of another block of rows", "producer", "first + n // ACROSS * ROWS", "first", BITS),
        ("words of another block of keys", "producer", " + n % ACROSS * masking.BLOCK", "", BITS),
        ("a step in part taken for full", "producer", "= i < lists.masked if", "= i < lists.masked - 1 if", BITS),
        ("words not waited for", "notes", " + len(numbers) * Words.block_type.nbytes", "", BITS),
        ("words of a mask of other rows", "backward", "BLOCK_M + n // GROUPS * 64, key", "BLOCK_M, key", HEADS_BITS),
        ("words of a mask of other keys", "body", "step, part * GROUPS + g)", "step, part * GROUPS)", BITS),
        ("the other head of a mask", "visits", "(ahead >> 32).to(gl.int32)", "member * 0", HEADS_BITS),
        ("lists of a mask read too far", "visits", "lists.full) + i,", "lists.full) + i + 1,", BITS),
        ("words overwritten while they are read", "notes", "= notes.numbers.shape[0]", "= 1", BITS),
        ("halves of words swapped", "notes",
         "(high.to(gl.int64) << 32) | low", "(low.to(gl.int64) << 32) | high", BITS),
        ("bits of another sequence", "work", "batch * heads + plane.head, ())", "plane.index, ())",
         "hopper dropout D128, packed"),
        ("rows of the next sequence", "ring", ".packed.row, band.rows)", ".packed.row, band.rows + 1)", PACKED),
        ("keys of the next sequence", "ring", ".packed.key, band.keys)", ".packed.key, band.keys + 1)", PACKED),
        ("a program too many", "forward", "share > 0 if PACKED", "share >= 0 if PACKED", PACKED_CAUSAL),
        ("the wrong end of the slots", "work", "work.order.blocks - 1 - slot", "slot + 1", PACKED),
        ("a band for all sequences", "work", "band(rows, keys, work.left", "band(keys, rows, work.left", PACKED_CAUSAL),
        ("k given back before its product", "forward", "LATER + TILES - 1 - t", "LATER + TILES - t", MANY),
        ("a wait for the first q", "forward", "wait(shared.q, n * GROUPS + g,", "wait(shared.q, g,", MANY),
        ("the next scores are of this q", "forward", "shared, n + 1, step + 1,", "shared, n, step + 1,", MANY),
        ("a block taken twice", "forward", "minimum(n + 1, share - 1)", "minimum(n, share - 1)", MANY),
        ("an output before its product", "forward", "=1 if EARLY", "=2 if EARLY", MANY),
        ("q given back while its output is copied", "forward",
         "            store_wait(0)  # of the previous block's output\n", "", MANY),
        ("the next k given back before its product", "forward", "TILES, 0, more)", "TILES, 1, more)", D128),
        ("a product too few waited for", "forward", "step, TILES, 1)", "step, TILES, 2)", ONE_ROW),
        ("a part of k given back before its product", "forward", "LATER + TILES - 1 - t", "LATER + TILES - t", WIDEST),
        ("later parts of k not waited for", "forward", "        if t > 0:\n", "        if t > 3:\n", WIDEST),
        ("values before the next keys", "producer", "shape[0] == 1\n    v =", "shape[0] < 1\n    v =", WIDEST),
        ("the first columns of values twice", "producer",
         "ACROSS == 1 else part * WIDTH", "ACROSS > 0 else ()", WIDEST),
        ("the first columns of the output twice", "forward",
         "ACROSS == 1 else part * WIDTH", "ACROSS > 0 else ()", WIDEST),
        ("chunks given back before their product", "wide", "=1, deps=(x,)", "=2, deps=(x,)", WIDEST),
        ("scores that are not finished", "wide", "EARLY, deps=(s,)", "2, deps=(s,)", WIDEST),
        ("ds for p", "wide", "Weights, here, shared.p", "Weights, here, shared.ds", WIDEST),
        ("p overwritten while it is stored", "wide", "        store_wait(0)  # of the step before\n", "", WIDEST),
        ("the first columns of products twice", "products",
         "plane.index % form.ACROSS * factors", "plane.index % 1 * factors", WIDEST),
        ("words of the same rows twice", "wide", "row + n * masking.BLOCK", "row", "hopper mask, key mask D320"),
        ("a bias of the first key", "wide", "r, keys.cols[:, None], True", "r, keys.cols[:, None] * 0, True",
         "hopper bias, dropout D264"),
        ("statistics stored by each part", "forward", "True if ACROSS == 1 else part == 0", "True",
         "hopper many blocks a program D128 Dv320"),
        ("the first part taken for each", "ring", "column + i * desc.block_type.shape[-1]", "column", PARTS),
        ("only the last part multiplied", "forward", "use_acc=t + i > 0", "use_acc=False", PARTS),
        ("another's reader forgotten", "ring", "count=READERS", "count=1", LONG),
        ("half of a block expected", "ring", "desc.block_type.nbytes)", "desc.block_type.nbytes // 2)", ONE_ROW),
        ("ones not fenced", "backward", "    fence_async_shared()\n    wide =", "    wide =", D128),
        ("q given back while it is read", "backward", DK + RELEASED, RELEASED + DK, D128),
        ("the ds of the other not waited for", "backward", "        mbarrier.wait(shared.met, step & 1)\n", "", D128),
        ("scores have the numbers of dp", "body", "step, 0, part, PARTS)", "step, 1, part, PARTS)", D128),
        ("the far end of a window", "body", "block >= keys.full_end)", "block > keys.full_end)", D64),
        ("the second half has the numbers of the first", "halves",
         "begin_scores(k, _columns(q, 1), shared, step, zero, 1, 2)",
         "begin_scores(k, _columns(q, 1), shared, step, zero, 0, 2)", D64),
        ("the next q not waited for", "halves",
         "        ring.wait(shared.q, step + 1, pred=step + 1 < steps)\n", "", D64),
        ("the slope of the head before", "body", "member + 1, GROUP - 1)", "member, GROUP - 1)",
         "hopper slopes, packed top left, heads 4:2"),
        ("hidden keys stay", "body",
         "gl.where(masking.real_keys(masks, kv, cols, n)[:, None], tile.load(LAYOUT), 0.0)", "tile.load(LAYOUT)", KEYS),
        ("bits of other rows", "body", "rows = first // 2 +", "rows = first +", DROPPED),
        ("weights before dropout", "body", "dropping.after(dropout, p)", "dropping.before(dropout, p)", DROPPED),
        ("dp before dropout", "body",
         "of_weights(dropout, p, dp,", "of_weights(None, dropping.before(dropout, p), dp,", DROPPED),
        ("capped weights without the scale of dropout", "body",
         "_pair(dropping.scaled(rules.dropout, p)", "_pair(p", "hopper dropout, splits"),
        ("bits of another head", "backward",
         "step + 1 < steps, span.query_head(kv, member, GROUP)", "step + 1 < steps, span.query_head(kv, 0, GROUP)",
         "hopper dropout D128, packed"),
        ("a bias of other rows", "backward", "block * BLOCK_M + half * 64", "block * BLOCK_M", BIASED),
        ("a bias of other keys", "backward", "row, first + g * KEYS)\n        block", "row, first)\n        block",
         BIASED),
        ("a bias of rows of the block before", "ring", "r = row + gl", "r = row - 64 + gl", BIAS_OF_ROWS),
        ("a bias given back twice", "body", WAITED, WAITED + WAITED.replace("wait", "release"), BIASED),
        ("a pivot in one number with a bias", "body",
         "score.bias is None and score.rough", "score.rough", BIAS_OF_KEYS),
        ("no derivative of the cap", "body", "scores.apply_dcap(score, dcap, p)", "p", "hopper softcap D256 fp16"),
        ("numbers of the other half", "body", "slice(part * COUNT,", "slice(0,", "hopper softcap, a repeated call"),
        ("another has the turn", "backward", "last - first // KEYS", "last - first // KEYS + 1",
         "hopper causal D128, two passes"),
        ("both halves of do are the first", "stored", "h * GradOut.block_type.shape[-1]", "0", STORED),
        ("delta left out", "body", "across(rows, step, 2,", "across(rows, step, 3,", STORED),
        ("rows never given back", "stored", "    ring.release(shared.rows, step)\n", "", STORED),
        ("dv not fenced", "stored",
         "        fence_async_shared()\n        mbarrier.arrive(shared.out", "        mbarrier.arrive(shared.out",
         STORED),
        ("the band not flipped for dk", "products", "    if form.OF_K:\n        band = span.flip(band)\n", "", STORED),
        ("only the last columns of k and q", "stored", "use_acc=FOR_S == 2", "use_acc=False", PARTS),
        ("ds of two sequences", "visits", "key // TILE + plane.batch", "key // TILE", "hopper packed window D256 fp16"),
        ("others given back while a product reads them", "products", "num_outstanding=1, deps=(total,)",
         "num_outstanding=2, deps=(total,)", STORED),
        ("the other head of listed ds", "visits", "(ahead >> 32).to(gl.int32)", "step * 0", LISTED),
        ("half of each listed tile", "visits", "lists.count * PARTS", "lists.count", LISTED),
        ("a listed tile in part masked", "stored", "lists.masked * (2 * KEYS // BLOCK_M)", "lists.masked", LISTED),
        ("words of other rows beside stored ds", "stored", "head, block * shared.q.tiles.shape[-2]", "head, block * 0",
         LISTED),
        ("hidden values beside stored ds", "stored",
         "        body.clean(ring.at(shared.v, g), first + g * KEYS, rules.masks, kv, band.keys)\n", "", LISTED_KEYS),
        ("slopes of another head", "stored", "= gl.minimum(member, form.GROUP - 1)", "= member * 0",
         "hopper slopes D256, heads 4:2"),
        ("bits of another sequence beside stored ds", "visits", "plane.batch * work.heads + head, plane", "head, plane",
         "hopper dropout, packed D192 Dv128"),
        ("a bias of other rows in the tile of ds", "stored", "Bias, plane, block * BLOCK_M, first",
         "Bias, plane, 0, first", "hopper bias, key mask D256, heads 4:2"),
        ("a bias of other keys from memory", "stored", "block * 0, keys.cols[:, None]",
         "block * 0, keys.cols[:, None] * 0", "hopper bias of keys, key mask D256 fp16"),
        ("a product not waited for", "products", "            ring.wait(factors.product, 2 * n + g)\n", "", STORED),
    )
)  # fmt: skip
# Tangents that lack a term.
LACKING = (
    ("the mean", "tangent.py", "t_lse[:, None] * out.to(tile.dtype)", "0.0 * out.to(tile.dtype)"),
    ("the derivative of the cap", SCORES, "apply_dcap(score, dcap, grad(score, t_x))", "grad(score, t_x)"),
    ("the tangent of the bias", SCORES, " + memory.cast(t_bias, t_x.dtype)", ""),
    ("that of lse", "tangent.py", "rows, q_len, 0, t_lse)", "rows, q_len, 0, t_lse * 0.0)"),
)


def functions():
    """Return all Triton functions of the kernels package, without duplicates."""
    found = {}
    for module in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, JITFunction):
                found[value.__module__, value.__name__] = value
    return list(found.values())


@contextlib.contextmanager
def planted(file, text, becomes):
    """Replace a text in a file of the kernels within a context, and forget compiled kernels."""
    module = ".".join((kernels.__name__, *pathlib.PurePath(file).with_suffix("").parts))
    (owner,) = (each for each in functions() if each.__module__ == module and text in each.src)
    original, hashes = owner.src, {each.fn: each.hash for each in functions()}  # of kernels and callees
    owner._unsafe_update_src(original.replace(text, becomes))
    for each in functions():
        each.hash = None
    try:
        yield
    finally:
        owner._unsafe_update_src(original)
        for each in functions():
            each.hash = hashes[each.fn]
        failures.forget()


def pytest_generate_tests(metafunc):
    if "becomes" in metafunc.fixturenames:
        lacking = ((f"a tangent without {name}", *row, "tangent everything", 80) for name, *row in LACKING)
        some = *UNSEEN, *ON_HOPPER, *lacking
        rows = sample.matrix(*(pytest.param(*row[1:], id=row[0].replace(" ", "_")) for row in some))
        metafunc.parametrize("file, text, becomes, name, capability", sample.planted(rows))


def test_each_text_occurs_once():
    folder = pathlib.Path(kernels.__path__[0])
    texts = [row[1:3] for row in (*UNSEEN, *ON_HOPPER, *LACKING)]
    assert not [row for row in texts if (folder / row[0]).read_text(encoding="utf-8").count(row[1]) != 1]


def test_a_planted_mistake_is_seen(file, text, becomes, name, capability):
    with planted(file, text, becomes):
        try:
            assert calls.execute(ENTRIES[name], capability).wrong()
        except Fault:
            pass


def test_a_planted_mistake_is_removed():
    before = {each.fn: each.cache_key for each in functions()}
    with planted(TILES, ADD, LOAD_AND_STORE):
        changed = [each.fn for each in functions() if each.cache_key != before[each.fn]]
    assert {"add", "_walk_rows", "dkdv"} <= {each.__name__ for each in changed}
    assert all(each.cache_key == before[each.fn] for each in functions())
