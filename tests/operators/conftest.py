"""What tests of operators inside torch.compile need."""

import pytest
import torch


@pytest.fixture
def fresh():
    """No graph of another test."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
