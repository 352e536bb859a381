"""Tangents of calls, by any function like `attention`, held to float64's forward mode by the one rule."""

import torch
from torch.autograd import forward_ad

from fusedattn import reference
from fusedattn.testing.compare import INPUTS, LEARNED, in_float64
from fusedattn.testing.tolerance import verdicts

RESULTS = "out", "lse", "weights"


def directions(tensors, options, names=None, seed=1):
    """{name: a tangent} of the inputs, and of what of the options is learned; only of `names`, unless that is None.

    Where an input is not to be read, because it is hidden, neither is its tangent.
    """
    generator = torch.Generator().manual_seed(seed)
    inputs = {name: tensors[name] for name in INPUTS} | {name: options[name] for name in LEARNED if name in options}
    drawn = {}
    for name, x in inputs.items():
        made = torch.randn(x.shape, generator=generator).to(x)
        drawn[name] = made if name in LEARNED else torch.where(x.isfinite(), made, x)
    return {name: x for name, x in drawn.items() if names is None or name in names}


def whole(x):
    """A tensor no two elements of which share memory; it is x unless it is expanded."""
    return x.contiguous() if 0 in x.stride() else x


def with_tangents(function, tensors, options, moved, weights=True):
    """{result: its tangent} of a function with the arguments of `attention`, in the direction `moved`."""
    given = {name: tensors[name] for name in INPUTS} | options
    with forward_ad.dual_level():
        # torch makes no dual of what is expanded.
        dual = {name: forward_ad.make_dual(whole(given[name]), x.clone()) for name, x in moved.items()}
        results = function(**given | dual, return_lse=True, return_weights=weights)
        pairs = (forward_ad.unpack_dual(x) for x in results)
        return {
            name: torch.zeros_like(x.primal) if x.tangent is None else x.tangent.clone()
            for name, x in zip(RESULTS, pairs, strict=False)
        }


def compare(got, tensors, options, moved, apply=lambda function: function):
    """{result: Verdict} of what `with_tangents` gave; apply: makes of a function what `got` is held to."""
    weights = "weights" in got
    exact = options | in_float64({name: x for name, x in options.items() if name in LEARNED})
    with torch.no_grad():  # where a gradient may be wanted as well, the naive path has a tangent of ours
        eager = with_tangents(apply(reference.eager), tensors, options, moved, weights)
        oracle = with_tangents(apply(reference.attention), in_float64(tensors), exact, in_float64(moved), weights)
    return verdicts(got, eager, oracle, _terms(tensors, options, moved))


def _terms(tensors, options, moved):
    """{result: how large what it sums up is}, where that is not of order one: slopes are multiplied by distances."""
    if "alibi_slopes" not in moved:
        return {}
    if not moved["alibi_slopes"].numel():
        return {}
    far = max(tensors["query"].shape[2], tensors["key"].shape[2]) * moved["alibi_slopes"].abs().max().item()
    return dict.fromkeys(RESULTS, far)
