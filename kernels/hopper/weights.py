"""Weights of a block of keys in the Hopper forward: its scores with all options, and a step of the running softmax."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..vocabulary import dropout as dropping, masks as masking, scores, softmax, span
from ..vocabulary.rules import Rules
from . import notes as noting, ring

COLUMNS = gl.constexpr(8)  # partial sums of a row, in registers: each of four neighbouring threads has two


class Rows(NamedTuple):
    """Rows of a warpgroup, with the options, band and head of their scores.

    counters: Philox counters of dropout, one for each two rows, or ().
    """

    rules: Rules
    band: span.Band
    plane: span.Plane
    rows: gl.tensor
    counters: gl.tensor


@gluon.jit
def _largest(s, LAYOUT: gl.constexpr):
    """Return the row max, by halving the columns: `gl.max` alone gives one long chain of instructions a thread."""
    for _ in gl.static_range(4):
        if s.shape[1] > COLUMNS:
            s = gl.max(s.reshape([s.shape[0], 2, s.shape[1] // 2]), 1)
    return gl.convert_layout(gl.max(s, 1), LAYOUT)


@gluon.jit
def _step(state, s, scale):
    """Return `softmax.step` of scores s. A 2-d row_sum keeps COLUMNS partial sums a row, not added across threads."""
    ROWS: gl.constexpr = s.shape[0]
    ROW: gl.constexpr = state.row_max.type.layout
    largest = _largest(s, ROW)
    if len(state.row_sum.shape) == 1:
        return softmax.step(state, s, largest, scale)
    else:
        LAYOUT: gl.constexpr = state.row_sum.type.layout
        row_max = gl.maximum(state.row_max, largest)
        p, decay = softmax.relative(s, row_max, state.row_max, scale)
        sums = gl.convert_layout(gl.sum(p.reshape([ROWS, p.shape[1] // COLUMNS, COLUMNS]), 1), LAYOUT)
        row_sum = state.row_sum * gl.convert_layout(decay, gl.SliceLayout(1, LAYOUT))[:, None] + sums
        return p, decay, softmax.State(row_max, row_sum)


@gluon.jit
def _drop(dropout, p, of, block):
    """Set dropped weights of a block of keys to 0."""
    if len(dropout.origin) > 0 and len(dropout.origin.unaligned) > 0:
        cols = block * p.shape[1] + gl.arange(0, p.shape[1], layout=gl.SliceLayout(0, p.type.layout))
        words = dropping.word(dropout, of.plane, of.rows[:, None], cols[None, :])
    else:
        LAYOUT: gl.constexpr = of.counters.type.layout.parent
        HALF: gl.constexpr = p.shape[1] // 2
        keys = block * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(0, LAYOUT))
        words = dropping.four(dropout, of.plane, of.counters[:, None], keys[None, :])
        words = gl.convert_layout(words, p.type.layout)
    return dropping.keep_by(dropout, p, words)


@gluon.jit
def _bias(shared, at, of, LAYOUT: gl.constexpr):
    """Return the bias: [rows, keys], [1, keys] if equal for all rows, or [rows, 1] if equal for all keys; 0 without."""
    if shared.bias is None:
        r = of.rows[:, None]
        return scores.pairs(of.rules.score.bias, of.band, of.plane, r, r * 0, CHECK=True)
    else:
        ring.wait(shared.bias, at)
        tile = ring.tile(shared.bias, at)
        if tile.shape[0] == 1:
            KEYS: gl.constexpr = shared.k.tiles.shape[-2]
            return tile.reshape([tile.shape[1]]).slice(0, KEYS).load(gl.SliceLayout(0, LAYOUT))[None, :]
        else:
            return tile.load(LAYOUT)


@gluon.jit
def _shown(g: gl.constexpr, shared, step, LAYOUT: gl.constexpr):
    """Load the mask words of a warpgroup's rows at a step, for `masks.visible`; return 1 without a mask of pairs."""
    if shared.words is None:
        return 1
    else:
        words = ()
        ACROSS: gl.constexpr = shared.k.tiles.shape[-2] // masking.BLOCK
        for n in gl.static_range(ACROSS):
            halves = noting.words_of(shared.notes, shared.words, step, g * ACROSS + n)
            words += (noting.load_words(halves, LAYOUT),)
        return words


@gluon.jit
def weights(g: gl.constexpr, s, state, masked, of, block, shared, step, GROUPS: gl.constexpr):
    """Return (p, factor that rescales earlier sums, new State) of a block of keys, from products s = q @ k.T."""
    score, masks, r, notes = of.rules.score, of.rules.masks, of.rows[:, None], shared.notes
    LAYOUT: gl.constexpr = s.type.layout
    if score.scale is not None:
        cols = block * s.shape[1] + gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, LAYOUT))
        bias = _bias(shared, step * GROUPS + g, of, LAYOUT)
        s, _ = scores.apply(score, s, bias, of.band, of.plane, r, cols[None, :])
    if masked:  # a branch, because two loops (masked or not) would repack p between them
        cols = block * s.shape[1] + gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, LAYOUT))
        real = None
        if masks.keys is not None:
            real = ring.slot(notes.real, step).load(gl.SliceLayout(0, LAYOUT))[None, :] != 0
        shown = _shown(g, shared, step, LAYOUT)
        s = gl.where(masking.visible(masks, shown, of.band, of.plane, r, cols[None, :], real), s, float("-inf"))
    if shared.bias is not None:  # after a branch, or ptxas would release before the loads of the bias arrive
        ring.release(shared.bias, step * GROUPS + g)
    p, decay, state = _step(state, s, score.softmax_scale)
    if of.rules.dropout is not None:
        p = _drop(of.rules.dropout, p, of, block)
    return p, decay, state
