"""The one tolerance rule: an answer is right if it is as good as eager PyTorch in its dtype, measured against float64.

The largest error may be 2x, the mean error 1.5x that of the same formula in eager PyTorch, plus a rounding floor. The
result has the oracle's infinities and zeros, and no NaN. No number here is tuned per case.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor


class Verdict(NamedTuple):
    """Errors of a result, the errors allowed, and in `why` what is wrong."""

    ok: bool
    max_error: float
    max_allowed: float
    mean_error: float
    mean_allowed: float
    max_eager: float
    why: str


def verdict(
    got: Tensor,
    eager: Tensor,
    oracle: Tensor,
    zero: Tensor | None = None,
    terms: float = 1.0,
    dtype: torch.dtype | None = None,
) -> Verdict:
    """Hold a result to the rule.

    Args:
        got: any floating dtype.
        eager, oracle: the same formula on the same values, in eager PyTorch in the dtype of the inputs, and in
            float64. All three have one shape and one device.
        zero: bool, shape of `got` less its last dimension: rows that must be exactly 0, because nothing is visible. By
            default the rows that are 0 in the oracle. The gradients of query and key need it: a row that sees one key
            has a gradient that is 0 by cancellation, and may be off by rounding.
        terms: root of the sum of squares of the terms that the result sums up. The gradient of a slope is one sum over
            all pairs of a head, which eager PyTorch gets right by chance alone.
        dtype: that of the call, if narrower: in a float32 call the gradient of a float64 bias has float32 errors.
    """
    if got.shape != oracle.shape:
        nothing = float("nan")
        why = f"its shape is {tuple(got.shape)}, not {tuple(oracle.shape)}"
        return Verdict(False, nothing, nothing, nothing, nothing, nothing, why)
    got, eager, oracle = got.detach(), eager.detach(), oracle.detach().double()
    infinite = oracle.to(got.dtype).isinf()  # also values that the dtype cannot hold
    error = (got.double() - oracle).abs().masked_fill(infinite, 0.0)
    # Elements that overflow in eager PyTorch do not raise the allowed error.
    eager_error = (eager.double() - oracle).abs().masked_fill(infinite | ~eager.isfinite(), 0.0)
    size = oracle.abs().masked_fill(infinite, 0.0)
    dtype = got.dtype if dtype is None or torch.finfo(dtype).eps < torch.finfo(got.dtype).eps else dtype
    max_allowed = 2.0 * _max(eager_error) + _floor(dtype, _max(size), 1.0, terms)
    mean_allowed = 1.5 * _mean(eager_error) + _floor(dtype, _mean(size), 0.25, terms)
    max_error, mean_error = _max(error), _mean(error)
    why = _wrong_kind(got, oracle.to(got.dtype), infinite, zero)
    if not why and not max_error <= max_allowed:
        why = f"its largest error is {max_error:.3g}, more than {max_allowed:.3g}"
    if not why and not mean_error <= mean_allowed:
        why = f"its mean error is {mean_error:.3g}, more than {mean_allowed:.3g}"
    return Verdict(not why, max_error, max_allowed, mean_error, mean_allowed, _max(eager_error), why)


def verdicts(
    got: Mapping[str, Tensor],
    eager: Mapping[str, Tensor],
    oracle: Mapping[str, Tensor],
    terms: Mapping[str, float] | None = None,
) -> dict[str, Verdict]:
    """Return a `verdict` for each result of a call in `oracle`.

    Args:
        got, eager, oracle: {"out", "lse", "weights", "query", "key", "value": tensor}, the last three gradients. Any
            may be absent, and others present. If there are gradients, that of `out` had no row of zeros.
        terms: those of `verdict`, if not of order one.
    """
    # A row sees nothing if its lse is -inf; nothing sees a key if it and its value have zero gradients.
    unseen = {}
    if "lse" in oracle:
        unseen["query"] = oracle["lse"] == float("-inf")
    if "key" in oracle and "value" in oracle:
        unseen["key"] = unseen["value"] = (oracle["key"] == 0).all(-1) & (oracle["value"] == 0).all(-1)
    sums = [name for name in oracle if name not in ("out", "weights")]
    zero = {name: oracle[name].new_zeros(oracle[name].shape[:-1], dtype=torch.bool) for name in sums} | unseen
    terms = terms or {}
    dtype = torch.promote_types(got["out"].dtype, torch.float32) if "out" in got else None  # of sums in kernels
    return {
        name: verdict(got[name], eager[name], oracle[name], zero.get(name), terms.get(name, 1.0), dtype)
        for name in oracle
    }


def _floor(dtype, size, share, terms):
    """Return the error allowed to a result of this size even if eager PyTorch happens to have none.

    Its largest error may be all of it, its mean error a `share`. It adds up the rounding of the result; of terms that
    cancel, in the dtype of sums (the gradient of a row that sees one key is the difference of two equal sums); and of
    the oracle itself (exp, log and a sum of some dozen terms: 64 roundings), which counts when float64 is tested.
    """
    rounded, summed = torch.finfo(dtype).eps, torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    return share * (rounded * size + 8 * summed * max(1.0, terms) + 64 * torch.finfo(torch.float64).eps * (size + 1.0))


def _wrong_kind(got, expected, infinite, zero):
    """Return what is wrong with the NaN, infinities and zeros of a result; empty if nothing is."""
    if got.isnan().any():
        return f"{int(got.isnan().sum())} of {got.numel()} elements are NaN"
    if not torch.equal(got.isinf(), infinite) or not torch.equal(got[infinite], expected[infinite]):
        return "it is not infinite where the oracle is"
    if got.dim() and (got[(expected == 0).all(-1) if zero is None else zero] != 0).any():
        return "it is not 0 where nothing is visible"
    return ""


def _max(tensor):
    return tensor.max().item() if tensor.numel() else 0.0


def _mean(tensor):
    return tensor.mean().item() if tensor.numel() else 0.0
