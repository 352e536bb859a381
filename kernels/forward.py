"""Forward attention: one program per block of rows of one head of one batch.

Source: FlashAttention-2, arXiv:2307.08691, algorithm 1.
"""

import triton
import triton.language as tl

from . import masks as hidden
from . import scores, softmax, span, tiles


@triton.jit
def _walk(
    out,
    state,
    q,
    k,
    v,
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
    """Fold key blocks [begin, end) into the running softmax."""
    for j in tl.range(begin, end):
        cols = j * BLOCK_N + tl.arange(0, BLOCK_N)
        exists = hidden.real_keys(masks, plane, cols, band.keys) if CHECK else None
        k_tile = tiles.load(k, cols, exists, D)
        s = scores.apply(score, tl.dot(q, k_tile.T, input_precision=PRECISION, out_dtype=out.dtype))
        if CHECK:
            s = tl.where(hidden.visible(masks, band, plane, rows[:, None], cols[None, :]), s, float("-inf"))
        p, decay, state = softmax.step(state, s, score.unit)
        v_tile = tiles.load(v, cols, exists, DV)
        p = p.to(v_tile.dtype)
        out = tl.dot(p, v_tile, out * decay[:, None], input_precision=PRECISION, out_dtype=out.dtype)
    return out, state


@triton.jit(do_not_specialize=["q_len", "k_len", "left", "right"])
def forward(
    Q,
    K,
    V,
    Out,
    Lse,
    Stats,
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
    """Out (B, Hq, Sq, DV), Lse (B, Hq, Sq) and, unless None, Stats (B, Hq, Sq, 2: top, rest of the softmax).

    Q, K, V and Out are Views; Lse and Stats are contiguous.
    """
    block, plane = span.place(tl.program_id(0), q_len, HEADS, BLOCK_M)
    first = span.latest_first(block, q_len, BLOCK_M)
    rows = first + tl.arange(0, BLOCK_M)
    real = hidden.real_rows(masks, plane, rows, q_len)
    q = tiles.load(tiles.matrix(Q, plane), rows, real, D)
    kv = span.shared(plane, GROUP)
    k, v = tiles.matrix(K, kv), tiles.matrix(V, kv)

    band = span.band(q_len, k_len, left, right, TOP_LEFT)
    begin, full, rest, end = span.blocks(band, first, BLOCK_M, BLOCK_N)
    out = tl.zeros([BLOCK_M, tiles.width(DV)], tiles.wide(Q.base.dtype.element_ty))
    state = softmax.start(BLOCK_M, out.dtype)
    if masks.pairs is None and masks.keys is None:
        out, state = _walk(
            out, state, q, k, v, rows, band, masks, plane, begin, full, score, D, DV, BLOCK_N, PRECISION, CHECK=True
        )
        out, state = _walk(
            out, state, q, k, v, rows, band, masks, plane, full, rest, score, D, DV, BLOCK_N, PRECISION, CHECK=False
        )
        out, state = _walk(
            out, state, q, k, v, rows, band, masks, plane, rest, end, score, D, DV, BLOCK_N, PRECISION, CHECK=True
        )
    else:
        out, state = _walk(
            out, state, q, k, v, rows, band, masks, plane, begin, end, score, D, DV, BLOCK_N, PRECISION, CHECK=True
        )

    if masks.rows is not None:
        state = softmax.State(state.largest, state.top, tl.where(real, state.total, 0.0))
    out, lse, remainder = softmax.finish(out, state, score.unit)
    tiles.store(tiles.matrix(Out, plane), rows, q_len, out, DV)
    tiles.store_column(tiles.table(Lse, plane, q_len, 1), rows, q_len, 0, lse)
    if Stats is not None:
        stats = tiles.table(Stats, plane, q_len, 2)
        tiles.store_column(stats, rows, q_len, 0, state.top)
        tiles.store_column(stats, rows, q_len, 1, remainder)
