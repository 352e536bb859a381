"""Parts of a step of the Hopper backward kernels, and how they subtract the statistics of each row.

Products of ones with a table of 16 columns subtract the pivot and logarithm of a row from its scores, and delta from
dp. `preprocess` writes the table, with each number as three bfloat16 terms. This takes products of K = 16, two for
scores and one for dp, but no loads into registers and no arithmetic. With dropout, heads wider than 128, or options
that change scores before the pivot is subtracted, `across` loads the statistics from float32 tiles into registers.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma

from ..vocabulary import dropout as dropping, gradient, masks as masking, memory, scores, softmax, span
from ..vocabulary.copies import VERSION
from . import layouts, notes as noting, ring, visits
from .copies import fence_async_shared
from .layouts import WARPS

GROUPS = gl.constexpr(2)  # warpgroups that multiply
# True if products read left operands from the registers that hold them. Triton 3.9 copies them, which may not fit.
OPERANDS_STAY = gl.constexpr(VERSION < (3, 9))


class Keys(NamedTuple):
    """A warpgroup's keys: indices, first row that sees each, the band, and their row blocks (`visits.extent`).

    counters: Philox counters of dropout, one for each two keys, or ().
    """

    cols: gl.tensor
    earliest: gl.tensor
    band: span.Band
    begin: gl.tensor
    full: gl.tensor
    full_end: gl.tensor
    end: gl.tensor
    counters: gl.tensor


@gluon.jit
def keys_of(g: gl.constexpr, program, all_real, rules, s, BLOCK_M: gl.constexpr):
    """Return the Keys of warpgroup g, for scores s [keys, rows]. all_real: (1 if no key is hidden, else 0,), or ()."""
    kv, first, band, _ = program
    KEYS: gl.constexpr = s.shape[0]
    LAYOUT: gl.constexpr = s.type.layout
    cols = first + g * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(1, LAYOUT))
    earliest, counters = span.first_to_see(band, cols[:, None]), ()
    if rules.masks.keys is not None:  # no row sees a hidden key
        earliest = gl.where(masking.real_keys(rules.masks, kv, cols, band.keys)[:, None], earliest, 0x7FFFFFFF)
    begin, full, full_end, end = visits.extent(band, first, GROUPS * KEYS, BLOCK_M)
    if len(all_real) > 0:
        full_end = gl.where(all_real[0] > 0, full_end, full)
    if rules.dropout is not None:
        pairs = gl.arange(0, KEYS // 2, layout=gl.SliceLayout(1, layouts.of_counters(s.shape[1])))
        counters = (first + g * KEYS) // 2 + pairs
    return Keys(cols, earliest, band, begin, full, full_end, end, counters)


@gluon.jit
def begin(g: gl.constexpr, shared, program, all_real, rules, s, GROUP: gl.constexpr):
    """Wait for k and v, zero hidden keys, and return (Keys, ALiBi slope of the first query head, number of steps)."""
    kv, first, band, lists = program
    KEYS: gl.constexpr = shared.k.tiles.shape[-2]
    BLOCK_M: gl.constexpr = shared.q.tiles.shape[-2]
    keys = keys_of(g, program, all_real, rules, s, BLOCK_M)
    slope = slope_of(rules.score, kv, keys.begin * 0, GROUP)
    steps = gl.maximum(keys.end - keys.begin, 0) * GROUP if len(lists) == 0 else lists.count
    for other in gl.static_range(GROUPS):
        ring.wait(shared.k, other)
    if rules.masks.keys is not None:
        clean(ring.tile(shared.k, g), first + g * KEYS, rules.masks, kv, band.keys)
        clean(ring.at(shared.v, g), first + g * KEYS, rules.masks, kv, band.keys)
        fence_async_shared()
    return keys, slope, steps


@gluon.jit
def rows_from(s, first):
    """Return the row index of each column of scores [keys, rows], as [1, rows]. first: index of the first row."""
    r = gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, s.type.layout))[None, :]
    # A thread's rows of a wgmma result have the same bits 1 and 2. So it keeps one register, and adds constants.
    return (first + (r & 6)) + (r & ~6)


@gluon.jit
def clean(tile, first, masks, kv, n):
    """Set rows of a tile of k or v in shared memory to 0 if their keys are hidden: they may be NaN."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [WARPS, 1], [1, 0])
    cols = first + gl.arange(0, tile.shape[0], layout=gl.SliceLayout(1, LAYOUT))
    tile.store(gl.where(masking.real_keys(masks, kv, cols, n)[:, None], tile.load(LAYOUT), 0.0))


@gluon.jit
def half(tile, h: gl.constexpr, dim: gl.constexpr):
    HALF: gl.constexpr = tile.shape[dim] // 2
    return tile.slice(h * HALF, HALF, dim=dim)


@gluon.jit
def ones(KEYS: gl.constexpr):
    """Return two matrices [keys, 16] of zeros and ones; a product with [16, rows] then sums half of each column.

    The product with the first sums elements 0 to 7 of a column, the product with the second elements 8 to 15.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [WARPS, 1], [1, 0])
    SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([2 * KEYS, 16], gl.bfloat16)
    which = gl.arange(0, 2 * KEYS, layout=gl.SliceLayout(1, LAYOUT))[:, None] // KEYS
    column = gl.arange(0, 16, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    one = (column // 8 == which).to(gl.float32).to(gl.bfloat16)
    return gl.allocate_shared_memory(gl.bfloat16, [2 * KEYS, 16], SHARED, one)


@gluon.jit
def _numbers(rows, step, which: gl.constexpr, part: gl.constexpr = 0, PARTS: gl.constexpr = 1):
    """Return a step's table of row statistics, [16, rows], or its part `part`. which: 0 for scores, 1 for dp."""
    ROWS: gl.constexpr = rows.shape[-2]
    COUNT: gl.constexpr = ROWS // PARTS
    tables = ring.slot(rows, step).reshape([2 * ROWS, 16])
    return tables.slice(which * ROWS + part * COUNT, COUNT, dim=0).permute((1, 0))


@gluon.jit
def begin_scores(k, q, shared, step, zero, part: gl.constexpr = 0, PARTS: gl.constexpr = 1):
    """Begin wgmma for k @ q.T, [keys, rows]; with shared.one, minus each row's pivot and logarithm of its row sum.

    The pivot (row max) is subtracted first: if it is large, its sum with the logarithm would round off the latter.
    """
    s = warpgroup_mma(k, q, zero, use_acc=False, is_async=True)
    if shared.one is not None:
        table = _numbers(shared.rows, step, 0, part, PARTS)
        s = warpgroup_mma(half(shared.one, 0, 0), table, s, is_async=True)
        s = warpgroup_mma(half(shared.one, 1, 0), table, s, is_async=True)
    return s


@gluon.jit
def begin_dp(v, do, shared, step, zero, part: gl.constexpr = 0, PARTS: gl.constexpr = 1):
    """Begin wgmma for dp = v @ do.T, [keys, rows]; with shared.one, minus each row's delta."""
    dp = warpgroup_mma(v, do, zero, use_acc=False, is_async=True)
    if shared.one is not None:
        table = _numbers(shared.rows, step, 1, part, PARTS)
        dp = warpgroup_mma(half(shared.one, 0, 0), table, dp, is_async=True)
    return dp


@gluon.jit
def hide(p, first, earliest, band, score, words):
    """Return the weights p, [keys, rows from `first` on], with 0 where the band (causal, window) or a mask hides them.

    words, unless None: for each 64 rows, a mask word for each key, as `noting.load_words` reads it. earliest: first row
    that sees a key. band.high is at least band.low (`arguments.band`), even if no row sees any key.
    """
    # An impure instruction makes the compiler keep the caller's `if`. Otherwise each step would compute this.
    first = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [first], dtype=gl.int32, is_pure=False, pack=1)
    r = rows_from(p, first)
    seen = (r - earliest).to(gl.uint32) <= (band.high - band.low).to(gl.uint32)  # unsigned: a negative number is huge
    if score.slopes is not None or score.bias is not None:
        seen &= r < band.rows
    if words is not None:
        LAYOUT: gl.constexpr = p.type.layout
        rows, loaded = gl.arange(0, p.shape[1], layout=gl.SliceLayout(0, LAYOUT))[None, :], ()
        for n in gl.static_range(len(words)):
            loaded += (noting.load_words(words[n], LAYOUT),)
        seen &= masking.bit(masking.half(loaded, rows), rows)
    return gl.where(seen, p, 0 if p.dtype == gl.int32 else 0.0)


@gluon.jit
def across(rows, step, column: gl.constexpr, LAYOUT: gl.constexpr, part: gl.constexpr = 0, PARTS: gl.constexpr = 1):
    """Load row statistic `column` of a step or its part as [1, rows], from tiles [1, 1, 4, rows] or [1, 1, rows, 4]."""
    tile = ring.at(rows, step)
    if tile.shape[1] == 4:
        COUNT: gl.constexpr = tile.shape[0] // PARTS
        OF_ROWS: gl.constexpr = layouts.of_rows(COUNT)
        x = tile.slice(part * COUNT, COUNT, dim=0).slice(column, 1, dim=1).load(OF_ROWS)
        return gl.convert_layout(x.permute((1, 0)), LAYOUT)
    else:
        return tile.slice(column, 1, dim=0).load(LAYOUT)


@gluon.jit
def _first(tile, block, part: gl.constexpr, PARTS: gl.constexpr):
    """Return the first row of tile `part`, [keys, rows], in a block of PARTS tiles."""
    return block * (PARTS * tile.shape[1]) + part * tile.shape[1]


@gluon.jit
def _pair(high, low, dtype: gl.constexpr):
    """Round `high` and `low` to a 16-bit dtype, and return them as the halves of an int32."""
    CVT: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $1, $2;" if dtype == gl.bfloat16 else "cvt.rn.f16x2.f32 $0, $1, $2;"
    return gl.inline_asm_elementwise(CVT, "=r,r,r", [high, low], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def powers(
    s, bias, rows, step, block, keys, rules, slope, dtype: gl.constexpr, part: gl.constexpr = 0, PARTS: gl.constexpr = 1
):  # fmt: skip
    """Return the weights p, [keys, rows], before dropout and masks, of a block of rows or its part `part`.

    s is from `begin_scores`. With a softcap return int32, in as many registers as p. Its high half is p times the scale
    of dropout in 16 bits, its low half p times the derivative of the softcap.
    """
    score, dcap = rules.score, 1.0
    if rows.dtype == gl.bfloat16:
        p = softmax.powers(s, score.softmax_scale)
    else:
        LAYOUT: gl.constexpr = s.type.layout
        if score.slopes is None:
            s, dcap = scores.apply(score, s, bias, keys.band, (), (), ())
        else:
            r = rows_from(s, _first(s, block, part, PARTS))
            cap, at_zero, shift = score.cap, score.slope_at_zero, score.shift
            with_slope = scores.Score(score.scale, None, cap, at_zero, slope, score.bias, None, shift, score.rough)
            s, dcap = scores.apply(with_slope, s, bias, keys.band, (), r, keys.cols[:, None])
        # A rough softcap alone keeps scores small. `preprocess` has then added the pivot to the logarithm, so it is 0.
        SMALL: gl.constexpr = score.slopes is None and score.bias is None and score.rough is not None
        pivot = 0.0 if SMALL else across(rows, step, 0, LAYOUT, part, PARTS)
        row = softmax.Row(pivot, across(rows, step, 1, LAYOUT, part, PARTS))
        p = softmax.weights(s, row, score.softmax_scale)
    if score.cap is not None:
        p = _pair(dropping.scaled(rules.dropout, p), scores.apply_dcap(score, dcap, p), dtype)
    return p


@gluon.jit
def drop_and_hide(p, words, block, keys, rules, plane, part: gl.constexpr = 0, PARTS: gl.constexpr = 1):
    """Apply dropout and masks to the weights p from `powers`. words: as in `hide`. plane: the query head.

    Hidden weights become 0, dropped ones negative. With a softcap, in a dropped p the high half is 0, the low negative.
    """
    if rules.dropout is not None:
        LAYOUT: gl.constexpr = keys.counters.type.layout.parent
        first = _first(p, block, part, PARTS)
        rows = first // 2 + gl.arange(0, p.shape[1] // 2, layout=gl.SliceLayout(0, LAYOUT))
        random = dropping.four(rules.dropout, plane, rows[None, :], keys.counters[:, None])
        p = dropping.sign_by(rules.dropout, p, gl.convert_layout(random, p.type.layout))
    masked = (block < keys.full) | (block >= keys.full_end)
    if rules.score.slopes is not None or rules.score.bias is not None:  # hide rows past the end: only their q is 0
        masked |= block >= keys.band.rows // (PARTS * p.shape[1])
    if masked:
        p = hide(p, _first(p, block, part, PARTS), keys.earliest, keys.band, rules.score, words)
    return p


@gluon.jit
def bias_of(tiles, at, exists, s):
    """Return the bias of scores s [keys, rows] from tile `at` of a ring, or 0. exists: False past the last step."""
    if tiles is None:
        return 0.0
    else:
        LAYOUT: gl.constexpr = s.type.layout
        ring.wait(tiles, at, pred=exists)
        if len(tiles.tiles.shape) == 2:
            return ring.slot(tiles.tiles, at).load(gl.SliceLayout(0, LAYOUT))[None, :]
        else:
            tile = ring.tile(tiles, at)
            if tile.shape[0] == 1:
                return tile.reshape([tile.shape[1]]).load(gl.SliceLayout(1, LAYOUT))[:, None]
            else:
                return tile.permute((1, 0)).load(LAYOUT)


@gluon.jit
def biased_powers(
    g: gl.constexpr, s, shared, step, exists, block, keys, rules, slope, dtype: gl.constexpr,
    part: gl.constexpr = 0, PARTS: gl.constexpr = 1,
):  # fmt: skip
    """Return `powers` with the warpgroup's bias, if any, from its ring. exists: False past the last step."""
    bias = bias_of(shared.bias, (step * PARTS + part) * GROUPS + g, exists, s)
    return powers(s, bias, shared.rows, step, block, keys, rules, slope, dtype, part, PARTS)


@gluon.jit
def finish_weights(
    g: gl.constexpr, p, shared, step, exists, block, keys, rules, plane, part: gl.constexpr = 0, PARTS: gl.constexpr = 1
):  # fmt: skip
    """Apply `drop_and_hide` to the weights p from `biased_powers`, and release the bias."""
    words = None
    if shared.words is not None:
        words = (noting.words_of(shared.notes, shared.words, step, part * GROUPS + g),)
    p = drop_and_hide(p, words, block, keys, rules, plane, part, PARTS)
    if shared.bias is not None:  # after a branch, or ptxas would release before the loads of the bias arrive
        ring.release(shared.bias, (step * PARTS + part) * GROUPS + g, pred=exists)
    return p


@gluon.jit
def dropped(p, dropout, dtype: gl.constexpr):
    """Return p from `drop_and_hide` as weights after dropout, in 16 bits."""
    if p.dtype == gl.int32:
        return (p >> 16).to(gl.int16).to(dtype, bitcast=True)
    else:
        return dropping.after(dropout, p).to(dtype)


@gluon.jit
def of_products(p, dropout, dp, rows, step, dtype: gl.constexpr, part: gl.constexpr = 0, PARTS: gl.constexpr = 1):
    """Return ds, the gradient of products k @ q.T. p is from `drop_and_hide`, dp from `begin_dp`."""
    if p.dtype == gl.int32:
        p = p.to(gl.int16).to(dtype, bitcast=True).to(gl.float32)
    if rows.dtype == gl.bfloat16:
        return p * dp
    else:
        LAYOUT: gl.constexpr = dp.type.layout
        return gradient.of_weights(dropout, p, dp, across(rows, step, 2, LAYOUT, part, PARTS))


@gluon.jit
def slope_of(score, kv, member, GROUP: gl.constexpr):
    """Return the ALiBi slope of query head `member` of the group; () without ALiBi."""
    return () if score.slopes is None else scores.slope(score, span.query_head(kv, member, GROUP), gl.float32)


@gluon.jit
def noted(notes, step, steps, keys):
    """Read (row block, query head in its group, Keys) of a step from its note; past the end, those of the last step."""
    block, masked, member = noting.read(notes, gl.minimum(step, gl.maximum(steps - 1, 0)))
    full_end = gl.where(masked, block, block + 1)
    member = gl.where(steps > 0, member, 0)  # without steps no note was written
    keys = Keys(keys.cols, keys.earliest, keys.band, keys.begin, block, full_end, keys.end, keys.counters)
    return block, member, keys


@gluon.jit
def advance(shared, step, steps, keys, score, slope, kv, block, member, GROUP: gl.constexpr):
    """Return (row block, query head in its group, Keys, ALiBi slope) of a step, the one after (block, member)."""
    if shared.notes is None:
        if GROUP > 1 and score.slopes is not None:
            if block + 1 == keys.end:
                slope = slope_of(score, kv, gl.minimum(member + 1, GROUP - 1), GROUP)
        block, member = visits.following(block, member, keys.begin, keys.end, GROUP)
        return block, member, keys, slope
    else:
        block, member, keys = noted(shared.notes, step, steps, keys)
        return block, member, keys, slope if GROUP == 1 else slope_of(score, kv, member, GROUP)


@gluon.jit
def leave(g: gl.constexpr, shared, wide, kv, first, band, dk, dv, steps, form: gl.constexpr):
    """Overwrite k and v in shared memory with dk and dv, once both warpgroups have finished reading.

    If wide is not (), store dk and dv, of form.COLUMNS columns, in its two Views instead.
    """
    if len(wide) > 0:
        first += g * dk.shape[0]
        layouts.store_wide(memory.of_keys(wide[0], kv), first, band.keys, dk, form.COLUMNS[0])
        layouts.store_wide(memory.of_keys(wide[1], kv), first, band.keys, dv, form.COLUMNS[1])
    else:
        dtype: gl.constexpr = shared.q.tiles.dtype
        mbarrier.arrive(shared.met, count=1)
        mbarrier.wait(shared.met, steps & 1)
        ring.tile(shared.k, g).store(dk.to(dtype))
        ring.at(shared.v, g).store(dv.to(dtype))
        fence_async_shared()
        mbarrier.arrive(shared.out.index(g), count=1)
