"""Kernels before and after the backward: row statistics, copies that zero hidden tokens for TMA, and scaling of dq."""

from typing import NamedTuple

import triton
import triton.language as tl

from .vocabulary import columns, gradient, masks as masking, memory, row_sums, saved_stats, scores, softmax, span

LARGEST = tl.constexpr(3.3895313892515355e38)  # largest finite bfloat16


@triton.jit
def _put_terms(x, columns, at: tl.constexpr, tile):
    """Split x into a sum of three bfloat16 numbers, and put them into columns at, at + 1 and at + 2 of a tile."""
    # Clamp finite numbers that bfloat16 would round to infinity: the second term holds the rest.
    near = tl.where(tl.abs(x) < float("inf"), tl.minimum(tl.maximum(x, -LARGEST), LARGEST), x)
    first = near.to(tl.bfloat16).to(tl.float32)
    rest = tl.where(tl.abs(x) < float("inf"), x - first, 0.0)
    second = rest.to(tl.bfloat16).to(tl.float32)
    tile = tl.where(columns == at, first[:, None], tile)
    tile = tl.where(columns == at + 1, second[:, None], tile)
    return tl.where(columns == at + 2, (rest - second)[:, None], tile)


@triton.jit
def _store_added(Rows, plane, rows, n, row, delta, scale):
    """Store row statistics for the Hopper backward as sums of bfloat16 terms, in two tables of 16 columns."""
    # The tables are (B, 2 Hq, Sq, 16), for scores and for dp. Products with ones (hopper/body.py) add them.
    r, c = rows[:, None], tl.arange(0, 16)[None, :]
    zeros = tl.zeros([rows.shape[0], 16], tl.float32)
    # A fully masked row gets a finite number far below 0, not -inf: products with 0 would turn -inf into NaN.
    log2_sum = tl.where(row.neg_log2_sum == float("-inf"), -1.7e38, row.neg_log2_sum / (scale * softmax.LOG2E))
    of_scores = _put_terms(log2_sum, c, 8, _put_terms(-row.pivot, c, 0, zeros))
    table = Rows + (2 * tl.cast(plane.index, tl.int64) * n + r) * 16 + c
    tl.store(table, of_scores.to(tl.bfloat16), mask=r < n)
    tl.store(table + tl.cast(n, tl.int64) * 16, _put_terms(-delta, c, 0, zeros).to(tl.bfloat16), mask=r < n)


class Shown(NamedTuple):
    """Buffers for copies of Q and grad_out, with 0 in rows that the mask `rows` hides, because TMA cannot skip rows."""

    q: memory.View
    grad_out: memory.View
    rows: memory.View
    Q: memory.View


@triton.jit
def _copy(To, From, plane, rows, exists, n, D: tl.constexpr):
    tile = memory.load(memory.matrix(From, plane), rows, exists, D)
    memory.store(memory.matrix(To, plane), rows, rows < n, tile, D)


@triton.jit(do_not_specialize=["heads", "k_len"])
def real_keys(K, Shown, keys, heads, k_len, D: tl.constexpr, BLOCK_M: tl.constexpr):
    """Copy K (B, Hkv, Sk, D) to Shown, with 0 for keys that the key mask `keys` hides; all three are Views."""
    block, plane = span.place(tl.program_id(0), k_len, heads, BLOCK_M)
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    exists = masking.real_keys(masking.Masks(None, keys, None), plane, rows, k_len)
    _copy(Shown, K, plane, rows, exists, k_len, D)


@triton.jit(do_not_specialize=["heads", "q_len", "k_len", "pitch"])
def preprocess(
    Out, incoming, GradLse, Weights, Stats, GradQ, Turns, by_row, shown,
    heads, q_len, k_len, pitch, score, small,
    spec: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_M: tl.constexpr, UNIT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write Rows, usually (B, Hq, Sq, 4): softmax pivot, neg_log2_sum, delta and dlse. Zero or copy other buffers."""
    # Rows is incoming.rows, contiguous. Hopper's backward kernels may read other layouts: (B, Hq, 4, pitch), with pitch
    # at least Sq; or, if Rows is bfloat16, the layout of `_store_added`, which needs score. Otherwise pitch is None.
    # Stats has COLUMNS as in `saved_stats`, or only row_max and log2_sum. Stats and GradLse (or None) are contiguous.
    # Weights and incoming.grad_weights are Views of (B, Hq, Sq, Sk), or None. A row that saw nothing has delta 0, even
    # if its incoming gradients are NaN. If no gradient of scores is wanted, Out is None and delta is 0. GradQ, unless
    # None, is set to 0, because other kernels add to it. With UNIT it is the Sums of `postprocess`, (B, Hq, Sq rounded
    # up to UNIT, WIDTH). Turns, unless None, is set to 0. It has the int32 counters of hopper/turns.py: one for program
    # numbers, and two for each row. With UNIT, by_row, a `row_sums.ByRow`, gets each row's gradients of its bias and
    # sink. shown, unless None, gets copies with hidden rows set to 0. small is 1 if a Hopper kernel follows and a
    # softcap keeps scores small, otherwise None.
    block, plane = span.place(tl.program_id(0), q_len, heads, BLOCK_M)
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    if GradQ is not None:
        tl.static_assert(UNIT is None or BLOCK_M % UNIT == 0)
        ALL: tl.constexpr = spec.D if UNIT is None else WIDTH
        exists = rows < (q_len if UNIT is None else tl.cdiv(q_len, UNIT) * UNIT)
        zeros = tl.zeros([BLOCK_M, memory.width(ALL)], GradQ.base.dtype.element_ty)
        memory.store(memory.matrix(GradQ, plane), rows, exists, zeros, ALL)
    if Turns is not None:
        counters = memory.table(Turns + 1, plane, q_len, 2)
        memory.store(counters, rows, rows < q_len, tl.zeros([BLOCK_M, 2], tl.int32), 2)
        if tl.program_id(0) == 0:
            tl.store(Turns, 0)
    if shown is not None:
        exists = masking.real_rows(masking.Masks(None, None, shown.rows), plane, rows, q_len)
        _copy(shown.q, shown.Q, plane, rows, exists, q_len, spec.D)
        _copy(shown.grad_out, incoming.grad_out, plane, rows, exists, q_len, spec.DV)
    stats = memory.table(Stats, plane, q_len, COLUMNS)
    log2_sum = memory.load_column(stats, rows, q_len, 1)
    row_max = memory.load_column(stats, rows, q_len, 0)  # any number in a row that sees nothing
    row = softmax.row(tl.where(log2_sum == float("inf"), float("-inf"), row_max), log2_sum)
    delta = tl.zeros([BLOCK_M], log2_sum.dtype)
    dlse = delta
    if GradLse is not None:
        dlse = memory.load_column(memory.table(GradLse, plane, q_len, 1), rows, q_len, 0)
    if Out is not None:
        out = memory.load(memory.matrix(Out, plane), rows, rows < q_len, spec.DV)
        grad_out = memory.load(memory.matrix(incoming.grad_out, plane), rows, rows < q_len, spec.DV)
        if out.dtype == grad_out.dtype:
            # The diagonal of out @ grad_out.T is summed like dp, so dp - delta is exactly 0 if one key has all weight.
            left = columns.load(memory.matrix(Out, plane), rows, rows < q_len, spec.DV)
            right = columns.load(memory.matrix(incoming.grad_out, plane), rows, rows < q_len, spec.DV)
            if len(left.tiles) > 0:
                products = tl.dot(out, grad_out.T, input_precision=spec.PRECISION, out_dtype=log2_sum.dtype)
            else:
                products = columns.dot(left, right, spec.DV, spec, log2_sum.dtype)
            line = tl.arange(0, BLOCK_M)
            delta = tl.sum(tl.where(line[:, None] == line[None, :], products, 0.0), 1)
            if spec.PRECISION == "tf32":  # add what the product dropped of out, an error that all keys of a row share
                delta += tl.sum((out - columns.truncated(out)) * columns.truncated(grad_out), 1)
        else:
            delta = row_sums.total(out * grad_out.to(out.dtype))
        if COLUMNS > 2:
            lost = saved_stats.lost(saved_stats.errors(stats), rows, q_len, out, spec.DV)
            delta += tl.sum(lost * grad_out.to(tl.float32), 1)
        if incoming.grad_weights is not None:
            p, dp = memory.matrix(Weights, plane), memory.matrix(incoming.grad_weights, plane)
            r = rows[:, None]
            for start in tl.range(0, k_len, 64):
                c = start + tl.arange(0, 64)[None, :]
                p_tile = memory.load_pairs(p, r, c, q_len, k_len, CHECK=True).to(log2_sum.dtype)
                dp_tile = memory.load_pairs(dp, r, c, q_len, k_len, CHECK=True).to(log2_sum.dtype)
                delta += tl.sum(tl.where(p_tile == 0, 0.0, p_tile * dp_tile), 1)  # gradients of hidden pairs may be NaN
        delta = tl.where(log2_sum == float("inf"), 0.0, delta - dlse)
    if UNIT is not None:  # without this test, Triton 3.6 compiles the next lines even if score is None
        if row_sums.wanted(by_row):
            known = gradient.Row(row, delta, dlse)
            sums = row_sums.Sums(None, row_sums.known_ds(known, score, plane), None, None)
            row_sums.store(by_row, sums, known, score, plane, rows, q_len, PARTIAL=True)
    if incoming.rows.dtype.element_ty == tl.bfloat16:
        _store_added(incoming.rows, plane, rows, q_len, row, delta, score.softmax_scale)
    else:
        if pitch is None:
            table = memory.table(incoming.rows, plane, q_len, 4)
        else:
            table = memory.View(incoming.rows + tl.cast(plane.index, tl.int64) * 4 * pitch, (1, pitch))
        pivot, neg_log2_sum = row.pivot, row.neg_log2_sum
        if small is not None:  # the exponent then needs one number instead of two
            pivot, neg_log2_sum = pivot * 0.0, neg_log2_sum - pivot * softmax.LOG2E
        memory.store_column(table, rows, q_len, 0, pivot)
        memory.store_column(table, rows, q_len, 1, neg_log2_sum)
        memory.store_column(table, rows, q_len, 2, delta)
        memory.store_column(table, rows, q_len, 3, dlse)


@triton.jit
def _ordered(m, first, n, ROWS: tl.constexpr, UNIT: tl.constexpr, WIDTH: tl.constexpr):
    """Load rows first .. first + ROWS - 1 of the Hopper backward's dq, and undo the order of `layouts.lines`."""
    line = tl.arange(0, ROWS * WIDTH // 32)[:, None]
    at = first.to(tl.int64) * WIDTH + line * 32 + tl.arange(0, 32)[None, :]
    total = tl.load(m.base + at, mask=at < tl.cast(n, tl.int64) * WIDTH, other=0.0)
    parts = total.reshape([ROWS // UNIT, WIDTH // 8, UNIT // 16, 4, 2, 4, 2, 2])
    return parts.trans(0, 2, 6, 3, 4, 1, 5, 7).reshape([ROWS, WIDTH])


@triton.jit(do_not_specialize=["heads", "q_len"])
def postprocess(
    Sums, GradQ, sequences, heads, q_len, score,
    D: tl.constexpr, BLOCK_M: tl.constexpr, UNIT: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write Sums times the scale to GradQ, a View of (B, Hq, Sq, D). Sums, a View, has this shape if UNIT is None."""
    # Without UNIT, Sums may be GradQ. With UNIT it has the order of hopper's `layouts.lines`, in tiles of UNIT rows and
    # WIDTH columns. Each packed sequence, which needs UNIT, has whole blocks of BLOCK rows there (`span.padded`).
    block, plane, q_len, _ = span.locate(sequences, q_len, q_len, heads, BLOCK_M, BY_KEYS=False)
    if sequences is not None:  # an unused slot has no rows, and block -1
        block = tl.maximum(block, 0)
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    if UNIT is None:
        total = memory.load(memory.matrix(Sums, plane), rows, rows < q_len, D)
        memory.store(memory.matrix(GradQ, plane), rows, rows < q_len, scores.grad(score, total), D)
    else:
        batch, before = span.padded(plane, 0, BLOCK)
        first = before * BLOCK
        sums = memory.matrix(Sums, span.Plane(batch, plane.head, plane.index, ()))
        total = _ordered(sums, first + block * BLOCK_M, first + tl.cdiv(q_len, UNIT) * UNIT, BLOCK_M, UNIT, WIDTH)
        m, r, c = memory.of_rows(GradQ, plane), rows[:, None], tl.arange(0, WIDTH)[None, :]
        total = scores.grad(score, total).to(GradQ.base.dtype.element_ty)
        tl.store(memory.pointers(m, r, c), total, mask=(r < q_len) & (c < D))
