"""Whether a timed result is right: one head of it against float64, by the tolerance of the tests.

One kv head and its query heads, of one batch, is cheap at any length: the last, where a wrong stride shows most.
"""

from typing import NamedTuple

import torch

import fusedattn as fa
from fusedattn.testing.compare import in_float64, with_gradients
from fusedattn.testing.tolerance import verdicts

GRADIENTS = ("query", "key", "value", "bias")


class Truth(NamedTuple):
    """{"out", "weights" or the name of an input: the result or gradient} by float64, and by eager PyTorch."""

    oracle: dict
    eager: dict


def of_head(case, tensor):
    """The part of a tensor (B or 1, heads, ...), or of its gradient, that belongs to the head that is compared."""
    group, words = case.Hq // case.Hkv, case.words
    count = group if tensor.shape[1] == case.Hq else 1
    if "dropout" in words:  # its bits depend on the number of a head, which only the first keeps in a slice
        if "bias" in words and case.B > 1:
            raise NotImplementedError("the gradient of a bias is a sum over batches, whose bits a slice does not have")
        return tensor[:1, :count]
    return tensor[:, -count:] if "bias" in words else tensor[-1:, -count:]  # its gradient is a sum over batches


@torch.enable_grad()
def truth(case, tensors):
    """The Truth of a case: float64 through the blocks of the naive path, so that a long one fits."""
    inputs, grad_out = [of_head(case, tensor) for tensor in tensors.inputs], of_head(case, tensors.grad_out)
    masks = {  # (B, S) or (B, H, Sq, Sk)
        name: of_head(case, mask[:, None])[:, 0] if mask.dim() == 2 else of_head(case, mask)
        for name, mask in tensors.masks.items()
    }
    options, sliced = case.arguments(masks), dict(zip(GRADIENTS, inputs, strict=False)) | {"out": grad_out}

    def compute(function, tensors):
        bias = {"bias": tensors["bias"]} if "bias" in tensors else {}
        results = with_gradients(function, tensors, options | bias, grads="out")
        if "weights" in case.words:
            with torch.no_grad():
                query, key, value = (tensors[name] for name in GRADIENTS[:3])
                results["weights"] = function(query, key, value, **options, **bias, return_weights=True)[1]
        return results

    return Truth(oracle=compute(fa.reference.attention, in_float64(sliced)), eager=compute(fa.reference.eager, sliced))


def judge(case, mode, result, truth):
    """(error, eager PyTorch's error, what is wrong or "") of a step's result: an output, or a tuple of gradients."""
    names = ("out", "weights") if mode == "forward" else GRADIENTS
    results = result if isinstance(result, tuple) else (result,)
    return compare({name: of_head(case, tensor) for name, tensor in zip(names, results, strict=False)}, truth)


def compare(results, truth):
    """(error, eager PyTorch's error, what is wrong or "") of {name: tensor}: the errors of the worst one."""
    judged = verdicts(results, truth.eager, {name: truth.oracle[name] for name in results})
    last = max(judged.values(), key=lambda one: (not one.ok, one.max_error / one.max_allowed))
    why = "; ".join(f"{name}: {one.why}" for name, one in judged.items() if not one.ok)
    return last.max_error, last.max_eager, why
