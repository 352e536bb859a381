"""How much is sent, and when: what nobody sees is not, and the next keys are on their way under the present ones."""

import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fusedattn import distributed
from fusedattn.distributed import ranks
from fusedattn.operators import partial

ROWS, HEADS, KEY_HEADS, COLUMNS, ITEM = 32, 4, 2, 8, 4
SHARD = ROWS * KEY_HEADS * 2 * COLUMNS * ITEM  # bytes of the keys and values of a rank


def counted(rank, size, options, balance):
    """(bytes that this rank sends forward, and backward; calls of other kinds), without what ranks agree on."""
    sent, other = [0], [0]
    exchange, operations = dist.batch_isend_irecv, ("all_gather", "all_to_all_single", "all_gather_into_tensor")

    def count(ops):
        sent[0] += sum(
            op.tensor.numel() * op.tensor.element_size()
            for op in ops
            if op.op is dist.isend and op.tensor.dtype == torch.uint8
        )
        return exchange(ops)

    def refuse(*given, **more):
        other[0] += 1

    torch.manual_seed(rank)
    query = torch.randn(1, HEADS, ROWS, COLUMNS, requires_grad=True)
    key, value = (torch.randn(1, KEY_HEADS, ROWS, COLUMNS, requires_grad=True) for _ in range(2))
    with mock.patch.object(dist, "batch_isend_irecv", count):
        for name in operations:
            mock.patch.object(dist, name, refuse).start()
        try:
            out = distributed.ring_attention(query, key, value, balance=balance, **options)
            forward = sent[0]
            out.square().sum().backward()
        finally:
            mock.patch.stopall()
    return forward, sent[0] - forward, other[0]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("balance", [None, "zigzag"])
def test_a_ring_sends_each_shard_once_to_each_rank(pools, size, balance):
    """Backward as often, and their gradients, float32 as they are, back."""
    for forward, backward, other in pools(size).run(counted, {}, balance):
        assert (forward, backward, other) == ((size - 1) * SHARD, 2 * (size - 1) * SHARD, 0)


def test_what_no_row_sees_is_not_sent(pools):
    """Causal: to later ranks alone. A window that reaches into the shard before: to the next one."""
    causal = pools(4).run(counted, dict(causal=True), None)
    assert [forward for forward, *_ in causal] == [3 * SHARD, 2 * SHARD, SHARD, 0]
    assert [backward for _, backward, _ in causal] == [3 * SHARD, (2 + 1) * SHARD, (1 + 2) * SHARD, 3 * SHARD]
    window = pools(4).run(counted, dict(causal=True, window=(ROWS, None)), None)
    assert [forward for forward, *_ in window] == [SHARD] * 3 + [0]


def traced(rank, size, slow):
    """(what happened, in order; seconds) of a forward whose parts take at least so long."""
    events = []
    exchange, wait, forward = ranks.exchange, ranks.Transfer.wait, partial.forward

    def begin(*given):
        events.append("begin")
        return exchange(*given)

    def await_(transfer):
        events.append("wait")
        return wait(transfer)

    def compute(*given):
        events.append("compute")
        time.sleep(slow)
        return forward(*given)

    inputs = [torch.randn(1, 2, 256, 64) for _ in range(3)]
    with (
        mock.patch.object(ranks, "exchange", begin),
        mock.patch.object(ranks.Transfer, "wait", await_),
        mock.patch.object(partial, "forward", compute),
    ):
        dist.barrier()
        distributed.ring_attention(*inputs)
    return events


def test_the_next_keys_are_on_their_way_under_the_present_ones(pools):
    for events in pools(4).run(traced, 0.01):
        assert events == ["begin", "compute", "wait"] * 3 + ["compute"]


def waited(rank, size):
    """Seconds that ranks wait for keys whose transfer began 0.2 s of computing before."""
    seconds, wait, forward = [], ranks.Transfer.wait, partial.forward

    def await_(transfer):
        began = time.monotonic()
        found = wait(transfer)
        seconds.append(time.monotonic() - began)
        return found

    def compute(*given):
        time.sleep(0.2)
        return forward(*given)

    inputs = [torch.randn(1, 8, 2048, 64) for _ in range(3)]  # 8 MiB of keys and values a shard
    with mock.patch.object(ranks.Transfer, "wait", await_), mock.patch.object(partial, "forward", compute):
        dist.barrier()
        distributed.ring_attention(*inputs, window=(2100, 0))
    began = time.monotonic()
    tensors = [x.contiguous() for x in inputs[1:]]
    ranks.exchange(ranks.of(None), tensors, 1 - rank, [torch.empty_like(x) for x in tensors], 1 - rank).wait()
    return max(seconds, default=0.0), time.monotonic() - began


@pytest.mark.matrix
def test_transfers_take_no_time_of_their_own(pools):
    """On gloo: what is waited for has come, while sending as much by itself takes longer."""
    for seconds, alone in pools(2).run(waited):
        assert seconds < max(0.5 * alone, 0.005), (seconds, alone)
