"""float32 gradients of few keys, each of which is a sum over many rows."""

import pytest
import torch

import fusedattn as fa
from fusedattn.testing.compare import with_gradients

from ..close import assert_close


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dim, keys", [(1, 5), (4, 17), (8, 17), (8, 64), (64, 33)])
def test_gradients_of_few_keys_are_as_good_as_eagers(dim, keys, seed):
    """The order of a sum over rows depends on the CPU; ours is a sum of sums on each."""
    torch.manual_seed(seed)
    sizes = dict(query=(4, 3, 1030, dim), key=(4, 3, keys, dim), value=(4, 3, keys, dim))
    sizes |= dict(out=(4, 3, 1030, dim), lse=(4, 3, 1030))
    tensors = {name: torch.randn(size) for name, size in sizes.items()}
    assert_close(with_gradients(fa.attention, tensors, {}), tensors, {})
