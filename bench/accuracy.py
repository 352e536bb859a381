"""Whether what was timed is right: one head of the result against float64, beside the error of eager PyTorch there.

One kv head and the query heads that read it, of one batch, is cheap at any length: the last, where a wrong stride shows
most. The rule is the one of the tests.
"""

from typing import NamedTuple

import torch

import fusedattn as fa
from fusedattn.testing.compare import in_float64, with_gradients
from fusedattn.testing.tolerance import verdicts

GRADIENTS = ("query", "key", "value", "bias")


class Truth(NamedTuple):
    """The slice of a case as it should be, and as eager PyTorch computes it: {"out", "weights", a gradient: tensor}."""

    oracle: dict
    eager: dict


def _slice(case, tensor):
    """Of a tensor (B or 1, heads, ...) or its gradient: what belongs to the head that is looked at."""
    group, words = case.Hq // case.Hkv, case.words
    count = group if tensor.shape[1] == case.Hq else 1
    if "dropout" in words:  # its bits depend on where a head stands, and in a slice the first stands where it did
        if "bias" in words and case.B > 1:
            raise NotImplementedError("the gradient of a bias is a sum over batches, whose bits a slice does not have")
        return tensor[:1, :count]
    return tensor[:, -count:] if "bias" in words else tensor[-1:, -count:]  # its gradient is a sum over batches


def truth(case, tensors):
    """The Truth of a case: float64 through the blocks of the naive path, so that a long one fits."""
    inputs, grad_out = [_slice(case, tensor) for tensor in tensors.inputs], _slice(case, tensors.grad_out)
    masks = {  # (B, S) or (B, H, Sq, Sk)
        name: _slice(case, mask[:, None])[:, 0] if mask.dim() == 2 else _slice(case, mask)
        for name, mask in tensors.masks.items()
    }
    options, given = case.arguments(masks), dict(zip(GRADIENTS, inputs, strict=False)) | {"out": grad_out}

    def compute(function, tensors):
        added = {name: tensors[name] for name in GRADIENTS[3:] if name in tensors}
        found = with_gradients(function, tensors, options | added, grads="out")
        if "weights" in case.words:
            with torch.no_grad():
                found["weights"] = function(
                    *(tensors[name] for name in GRADIENTS[:3]), **options, **added, return_weights=True
                )[1]
        return found

    return Truth(oracle=compute(fa.reference.attention, in_float64(given)), eager=compute(fa.reference.eager, given))


def judge(case, mode, result, truth):
    """(error, eager PyTorch's error, what is wrong or "") of what a step returned; of gradients, of the worst one."""
    if mode == "forward":
        results = result if isinstance(result, tuple) else (result,)
        got = {name: _slice(case, each) for name, each in zip(("out", "weights"), results, strict=False)}
    else:
        got = {name: _slice(case, grad) for name, grad in zip(GRADIENTS, result, strict=False)}
    return worst(verdicts(got, truth.eager, {name: truth.oracle[name] for name in got}))


def worst(found):
    """(error, eager PyTorch's error, what is wrong or "") of {name: Verdict}: those of the one that is furthest off."""
    last = max(found.values(), key=lambda one: (not one.ok, one.max_error / one.max_allowed))
    why = "; ".join(f"{name}: {one.why}" for name, one in found.items() if not one.ok)
    return last.max_error, last.max_eager, why
