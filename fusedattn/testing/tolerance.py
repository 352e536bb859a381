"""The one tolerance rule: an answer is right if it is as good as eager PyTorch in its dtype, measured against float64.

A result may be 2x (its mean error 1.5x) as far from the float64 oracle as the same formula in eager PyTorch, plus a
rounding floor; it has the oracle's infinities and zeros, and no NaN. Nothing here has a number to tune per case.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor


class Verdict(NamedTuple):
    """Verdict on a result: its errors, those allowed, and in `why` what is wrong."""

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
        got: any floating dtype. eager: the same formula in eager PyTorch, in the dtype of the inputs. oracle: the same
            in float64, on the same values. One shape, one device.
        zero: bool, shape of `got` less its last dimension: rows that must be exactly 0, since nothing in them is seen.
            By default those that are 0 throughout in the oracle. The gradients of query and key need to be told:
            a row that sees one key has a gradient that is 0 by cancellation alone, and that may be off by rounding.
        terms: how large the terms are that the result is a sum of, together: the root of the sum of their squares. The
            gradient of a slope is one number from all pairs of a head. That eager PyTorch has it right is chance.
        dtype: that of the call, where it is narrower than the result: a bias of float64 has a gradient of float64, but
            a call in float32 does not know it better than that.
    """
    if got.shape != oracle.shape:
        nothing = float("nan")
        why = f"its shape is {tuple(got.shape)}, not {tuple(oracle.shape)}"
        return Verdict(False, nothing, nothing, nothing, nothing, nothing, why)
    got, eager, oracle = got.detach(), eager.detach(), oracle.detach().double()
    infinite = oracle.to(got.dtype).isinf()  # what the dtype cannot hold is as infinite as what is
    error = (got.double() - oracle).abs().masked_fill(infinite, 0.0)
    # Where eager PyTorch overflows it allows nothing: its error counts where it has an answer.
    eager_error = (eager.double() - oracle).abs().masked_fill(infinite | ~eager.isfinite(), 0.0)
    size = oracle.abs().masked_fill(infinite, 0.0)
    own = got.dtype if dtype is None or torch.finfo(dtype).eps < torch.finfo(got.dtype).eps else dtype
    max_allowed = 2.0 * _max(eager_error) + _floor(own, _max(size), 1.0, terms)
    mean_allowed = 1.5 * _mean(eager_error) + _floor(own, _mean(size), 0.25, terms)
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
    """`verdict` of each result of one call that `got` and `oracle` hold, knowing which rows and keys are empty.

    Args: {"out", "lse", "weights", "query", "key", "value": tensor}, the last three gradients; any may be absent, or
        more be there. The gradient of `out`, if there are gradients, has no row of zeros. terms: those of `verdict`,
        where they are not of order one.
    """
    # Seen in the oracle: a row whose lse is -inf, a key that has no gradient and whose value has none.
    unseen = {}
    if "lse" in oracle:
        unseen["query"] = oracle["lse"] == float("-inf")
    if "key" in oracle and "value" in oracle:
        unseen["key"] = unseen["value"] = (oracle["key"] == 0).all(-1) & (oracle["value"] == 0).all(-1)
    sums = [name for name in oracle if name not in ("out", "weights")]
    zero = {name: oracle[name].new_zeros(oracle[name].shape[:-1], dtype=torch.bool) for name in sums} | unseen
    terms = terms or {}
    dtype = torch.promote_types(got["out"].dtype, torch.float32) if "out" in got else None  # what kernels sum in
    return {
        name: verdict(got[name], eager[name], oracle[name], zero.get(name), terms.get(name, 1.0), dtype)
        for name in oracle
    }


def _floor(dtype, size, share, terms):
    """The error that a result of a size may have even where eager PyTorch happens to have none.

    All of it at most, `share` of it on average: its own rounding; that of terms that cancel, in the type that kernels
    sum in (a row that sees one key has a gradient of 0, the difference of two equal sums of order one); that of the
    oracle itself, all there is where float64 is what is tested (exp, log, a sum of some dozen terms: 64 roundings).
    """
    own, summed = torch.finfo(dtype).eps, torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    return share * (own * size + 8 * summed * max(1.0, terms) + 64 * torch.finfo(torch.float64).eps * (size + 1.0))


def _wrong_kind(got, expected, infinite, zero):
    """Return what is wrong with NaN, infinities or zeros of a result."""
    if got.isnan().any():
        return f"{int(got.isnan().sum())} of {got.numel()} elements are NaN"
    if not torch.equal(got.isinf(), infinite) or not torch.equal(got[infinite], expected[infinite]):
        return "it is not infinite where the oracle is"
    if got.dim() == 0:
        return ""
    zero = (expected == 0).all(-1) if zero is None else zero
    if (got[zero] != 0).any():
        return "it is not 0 where nothing is seen"
    return ""


def _max(tensor):
    return tensor.max().item() if tensor.numel() else 0.0


def _mean(tensor):
    return tensor.mean().item() if tensor.numel() else 0.0
