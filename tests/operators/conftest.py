"""Fixtures of the tests of operators."""

import pytest


@pytest.fixture(params=["triton", "cpu"])
def backend(request, device):
    return request.param
