"""Turns products q @ k.T into scores: scale, softcap, bias, ALiBi, sinks; and their derivative."""

from typing import NamedTuple

import triton
import triton.language as tl

from . import memory, span


class Score(NamedTuple):
    """What turns products into scores; None is absent. `score` makes one.

    Products are multiplied by scale here, or by softmax_scale inside the softmax; with a cap, by slope_at_zero inside
    the tanh. Views of (B, H, Sq, Sk): bias; slopes and sinks have one number a head. shift is what a row's own position
    lies further right than the band has it, or None.
    """

    scale: tl.tensor
    softmax_scale: tl.tensor
    cap: tl.tensor
    slope_at_zero: tl.tensor
    slopes: memory.View
    bias: memory.View
    sinks: memory.View
    shift: tl.tensor


def score(scale, cap=None, slopes=None, bias=None, sinks=None, shift=0):
    """The Score of a call: the scale waits for the softmax where nothing else needs scaled scores.

    There it costs no instruction. It must be positive, for the softmax looks for the largest score before it scales,
    and leave room in float32 for a factor of a few, both ways.
    """
    if cap is not None and cap > 2.0**60:
        cap = None  # below 2**20 no score feels it, and scale / cap may be too small for float32
    if cap is None and slopes is None and bias is None and sinks is None and 2.0**-100 < scale < 2.0**100:
        return Score(None, scale, None, None, None, None, None, None)
    slope_at_zero = None if cap is None else max(-3e38, min(scale / cap, 3e38))
    return Score(scale, None, cap, slope_at_zero, slopes, bias, sinks, None if slopes is None else shift or None)


@triton.jit
def _tanh(x):
    """tanh to 2 units in the last place. Coefficients of the float32 polynomial: Cephes, tanhf.c."""
    size = tl.abs(x)
    far = 1 - 2 / (tl.exp(2 * size) + 1)
    far = tl.where(x < 0, -far, far)
    if x.dtype == tl.float64:
        return far  # in float64, for finite differences, its absolute error near 0 is small enough
    else:
        # Near 0 the other form knows x only to the last place of 1: times a cap of 50 an error of 3e-6.
        z = x * x
        near = tl.fma(tl.fma(tl.fma(z, -5.70498872745e-3, 2.06390887954e-2), z, -5.37397155531e-2), z, 1.33314422036e-1)
        near = tl.fma(tl.fma(near, z, -3.33332819422e-1) * z, x, x)
        return tl.where(size < 0.625, near, far)


@triton.jit
def _multiply_add(x, factor, added):
    """x * factor + added, rounded once, even where nothing is added.

    The compiler would fuse a bare product with the softmax's subtraction of the largest, which is rounded, and the two
    would not cancel.
    """
    return tl.fma(x, tl.full([], factor, x.dtype), added)


@triton.jit
def bias(score, band, plane, r, c, CHECK: tl.constexpr):
    """The bias of pairs (r, c), already broadcast, either way round, as `apply` wants it; 0 if there is none.

    To be loaded before the product that it is added to: a load in between keeps wgmma from running asynchronously.
    """
    return pairs(score.bias, band, plane, r, c, CHECK)


@triton.jit
def pairs(view, band, plane, r, c, CHECK: tl.constexpr):
    """Elements (r, c) of a View of (B, H, Sq, Sk), as `bias` has them; 0 of None."""
    if view is not None:
        return memory.load_pairs(memory.matrix(view, plane), r, c, band.rows, band.keys, CHECK)
    else:
        return 0.0


@triton.jit
def distance(score, band, r, c):
    """How far key c stands from where row r is level; r and c come already broadcast, either way round."""
    return span.distance(band, r, c if score.shift is None else c - score.shift)


@triton.jit
def apply(score, x, bias, band, plane, r, c):
    """(scores, dcap of the cap there) of the products x of pairs (r, c)."""
    dcap = 1.0
    if score.scale is not None:
        added = tl.zeros([], x.dtype) if score.bias is None else memory.cast(bias, x.dtype)
        if score.slopes is not None:
            added -= memory.cast(memory.scalar(score.slopes, plane), x.dtype) * distance(score, band, r, c).to(x.dtype)
        # The float32 products are scaled, never q: rounding scale * q to 16 bits costs accuracy as scale grows.
        if score.cap is None:
            x = _multiply_add(x, score.scale, added)
        else:
            capped = _tanh(x * score.slope_at_zero)
            dcap = 1 - capped * capped
            x = _multiply_add(capped, score.cap, added)
    return x, dcap


@triton.jit
def sink(score, plane, dtype: tl.constexpr):
    """The score of a head's sink."""
    return memory.cast(memory.scalar(score.sinks, plane), dtype)


@triton.jit
def apply_dcap(score, dcap, ds):
    """What the cap leaves of the gradient of the scores; `grad` does the rest."""
    return ds if score.cap is None else ds * dcap


@triton.jit
def grad(score, total):
    """Gradient of q or k, from the sum over tiles of (what `apply_dcap` gave) @ (k or q)."""
    return total * (score.softmax_scale if score.scale is None else score.scale)


@triton.jit
def tangent(score, t_x, dcap, t_bias, t_slopes, band, plane, r, c):
    """Tangents of the scores of pairs (r, c), from those of products and biases, and a View of those of slopes."""
    t_s = apply_dcap(score, dcap, grad(score, t_x)) + memory.cast(t_bias, t_x.dtype)
    if t_slopes is not None:
        t_s -= memory.cast(memory.scalar(t_slopes, plane), t_x.dtype) * distance(score, band, r, c).to(t_x.dtype)
    return t_s
