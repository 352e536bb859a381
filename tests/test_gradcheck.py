"""Gradients of the kernels against finite differences, in float64 in the interpreter: each option, each pair of them."""

import pytest
import torch

import fusedattn as fa
from fusedattn.compare import INPUTS, LEARNED

from . import cases

SMALL = dict(Sq=5, Sk=6, D=3, Dv=2)
ALONE = [cases.Case(name)._replace(**fields) for name, fields in cases.FEATURES.items()]
CASES = [case for case in (*ALONE, *cases.PAIRS, *cases.TRIPLES)]


def small(case):
    """The case on few rows and keys, with what is narrow enough to hide some of them."""
    window = case.window and tuple(None if side is None else side % 3 for side in case.window)
    sizes = {name: size for name, size in SMALL.items() if getattr(case, name) == getattr(cases.Case(""), name)}
    sizes |= {name: min(getattr(case, name), 7) for name in SMALL if name not in sizes}
    return case._replace(**sizes, window=window, dtype=torch.float64, bias_dtype=None)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gradients_against_finite_differences(case, device):
    if device != "cpu":
        pytest.skip("float64 is for the interpreter")
    case = small(case)
    tensors, options = case.draw()
    for hidden in INPUTS:  # finite differences of what is NaN are NaN
        tensors[hidden] = tensors[hidden].nan_to_num(0.0, 0.0, 0.0)
    learned = [name for name in LEARNED if name in options]
    hidden = options["bias"].isinf() if "bias" in options else None
    free = [options[name].masked_fill(hidden, 0.0) if name == "bias" else options[name] for name in learned]
    inputs = [x.detach().clone().requires_grad_() for x in (*(tensors[name] for name in INPUTS), *free)]

    def compute(query, key, value, *given):
        given = dict(zip(learned, given, strict=True))
        if "bias" in given:
            given["bias"] = given["bias"].masked_fill(hidden, float("-inf"))
        wanted = dict(return_lse=True, return_weights="weights" in case.grads)
        out, lse, *weights = fa.attention(query, key, value, backend="triton", **options | given, **wanted)
        if case.query_mask:  # what comes back to a hidden row is not looked at, not even for its sink
            lse = lse.masked_fill(~options["query_mask"][..., None, :], 0.0)
        return out, lse.masked_fill(lse.isinf(), 0.0), *weights

    assert torch.autograd.gradcheck(compute, inputs, fast_mode=True)
