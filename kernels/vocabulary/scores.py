"""Scores from products q @ k.T, by scale, softcap, bias, ALiBi and sinks; and their derivative."""

from typing import NamedTuple

import triton
import triton.language as tl

from . import columns, copies, memory
from .softmax import LOG2E


class Score(NamedTuple):
    """Options of scores, made by `score`; an absent one is None.

    Products q @ k.T are multiplied by scale in `apply`, or else by softmax_scale inside the softmax. With a cap, they
    are multiplied by slope_at_zero = scale / cap inside the tanh. bias is a View of (B, H, Sq, Sk); slopes (ALiBi) and
    sinks have one number for each head. shift, or None for 0, is added to the position of each row. rough is 1 if the
    tanh may have an absolute error of 5e-7, because inputs have 16 bits; otherwise None.
    """

    scale: tl.tensor
    softmax_scale: tl.tensor
    cap: tl.tensor
    slope_at_zero: tl.tensor
    slopes: memory.View
    bias: memory.View
    sinks: memory.View
    shift: tl.tensor
    rough: int = None


class Tangents(NamedTuple):
    """Tangents of a call's inputs: Views with the shapes of the inputs; None stands for zero."""

    q: memory.View = None
    k: memory.View = None
    v: memory.View = None
    bias: memory.View = None
    alibi_slopes: memory.View = None
    sinks: memory.View = None


def score(scale, cap=None, bias=None, shift=0, alibi_slopes=None, sinks=None, narrow=False):
    """Return the Score for a call's options. narrow: inputs have 16 bits."""
    # If no option needs scaled scores, the softmax scales them, which costs no instruction. Its scale must be positive,
    # because the softmax takes the maximum first. The bounds keep products of a few scales, and sinks divided by the
    # scale, within the range of float32.
    if cap is not None and cap > 2.0**60:
        cap = None  # it changes no score below 2**20, and scale / cap may underflow in float32
    if cap is bias is alibi_slopes is None and 2.0 ** (-100 if sinks is None else -20) < scale < 2.0**100:
        return Score(None, scale, None, None, None, None, sinks, None)
    slope_at_zero = None if cap is None else max(-3e38, min(scale / cap, 3e38))
    shift = None if alibi_slopes is None else shift or None
    rough = 1 if narrow and cap is not None and cap <= 256 else None  # scores then have errors of at most 1.3e-4
    return Score(scale, None, cap, slope_at_zero, alibi_slopes, bias, sinks, shift, rough)


@triton.jit
def _rough_tanh(x):
    """Return tanh(x) with an absolute error of 5e-7, in 7 instructions an element instead of 30."""
    root = tl.math.rsqrt(tl.math.exp2(x * (2 * LOG2E)) + 1)
    return tl.fma(root, -2.0 * root, _number(1.0, x.dtype))


@triton.jit
def _tanh(x):
    """Return tanh(x) to 2 units in the last place. Coefficients of the float32 polynomial: Cephes, tanhf.c."""
    size = tl.abs(x)
    far = 1 - 2 / (tl.exp(2 * size) + 1)
    far = tl.where(x < 0, -far, far)
    if x.dtype == tl.float64:
        return far  # near 0 its absolute error in float64 is small enough for finite differences
    else:
        # Near 0 the first formula has an absolute error of one unit in the last place of 1: 3e-6 with a cap of 50.
        z = x * x
        near = tl.fma(tl.fma(tl.fma(z, -5.70498872745e-3, 2.06390887954e-2), z, -5.37397155531e-2), z, 1.33314422036e-1)
        near = tl.fma(tl.fma(near, z, -3.33332819422e-1) * z, x, x)
        return tl.where(size < 0.625, near, far)


@triton.jit
def _number(value, dtype: tl.constexpr):
    """Return a number in a dtype. A cast would round it to float32 first; Gluon has no `tl.full` without a layout."""
    return tl.full([], value, dtype) if dtype == tl.float64 else tl.cast(value, dtype)


@triton.jit
def _multiply_add(x, factor, added):
    """Return fma(x, factor, added), which rounds once, even if added is 0."""
    # The compiler would fuse a plain product with the later subtraction of the row max. But the row max is a rounded
    # product, so the largest score of a row would not cancel exactly.
    return tl.fma(x, _number(factor, x.dtype), added)


@triton.jit
def pairs(view, band, plane, r, c, CHECK: tl.constexpr):
    """Load elements (r, c) of a View of (B, H, Sq, Sk); None gives 0. r and c are [n, 1] and [1, m], or the reverse."""
    # Load a bias before the product: a load after it keeps wgmma from running asynchronously.
    if view is not None:
        return memory.load_pairs(memory.matrix(view, plane), r, c, band.rows, band.keys, CHECK)
    else:
        return 0.0


@triton.jit
def distance(score, band, r, c):
    """Return the ALiBi distance of key c from row r. r and c are [n, 1] and [1, m], or the reverse."""
    return tl.abs(r + band.diagonal - (c if score.shift is None else c - score.shift))


@triton.jit
def slope(score, plane, dtype: tl.constexpr):
    """Return the ALiBi slope of a head. score.slopes may also be the loaded slope itself."""
    if isinstance(score.slopes, tl.tensor):
        return score.slopes
    else:
        return memory.cast(memory.scalar(score.slopes, plane), dtype)


@triton.jit
def apply(score, x, bias, band, plane, r, c):
    """Return (scores, derivative of the softcap) from products x = q @ k.T of rows r and keys c."""
    dcap = 1.0
    if score.scale is not None:
        added = _number(0.0, x.dtype) if score.bias is None else memory.cast(bias, x.dtype)
        if score.slopes is not None:
            added -= slope(score, plane, x.dtype) * distance(score, band, r, c).to(x.dtype)
        # The float32 products are scaled, never q: rounding scale * q to 16 bits costs accuracy as scale grows.
        if score.cap is None:
            x = _multiply_add(x, score.scale, added)
        else:
            x = x * score.slope_at_zero
            capped = _tanh(x) if score.rough is None else _rough_tanh(x)
            dcap = 1 - capped * capped
            x = _multiply_add(capped, score.cap, added)
    return x, dcap


@triton.jit
def unseen(score, plane, dtype: tl.constexpr):
    """Return the lse of a row that sees no key: its sink, or -inf."""
    if score.sinks is None:
        return _number(float("-inf"), dtype)
    else:
        return memory.cast(memory.scalar(score.sinks, plane), dtype)


@triton.jit
def sink(score, plane, dtype: tl.constexpr):
    """Return a head's sink as a score: divided by softmax_scale if the softmax multiplies scores by softmax_scale."""
    x = unseen(score, plane, dtype)
    if score.softmax_scale is None:
        return x
    else:
        x /= score.softmax_scale
        return tl.where(x == float("inf"), 3.4e38, x)  # because inf - inf is NaN


@triton.jit
def apply_dcap(score, dcap, ds):
    """Multiply gradients of scores by the derivative of the softcap; `grad` applies the scale."""
    return ds if score.cap is None else ds * dcap


@triton.jit
def grad(score, total):
    """Multiply the gradient of q or k by the scale, once for all tiles. `apply_dcap` handles the softcap."""
    return total * (score.softmax_scale if score.scale is None else score.scale)


@triton.jit
def tangent_of_products(q, t_q, k, t_k, like, spec: tl.constexpr):
    """Return t_q @ k.T + q @ t_k.T, the tangent of q @ k.T. None stands for 0."""
    dtype: tl.constexpr = like.dtype
    t_x = tl.zeros(like.shape, dtype)
    if t_q is not None:
        t_x = columns.dot(t_q, k, spec.D, spec, dtype, t_x)
    if t_k is not None:
        copies.fence_later(spec.BY_THREADS)
        t_x = columns.dot(q, t_k, spec.D, spec, dtype, t_x)
    return t_x


@triton.jit
def tangent(score, t_x, dcap, t_bias, tangents, band, plane, r, c):
    """Return the tangents of scores from those of products (t_x), biases (t_bias) and slopes (`tangents`)."""
    t_s = apply_dcap(score, dcap, grad(score, t_x)) + memory.cast(t_bias, t_x.dtype)
    if tangents.alibi_slopes is not None:
        t_slope = memory.cast(memory.scalar(tangents.alibi_slopes, plane), t_x.dtype)
        t_s -= t_slope * distance(score, band, r, c).to(t_x.dtype)
    return t_s
