"""Fixtures of the tests of operators."""

import pytest


@pytest.fixture(params=["triton", "cpu"])
def backend(request, device):
    if request.param == "cpu" != device:
        pytest.skip("about CPU tensors")
    return request.param
