"""Tests that all ranks raise if they disagree, and that the others name a missing rank instead of waiting."""

import datetime
import os
import time
from unittest import mock

import pytest
import torch

from fusedattn import distributed
from fusedattn.distributed import ranks

from .conftest import answers, join, on_ranks
from .whole import METHODS


def inputs(rows=8, heads=4, dtype=torch.float32, columns=8, batch=1):
    return [torch.randn(batch, heads, rows, columns, dtype=dtype) for _ in range(3)]


SIZES = dict(dtype=torch.float64, columns=4, batch=2, heads=8)
OPTIONS = dict(causal=True, window=(3, None), scale=0.5, softcap=2.0, return_lse=True, backend="naive")
OPTIONS |= dict(sinks=torch.zeros(4), alibi_slopes=torch.zeros(4), key_mask=torch.ones(1, 8, dtype=torch.bool))
# [(arguments of `inputs` on the last rank, options there, the error on all ranks)]
DISAGREE = [({name: x}, {}, "^query: .*rank 1.* on this rank") for name, x in SIZES.items()]
DISAGREE += [({}, {name: x}, f"^{name}: .*rank 1.* on this rank") for name, x in OPTIONS.items()]
DISAGREE += [
    (dict(rows=11), {}, "^query: .*10 rows on rank 0.* got 8"),
    ({}, dict(dropout_p=0.5, seed=1), "^dropout_p: .*rank 1"),
    ({}, dict(softcap=-1.0), "(raised ValueError: |^)softcap: .*-1.0"),
    ({}, dict(causal="yes"), "(raised TypeError: |^)causal: "),
]


@on_ranks(2)
@pytest.mark.parametrize("method", METHODS)
def test_ranks_that_disagree_raise_on_all(rank, size, method):
    attend = getattr(distributed, method)
    for sizes, options, message in DISAGREE:
        with pytest.raises((ValueError, TypeError), match=message):
            attend(*inputs(**(sizes if rank else {})), **(options if rank else {}))
        assert attend(*inputs()).shape == (1, 4, 8, 8)  # all ranks raised, so the next call works


@on_ranks(2)
def test_what_is_wrong_everywhere_raises_everywhere(rank, size):
    wrong = {
        "balance: .*'striped'": dict(balance="striped"),
        r"query: .*\(4, 8, 8\)": dict(query=torch.randn(4, 8, 8)),
        "mask: .* 16, .* 9": dict(mask=torch.ones(8, 9, dtype=torch.bool)),
        "bias: ": dict(bias=torch.ones(7, 16)),
    }
    query, key, value = inputs()
    for message, options in wrong.items():
        with pytest.raises(ValueError, match=f"^{message}"):
            distributed.gather_attention(**dict(query=query, key=key, value=value) | options)
    with pytest.raises(ValueError, match="query: .* 3 heads"):
        distributed.ulysses_attention(*inputs(heads=3))
    assert distributed.ulysses_attention(inputs(heads=6)[0], *inputs(heads=3)[1:]).shape == (1, 6, 8, 8)


@on_ranks(2)
def test_functions_sizes_and_types_that_differ_between_ranks(rank, size):
    with pytest.raises(ValueError, match="rank 1 and rank 0"):
        (distributed.ring_attention if rank else distributed.gather_attention)(*inputs())
    with pytest.raises(ValueError, match="^x: .*rank 0"):
        distributed.unshard(torch.ones(3 + 4 * rank), 0)
    with pytest.raises(ValueError, match="^shape: .*rank 1"):
        distributed.unshard(torch.ones(3, 1 + rank), 0)
    with pytest.raises(ValueError, match="dim: "):
        distributed.unshard(torch.ones(3), rank)
    query, key, value = (torch.randn(8, 2, 8) for _ in range(3))
    attend = distributed.gather_attention_varlen
    with pytest.raises((TypeError, ValueError), match="cu_seqlens: .*list"):
        attend(query, key, value, [0, 16] if rank else torch.tensor([0, 16], dtype=torch.int32))
    with pytest.raises(ValueError, match="^cu_seqlens_q: "):
        attend(query, key, value, torch.tensor([0, 15], dtype=torch.int32))
    with pytest.raises(ValueError, match="^cu_seqlens: .*rank 1"):
        attend(query, key, value, torch.tensor([0, 9 + rank, 16], dtype=torch.int32))
    nested = torch.nested.nested_tensor([torch.ones(4, 4)])
    with pytest.raises((TypeError, ValueError), match="key: .*nested"):
        attend(query, nested if rank else key, value, torch.tensor([0, 16], dtype=torch.int32))
    with pytest.raises((TypeError, ValueError), match="mask: "):
        distributed.gather_attention(*inputs(), mask=nested.bool() if rank else None)
    full = mock.patch.object(ranks, "_refuse", side_effect=torch.OutOfMemoryError("full") if rank else None)
    with full, pytest.raises((torch.OutOfMemoryError, ValueError), match="full"):
        distributed.ulysses_attention(*inputs())
    for columns in (0, 9, 16):
        mask = torch.ones((1, 1, 8, columns) if rank else (1, 1, 1, 1), dtype=torch.bool)
        if columns == 16:
            assert distributed.ulysses_attention(*inputs(), mask=mask).shape == (1, 4, 8, 8)
        else:
            with pytest.raises(ValueError, match="^mask: .* 16"):
                distributed.ulysses_attention(*inputs(), mask=mask)


# These processes end, so they cannot form a Pool.
LIMIT = datetime.timedelta(seconds=1)


def _missing(rank, port, queue):
    join(rank, 3, port, LIMIT)
    distributed.ring_attention(*inputs())
    if rank == 2:
        time.sleep(3 * LIMIT.total_seconds())
        return
    with pytest.raises(RuntimeError) as caught:
        distributed.ring_attention(*inputs())
    queue.put((rank, str(caught.value)))


def _killed(rank, port, queue):
    join(rank, 3, port, datetime.timedelta(minutes=5))
    query, key, value = (x.requires_grad_() for x in inputs(rows=64))
    with pytest.raises(RuntimeError):
        for step in range(10**6):
            if rank == 1 and step == 5:
                os._exit(9)
            began = time.monotonic()
            distributed.ring_attention(query, key, value, causal=True).sum().backward()
    queue.put((rank, time.monotonic() - began))


@pytest.mark.matrix
def test_a_rank_that_does_not_come_is_named_and_a_killed_one_ends_the_others():
    assert all("ring_attention: rank 2 of the group" in message for message in answers(_missing, 3, (0, 1)))
    assert all(seconds < 60 for seconds in answers(_killed, 3, (0, 2)))
