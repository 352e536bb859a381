"""Tests derivatives against finite differences in float64, for each option and each pair of options."""

import pytest
import torch

import fusedattn as fa
from fusedattn.testing.compare import INPUTS, LEARNED

from .. import cases, sample

SMALL = dict(Sq=5, Sk=6, D=3, Dv=2)
FEW = cases.covering(6, cases.OPTIONS)
ALONE = [cases.Case(name)._replace(**fields) for name, fields in cases.FEATURES.items()]
TWICE = sample.named(FEW[4:5]) + sample.matrix(*sample.named(FEW[:4:2] + FEW[6::2]))
CASES = sample.named(FEW) + sample.matrix(*sample.named(ALONE))


def small(case):
    """Return a case with few rows and keys, and with a window narrow enough to hide some of them."""
    window = case.window and tuple(None if side is None else side % 3 for side in case.window)
    sizes = {name: size for name, size in SMALL.items() if getattr(case, name) == getattr(cases.Case(""), name)}
    sizes |= {name: min(getattr(case, name), 7) for name in SMALL if name not in sizes}
    heads = dict(Hq=2, Hkv=1) if case.Hq > case.Hkv else {}
    return case._replace(**sizes, **heads, window=window, dtype=torch.float64, bias_dtype=None)


STRICT = dict(fast_mode=True, check_undefined_grad=False, rtol=1e-6, atol=1e-6)


def _function(case, device, backend):
    """Return (function of step lengths, one for each input along a random direction; step lengths of 0)."""
    if device != "cpu":
        pytest.skip("float64 is for the interpreter")
    case = small(case)
    tensors, options = case.draw()
    for hidden in INPUTS:  # finite differences of NaN are NaN
        tensors[hidden] = tensors[hidden].nan_to_num(0.0, 0.0, 0.0)
    learned = [name for name in LEARNED if name in options]
    hidden = options["bias"].isinf() if "bias" in options else None
    free = [options[name].masked_fill(hidden, 0.0) if name == "bias" else options[name] for name in learned]
    inputs = [x.detach().clone() for x in (*(tensors[name] for name in INPUTS), *free)]
    directions = [torch.randn_like(x) for x in inputs]

    def compute(steps):
        """Return a weighted sum of all results after moving each input along its direction."""
        query, key, value, *given = (x + t * u for x, t, u in zip(inputs, steps, directions, strict=True))
        given = dict(zip(learned, given, strict=True))
        if "bias" in given:
            given["bias"] = given["bias"].masked_fill(hidden, float("-inf"))
        wanted = dict(return_lse=True, return_weights="weights" in case.grads)
        out, lse, *weights = fa.attention(query, key, value, backend=backend, **options | given, **wanted)
        if case.query_mask:  # incoming gradients of hidden rows are ignored, also for sinks
            lse = lse.masked_fill(~options["query_mask"][..., None, :], 0.0)
        results = (out, lse.masked_fill(lse.isinf(), 0.0), *weights)
        return sum((x * torch.linspace(-1, 2, x.numel(), dtype=x.dtype).view(x.shape)).sum() for x in results)

    return compute, torch.zeros(len(inputs), dtype=torch.float64, requires_grad=True)


# None: the backend "cpu" if it takes the call, otherwise "naive".
either = pytest.mark.parametrize("backend", ["triton", None])


@either
@pytest.mark.parametrize("case", CASES)
@pytest.mark.one_in(11)
def test_derivatives(case, device, backend):
    assert torch.autograd.gradcheck(*_function(case, device, backend), check_forward_ad=True, **STRICT)


@either
@pytest.mark.parametrize("case", TWICE)
@pytest.mark.one_in(4)
def test_second_derivatives(case, device, backend):
    assert torch.autograd.gradgradcheck(*_function(case, device, backend), check_fwd_over_rev=True, **STRICT)
