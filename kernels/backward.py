"""Gradients in two passes, dq per block of rows and dk, dv per block of keys; weights are recomputed.

Source: FlashAttention-2, arXiv:2307.08691, algorithm 2, as two kernels so that nothing is summed by atomics.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from . import masks as hidden
from . import scores, softmax, span, tiles


class Row(NamedTuple):
    """What the backward knows of a row: its softmax, and delta = <out, dout> - dlse."""

    softmax: softmax.Row
    delta: tl.tensor


@triton.jit(do_not_specialize=["q_len"])
def prepare(
    Out,
    GradOut,
    GradLse,
    Stats,
    Rows,
    q_len,
    score,
    HEADS: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Rows (B, Hq, Sq, 4: shift, rest and unit of the softmax, delta), contiguous as Stats and GradLse (or None) are.

    A row that saw nothing has delta 0 whatever its incoming gradients hold.
    """
    block, plane = span.place(tl.program_id(0), q_len, HEADS, BLOCK_M)
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    stats = tiles.table(Stats, plane, q_len, 2)
    rest = tiles.load_column(stats, rows, q_len, 1)
    row = softmax.row(tiles.load_column(stats, rows, q_len, 0), rest, score.unit)
    out = tiles.load(tiles.matrix(Out, plane), rows, rows < q_len, DV)
    grad_out = tiles.load(tiles.matrix(GradOut, plane), rows, rows < q_len, DV)
    # The diagonal of a product of matrices: summed as `dp` is, it cancels where one key has all the weight.
    products = tl.dot(out, grad_out.T, input_precision=PRECISION, out_dtype=rest.dtype)
    line = tl.arange(0, BLOCK_M)
    delta = tl.sum(tl.where(line[:, None] == line[None, :], products, 0.0), 1)
    if GradLse is not None:
        delta -= tiles.load_column(tiles.table(GradLse, plane, q_len, 1), rows, q_len, 0)
    table = tiles.table(Rows, plane, q_len, 4)
    tiles.store_column(table, rows, q_len, 0, row.shift)
    tiles.store_column(table, rows, q_len, 1, row.rest)
    tiles.store_column(table, rows, q_len, 2, row.unit)
    tiles.store_column(table, rows, q_len, 3, tl.where(rest == float("inf"), 0.0, delta))


@triton.jit
def _load_rows(Rows, plane, rows, n):
    shift, rest, unit, delta = tiles.load_quad(tiles.table(Rows, plane, n, 4), rows, n)
    return Row(softmax.Row(shift, rest, unit), delta)


@triton.jit
def _down(row):
    """For tiles of [rows, keys]."""
    s = row.softmax
    return Row(softmax.Row(s.shift[:, None], s.rest[:, None], s.unit[:, None]), row.delta[:, None])


@triton.jit
def _across(row):
    """For tiles of [keys, rows]."""
    s = row.softmax
    return Row(softmax.Row(s.shift[None, :], s.rest[None, :], s.unit[None, :]), row.delta[None, :])


@triton.jit
def _weights(x, row, r, c, band, masks, plane, score, CHECK: tl.constexpr):
    """Weights of one tile of products x = q @ k.T; row, r and c come already broadcast, either way round."""
    p = softmax.weights(scores.apply(score, x), row.softmax, score.unit)
    if CHECK:
        p = tl.where(hidden.visible(masks, band, plane, r, c), p, 0.0)
    return p


@triton.jit
def _walk_keys(
    dq,
    q,
    do,
    k,
    v,
    row,
    rows,
    band,
    masks,
    plane,
    begin,
    end,
    score,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    CHECK: tl.constexpr,
):
    """Add to dq what key blocks [begin, end) give."""
    for j in tl.range(begin, end):
        cols = j * BLOCK_N + tl.arange(0, BLOCK_N)
        exists = hidden.real_keys(masks, plane, cols, band.keys) if CHECK else None
        k_tile, v_tile = tiles.load(k, cols, exists, D), tiles.load(v, cols, exists, DV)
        x = tl.dot(q, k_tile.T, input_precision=PRECISION, out_dtype=dq.dtype)
        p = _weights(x, _down(row), rows[:, None], cols[None, :], band, masks, plane, score, CHECK)
        dp = tl.dot(do, v_tile.T, input_precision=PRECISION, out_dtype=dq.dtype)
        ds = p * (dp - _down(row).delta)
        dq = tl.dot(ds.to(k_tile.dtype), k_tile, dq, input_precision=PRECISION, out_dtype=dq.dtype)
    return dq


@triton.jit
def _walk_rows(
    dk,
    dv,
    k,
    v,
    Q,
    GradOut,
    Rows,
    cols,
    band,
    masks,
    kv,
    begin,
    end,
    score,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PRECISION: tl.constexpr,
    CHECK: tl.constexpr,
):
    """Add to dk and dv what row blocks [begin, end) of GROUP query heads give. Tiles are [keys, rows].

    One flat loop: nested loops keep alive what they hoist, and spill over 1 KB at D = 128. It counts, for a division by
    a length is 50 instructions; and dv comes before dp, for x and dp alive at once spill as well.
    """
    member, block = begin * 0, begin
    for _ in tl.range(0, (end - begin) * GROUP):
        plane = span.member(kv, member, GROUP)
        rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
        exists = hidden.real_rows(masks, plane, rows, band.rows) if CHECK or masks.rows is not None else None
        q = tiles.load(tiles.matrix(Q, plane), rows, exists, D)
        do = tiles.load(tiles.matrix(GradOut, plane), rows, exists, DV)
        row = _load_rows(Rows, plane, rows, band.rows)
        x = tl.dot(k, q.T, input_precision=PRECISION, out_dtype=dk.dtype)
        p = _weights(x, _across(row), rows[None, :], cols[:, None], band, masks, plane, score, CHECK)
        dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION, out_dtype=dv.dtype)
        dp = tl.dot(v, do.T, input_precision=PRECISION, out_dtype=dk.dtype)
        ds = p * (dp - _across(row).delta)
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION, out_dtype=dk.dtype)
        block += 1
        if GROUP > 1:
            wrap = block == end
            member += wrap.to(tl.int32)
            block = tl.where(wrap, begin, block)
    return dk, dv


@triton.jit(do_not_specialize=["q_len", "k_len", "left", "right"])
def dq(
    Q,
    K,
    V,
    GradOut,
    Rows,
    GradQ,
    masks,
    q_len,
    k_len,
    left,
    right,
    score,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TOP_LEFT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """GradQ (B, Hq, Sq, D), from GradOut and the Rows that `prepare` made."""
    block, plane = span.place(tl.program_id(0), q_len, HEADS, BLOCK_M)
    first = span.latest_first(block, q_len, BLOCK_M)
    rows = first + tl.arange(0, BLOCK_M)
    real = hidden.real_rows(masks, plane, rows, q_len)
    q = tiles.load(tiles.matrix(Q, plane), rows, real, D)
    do = tiles.load(tiles.matrix(GradOut, plane), rows, real, DV)
    row = _load_rows(Rows, plane, rows, q_len)
    kv = span.shared(plane, GROUP)
    k, v = tiles.matrix(K, kv), tiles.matrix(V, kv)

    band = span.band(q_len, k_len, left, right, TOP_LEFT)
    begin, full, rest, end = span.blocks(band, first, BLOCK_M, BLOCK_N)
    grad = tl.zeros([BLOCK_M, tiles.width(D)], tiles.wide(Q.base.dtype.element_ty))
    if masks.pairs is None and masks.keys is None:
        grad = _walk_keys(
            grad, q, do, k, v, row, rows, band, masks, plane, begin, full, score, D, DV, BLOCK_N, PRECISION, CHECK=True
        )
        grad = _walk_keys(
            grad, q, do, k, v, row, rows, band, masks, plane, full, rest, score, D, DV, BLOCK_N, PRECISION, CHECK=False
        )
        grad = _walk_keys(
            grad, q, do, k, v, row, rows, band, masks, plane, rest, end, score, D, DV, BLOCK_N, PRECISION, CHECK=True
        )
    else:
        grad = _walk_keys(
            grad, q, do, k, v, row, rows, band, masks, plane, begin, end, score, D, DV, BLOCK_N, PRECISION, CHECK=True
        )
    tiles.store(tiles.matrix(GradQ, plane), rows, q_len, scores.grad(score, grad), D)


@triton.jit(do_not_specialize=["q_len", "k_len", "left", "right"])
def dkdv(
    Q,
    K,
    V,
    GradOut,
    Rows,
    GradK,
    GradV,
    masks,
    q_len,
    k_len,
    left,
    right,
    score,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TOP_LEFT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """GradK (B, Hkv, Sk, D) and GradV (B, Hkv, Sk, DV): the sum over the query heads that share a kv head."""
    block, kv = span.place(tl.program_id(0), k_len, HEADS // GROUP, BLOCK_N)
    first = block * BLOCK_N
    cols = first + tl.arange(0, BLOCK_N)
    real = hidden.real_keys(masks, kv, cols, k_len)
    k = tiles.load(tiles.matrix(K, kv), cols, real, D)
    v = tiles.load(tiles.matrix(V, kv), cols, real, DV)
    dk = tl.zeros([BLOCK_N, tiles.width(D)], tiles.wide(Q.base.dtype.element_ty))
    dv = tl.zeros([BLOCK_N, tiles.width(DV)], tiles.wide(Q.base.dtype.element_ty))

    band = span.band(q_len, k_len, left, right, TOP_LEFT)
    begin, full, rest, end = span.blocks(span.flip(band), first, BLOCK_N, BLOCK_M)
    if masks.pairs is None and masks.keys is None:
        dk, dv = _walk_rows(
            dk, dv, k, v, Q, GradOut, Rows, cols, band, masks, kv, begin, full, score,
            GROUP, D, DV, BLOCK_M, PRECISION, CHECK=True,
        )  # fmt: skip
        dk, dv = _walk_rows(
            dk, dv, k, v, Q, GradOut, Rows, cols, band, masks, kv, full, rest, score,
            GROUP, D, DV, BLOCK_M, PRECISION, CHECK=False,
        )  # fmt: skip
        dk, dv = _walk_rows(
            dk, dv, k, v, Q, GradOut, Rows, cols, band, masks, kv, rest, end, score,
            GROUP, D, DV, BLOCK_M, PRECISION, CHECK=True,
        )  # fmt: skip
    else:
        dk, dv = _walk_rows(
            dk, dv, k, v, Q, GradOut, Rows, cols, band, masks, kv, begin, end, score,
            GROUP, D, DV, BLOCK_M, PRECISION, CHECK=True,
        )  # fmt: skip
    tiles.store(tiles.matrix(GradK, kv), cols, k_len, scores.grad(score, dk), D)
    tiles.store(tiles.matrix(GradV, kv), cols, k_len, dv, DV)
