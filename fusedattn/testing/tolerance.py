"""The one tolerance rule: a result must be as good as eager PyTorch in its dtype, measured against float64.

The largest error may be 2x, and the mean error 1.5x, the error of the same formula in eager PyTorch, plus a rounding
floor. Infinities and zeros must be where the float64 result has them. No number here is tuned per case.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

Results = Mapping[str, Tensor]


class Verdict(NamedTuple):
    """Errors of a result, the allowed errors, and `why`: what is wrong, or ""."""

    ok: bool
    max_error: float
    max_allowed: float
    mean_error: float
    mean_allowed: float
    max_eager: float
    why: str


def verdict(
    got: Tensor, eager: Tensor, oracle: Tensor,
    zero: Tensor | None = None, terms: float = 1.0, dtype: torch.dtype | None = None,
) -> Verdict:  # fmt: skip
    """Compare a result with eager PyTorch and float64, by the tolerance rule.

    Args:
        got: any floating dtype.
        eager, oracle: the result of eager PyTorch in the dtype of the inputs, and in float64. All three have one shape
            and one device.
        zero: bool, shape of `got` without its last dimension: rows that must be exactly 0, because nothing is visible.
            Default: rows that are 0 in the oracle. Pass it for gradients: a row that sees one key has gradient 0
            by cancellation, which need not be exactly 0.
        terms: if the result is a sum, the root of the sum of squares of its terms. Needed for the gradient of a slope,
            one sum over all pairs of a head, which eager PyTorch may get right by chance.
        dtype: dtype of the call, if narrower: in a float32 call the gradient of a float64 bias has float32 errors.
    """
    if got.shape != oracle.shape:
        nan, why = math.nan, f"its shape is {tuple(got.shape)}, not {tuple(oracle.shape)}"
        return Verdict(False, nan, nan, nan, nan, nan, why)
    got, eager, oracle = got.detach(), eager.detach(), oracle.detach().double()
    infinite = oracle.to(got.dtype).isinf()  # also values that the dtype cannot hold
    error = (got.double() - oracle).abs().masked_fill(infinite, 0.0)
    # Elements that overflow in eager PyTorch do not raise the allowed error.
    eager_error = (eager.double() - oracle).abs().masked_fill(infinite | ~eager.isfinite(), 0.0)
    dtype = got.dtype if dtype is None or torch.finfo(dtype).eps < torch.finfo(got.dtype).eps else dtype
    (max_error, mean_error), (max_eager, mean_eager) = _max_and_mean(error), _max_and_mean(eager_error)
    max_size, mean_size = _max_and_mean(oracle.abs().masked_fill(infinite, 0.0))
    max_allowed = 2.0 * max_eager + _floor(dtype, max_size, 1.0, terms)
    mean_allowed = 1.5 * mean_eager + _floor(dtype, mean_size, 0.25, terms)
    why = _wrong_kind(got, oracle.to(got.dtype), infinite, zero)
    if not why and not max_error <= max_allowed:
        why = f"its largest error is {max_error:.3g}, more than {max_allowed:.3g}"
    if not why and not mean_error <= mean_allowed:
        why = f"its mean error is {mean_error:.3g}, more than {mean_allowed:.3g}"
    return Verdict(not why, max_error, max_allowed, mean_error, mean_allowed, max_eager, why)


def verdicts(
    got: Results, eager: Results, oracle: Results, terms: Mapping[str, float] | None = None
) -> dict[str, Verdict]:
    """Return {name: `verdict`} for each result and gradient in `oracle`.

    got, eager, oracle: {name: tensor} of results (out, lse, weights) and gradients (query, key, value and others). Any
    may be absent. With gradients, the incoming gradient must have no row of zeros. terms: {name: terms of `verdict`}.
    """
    # A row sees no key if its lse is -inf. No row sees a key if the gradients of the key and its value are 0.
    unseen = {}
    if "lse" in oracle:
        unseen["query"] = oracle["lse"] == -math.inf
    if "key" in oracle and "value" in oracle:
        unseen["key"] = unseen["value"] = (oracle["key"] == 0).all(-1) & (oracle["value"] == 0).all(-1)
    sums = {name: x for name, x in oracle.items() if name not in ("out", "weights")}
    zero = {name: x.new_zeros(x.shape[:-1], dtype=torch.bool) for name, x in sums.items()} | unseen
    terms = terms or {}
    dtype = torch.promote_types(got["out"].dtype, torch.float32) if "out" in got else None  # kernels sum in this dtype
    return {
        name: verdict(got[name], eager[name], oracle[name], zero.get(name), terms.get(name, 1.0), dtype)
        for name in oracle
    }


def _floor(dtype, size, share, terms):
    """Return the error allowed for a result of magnitude `size` even if eager PyTorch happens to have none."""
    # The mean error may be a `share` of this, the sum of three roundings: of the result; of terms that cancel, in the
    # dtype of sums (the gradient of a row that sees one key is the difference of two equal sums); and of the oracle
    # (exp, log and a sum of some dozen terms: 64 roundings), which matters for float64.
    rounded, summed = torch.finfo(dtype).eps, torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    return share * (rounded * size + 8 * summed * max(1.0, terms) + 64 * torch.finfo(torch.float64).eps * (size + 1.0))


def _wrong_kind(got, expected, infinite, zero):
    if got.isnan().any():
        return f"{int(got.isnan().sum())} of {got.numel()} elements are NaN"
    if not torch.equal(got.isinf(), infinite) or not torch.equal(got[infinite], expected[infinite]):
        return "it is not infinite where the oracle is"
    if got.dim() and (got[(expected == 0).all(-1) if zero is None else zero] != 0).any():
        return "it is not 0 where nothing is visible"
    return ""


def _max_and_mean(tensor):
    return (tensor.max().item(), tensor.mean().item()) if tensor.numel() else (0.0, 0.0)
