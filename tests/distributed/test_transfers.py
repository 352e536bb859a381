"""Tests the transfers of a ring: unseen keys are not sent, and transfers overlap with computation."""

import contextlib
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import fusedattn as fa
from fusedattn import distributed
from fusedattn.distributed import ranks
from fusedattn.operators import partial

from .conftest import answers, join, on_ranks

ROWS, HEADS, KEY_HEADS, COLUMNS = 32, 4, 2, 8
SHARD = ROWS * KEY_HEADS * 2 * COLUMNS * 4  # bytes of the float32 keys and values of a rank


@contextlib.contextmanager
def recorded():
    """Return a list of events: the bytes of each exchange, "wait", "compute", and names of other operations."""
    events, exchange, wait, forward = [], ranks.exchange, ranks.Transfer.wait, partial.forward

    def begin(group, sent, to, *rest):
        sent = list(sent)
        events.append(sum(x.numel() * x.element_size() for x in sent))
        return exchange(group, sent, to, *rest)

    def note(name, function=lambda *given, **more: None):
        return lambda *given, **more: (events.append(name), function(*given, **more))[1]

    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(ranks, "exchange", begin))
        patches.enter_context(mock.patch.object(ranks.Transfer, "wait", note("wait", wait)))
        patches.enter_context(mock.patch.object(partial, "forward", note("compute", forward)))
        for name in ("all_gather", "all_to_all_single", "all_gather_into_tensor"):
            patches.enter_context(mock.patch.object(dist, name, note(name)))
        yield events


def ring(balance=None, **options):
    """Return (events, bytes sent in the forward, bytes sent in the backward) of a ring."""
    query = torch.randn(1, HEADS, ROWS, COLUMNS, requires_grad=True)
    key, value = (torch.randn(1, KEY_HEADS, ROWS, COLUMNS, requires_grad=True) for _ in range(2))
    with recorded() as events:
        out = distributed.ring_attention(query, key, value, balance=balance, **options)
        count = len(events)
        out.square().sum().backward()
    sent = [[x for x in some if isinstance(x, int)] for some in (events[:count], events[count:])]
    return events[:count], *map(sum, sent)


@on_ranks(4)
@pytest.mark.parametrize("balance", [None, "zigzag"])
def test_a_ring_sends_each_shard_once_to_each_rank(rank, size, balance):
    """A ring sends each shard once to each rank; the backward sends keys again, and their float32 gradients back."""
    events, forward, backward = ring(balance)
    assert (forward, backward) == ((size - 1) * SHARD, 2 * (size - 1) * SHARD)
    assert set(events) <= {SHARD, "wait", "compute"}
    if balance is None:  # the next keys travel while the present ones are computed
        assert events == [SHARD, "compute", "wait"] * 3 + ["compute"]


@on_ranks(4)
def test_what_no_row_sees_is_not_sent(rank, size):
    _, forward, backward = ring(causal=True)
    assert (forward, backward) == ((3 - rank) * SHARD, 3 * SHARD)
    _, forward, _ = ring(causal=True, window=(ROWS, None))
    assert forward == (SHARD if rank < 3 else 0)


@on_ranks(4)
def test_ranks_agree_on_the_device_of_their_tensors(rank, size):
    config = mock.patch.object(dist, "get_backend_config", lambda _: "meta:nccl")
    with config, mock.patch.object(ranks, "_fill"), pytest.raises(NotImplementedError, match="copy out of meta"):
        distributed.ring_attention(*torch.empty(3, 1, 2, 8, 16, device="meta"))


def _differences(rank, port, queue):
    join(rank, 2, port)
    torch.manual_seed(0)
    whole, found = [torch.randn(1, 2, 6, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)], []
    wanted = torch.autograd.grad(fa.attention(*whole).square().sum(), whole)
    for attend in (distributed.ring_attention, distributed.gather_attention):
        own = [distributed.shard(x.detach(), 2).requires_grad_() for x in whole]
        grads = torch.autograd.grad(attend(*own).square().sum(), own)
        found += [(a - distributed.shard(b, 2)).abs().max().item() for a, b in zip(grads, wanted, strict=True)]
    queue.put((rank, ([*{"key", "value"}], max(found))))


def test_ranks_send_gradients_in_one_order():
    """Ranks that torchrun starts hash strings with different seeds, and so have sets of names in different orders."""
    orders, differences = zip(*answers(_differences, 2, (0, 1)), strict=True)
    assert orders[0] != orders[1] and max(differences) < 1e-12
