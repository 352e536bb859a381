"""The body of the forward's loop, which adds a tile of keys and values to the running softmax of a block of rows."""

import triton
import triton.language as tl

from . import columns, copies, dropout as dropping, masks as masking, memory, scores, softmax


@triton.jit
def attend(
    out, state, q, k, v, first, k_rows, exists, r, c, band, rules, plane, kv, spec: tl.constexpr, CHECK: tl.constexpr,
):  # fmt: skip
    """Return (out, softmax State) after one more tile of keys and values, the rows k_rows of the matrices k and v."""
    # out is a tuple of tiles (`columns`). If v is None, the values are the first columns of the keys. exists is True
    # for the k_rows that exist, or None if all do. first is the first of k_rows, for masks in bits. r [rows, 1]
    # and c [1, keys] count from the start of the sequence. plane is the queries' batch and head. In `decode` it has a
    # head for each row, so key masks use kv. Without CHECK every row sees every key, and no mask is read.
    k_tile = columns.load(k, k_rows, exists, spec.D)  # [keys, D]
    shown = masking.shown(rules.masks, band, plane, r, c, first, CHECK)
    bias = scores.pairs(rules.score.bias, band, plane, r, c, CHECK)
    copies.fence()
    x = columns.dot(q, k_tile, spec.D, spec, out[0].dtype)  # [rows, keys]
    s, dcap = scores.apply(rules.score, x, bias, band, plane, r, c)
    if CHECK:
        s = tl.where(masking.visible(rules.masks, shown, band, kv, r, c), s, float("-inf"))
    p, decay, state = softmax.step(state, s, tl.max(s, 1), rules.score.softmax_scale)
    v_tile = k_tile if v is None else columns.load(v, k_rows, exists, spec.DV)  # [keys, DV]
    copies.fence_later(spec.BY_THREADS)
    p = memory.opaque(dropping.keep(rules.dropout, p, plane, r, c))
    if spec.PRECISION == "tf32":  # round to nearest: truncated weights would make every output too small
        p = columns.truncated(p, 4096)
    return columns.add(out, p, v_tile, spec.DV, spec, decay[:, None]), state
