"""Fixtures of the tests of operators."""

import pytest
import torch


@pytest.fixture
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(params=["triton", "cpu"])
def backend(request, device):
    if request.param == "cpu" != device:
        pytest.skip("about CPU tensors")
    return request.param
