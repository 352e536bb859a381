"""Tests output, lse and gradients of the kernels with each option, alone and in pairs."""

import pytest
import torch

from .. import cases, sample
from ..close import assert_case

# `make test` runs each option in one of its two dtypes, `make test-all` in both.
ALONE = [case if n % 4 in (0, 3) else sample.matrix(case)[0] for n, case in enumerate(sample.named(cases.SINGLE))]
ALONE += sample.one_in(5, sample.named(sorted(cases.SHAPES, key=lambda case: case.alike == 0)))
ALONE += sample.one_in(25, sample.named(cases.WIDE))


@pytest.mark.parametrize("case", ALONE)
def test_an_option_alone(case, device, poison, request):
    if not cases.replayed(case):
        request.getfixturevalue("overflow")
    if case.dtype == torch.float64 and device == "cuda":
        pytest.skip("float64 is for the interpreter")
    assert_case(case, device, backend="triton")


@pytest.mark.sample
@pytest.mark.parametrize("case", cases.covering(8)[::4], ids=lambda case: case.name)
def test_each_pair_of_options_in_a_few_calls(case, device, poison):
    test_options_together(case, device, poison)


@pytest.mark.matrix
@pytest.mark.parametrize("case", cases.COVERING + cases.PAIRS[::5] + cases.TRIPLES[::2], ids=lambda case: case.name)
def test_options_together(case, device, poison):
    if case.dtype == torch.float64 and device == "cuda":
        case = case._replace(dtype=torch.float16)
    assert_case(case, device, backend="triton")
