"""Tangents (forward mode) of functions like `attention`, compared with float64 by the tolerance rule."""

import torch
from torch.autograd import forward_ad

from fusedattn import reference
from fusedattn.testing.compare import INPUTS, LEARNED, in_float64
from fusedattn.testing.tolerance import verdicts

RESULTS = "out", "lse", "weights"


def directions(tensors, options, names=None, seed=1):
    """Return {name: random tangent} of the inputs and learned options, or only of `names`.

    Tangents of hidden elements, which may not be read, are NaN or infinite like the elements.
    """
    generator = torch.Generator().manual_seed(seed)
    inputs = {name: tensors[name] for name in INPUTS} | {name: options[name] for name in LEARNED if name in options}
    drawn = {}
    for name, x in inputs.items():
        made = torch.randn(x.shape, generator=generator).to(x)
        drawn[name] = made if name in LEARNED else torch.where(x.isfinite(), made, x)
    return {name: x for name, x in drawn.items() if names is None or name in names}


def whole(x):
    """Return a tensor without shared elements: a copy if x is expanded, otherwise x."""
    return x.contiguous() if 0 in x.stride() else x


def with_tangents(function, tensors, options, moved, weights=True):
    """Return {result: tangent} of a function like `attention`, along the input tangents `moved`."""
    given = {name: tensors[name] for name in INPUTS} | options
    with forward_ad.dual_level():
        # torch makes no dual tensor of an expanded tensor.
        dual = {name: forward_ad.make_dual(whole(given[name]), x.clone()) for name, x in moved.items()}
        results = function(**given | dual, return_lse=True, return_weights=weights)
        pairs = (forward_ad.unpack_dual(x) for x in results)
        return {
            name: torch.zeros_like(x.primal) if x.tangent is None else x.tangent.clone()
            for name, x in zip(RESULTS, pairs, strict=False)
        }


def compare(got, tensors, options, moved, apply=lambda function: function):
    """Return {result: Verdict} of tangents; `apply` wraps the reference functions."""
    weights = "weights" in got
    exact = options | in_float64({name: x for name, x in options.items() if name in LEARNED})
    with torch.no_grad():  # otherwise the naive path would use our formula of tangents, not torch's
        eager = with_tangents(apply(reference.eager), tensors, options, moved, weights)
        oracle = with_tangents(apply(reference.attention), in_float64(tensors), exact, in_float64(moved), weights)
    return verdicts(got, eager, oracle, _terms(tensors, options, moved))


def _terms(tensors, options, moved):
    """Return {result: size of its largest summed term} if slopes, which multiply distances, have tangents, else {}."""
    if "alibi_slopes" not in moved or not moved["alibi_slopes"].numel():
        return {}
    far = max(tensors["query"].shape[2], tensors["key"].shape[2]) * moved["alibi_slopes"].abs().max().item()
    return dict.fromkeys(RESULTS, far)
