"""Whether tensors share memory, by their strides and by counting."""

import random

import pytest
import torch

from fusedattn.call.layout import share


@pytest.mark.parametrize("seed", range(3))
def test_tensors_of_the_same_strides_share_what_they_share(seed):
    draw, memory, counts = random.Random(seed), torch.arange(4000), {True: 0, False: 0}
    for _ in range(200):
        first, second = ([draw.randint(1, 4) for _ in range(4)] for _ in range(2))
        strides, step = [0] * 4, draw.randint(1, 2)
        for dim in draw.sample(range(4), 4):
            strides[dim] = step
            step *= max(first[dim], second[dim]) + draw.randint(0, 2)
        a, b = (memory.as_strided(size, strides, draw.randint(0, 60)) for size in (first, second))
        expected = not set(a.flatten().tolist()).isdisjoint(b.flatten().tolist())
        assert share(a, b) == expected, (first, second, strides, a.storage_offset(), b.storage_offset())
        counts[expected] += 1
    assert min(counts.values()) > 50
    assert not share(memory, memory.clone()) and not share(memory[:0], memory)
    assert share(memory[:6].view(2, 3), memory[:6].view(3, 2))
