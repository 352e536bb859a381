"""Ranks that disagree raise on all; one that does not come, or ends, is named; nobody waits for ever."""

import datetime
import multiprocessing
import os
import time

import pytest
import torch

from fusedattn import distributed

from .conftest import free_port, join

METHODS = ("ring_attention", "gather_attention", "ulysses_attention")


def inputs(rows=8, heads=4, dtype=torch.float32, columns=8, batch=1):
    return [torch.randn(batch, heads, rows, columns, dtype=dtype) for _ in range(3)]


# What the last rank does otherwise: (arguments of `inputs`, options), and what the others' message begins with.
DISAGREE = {
    "dtype": (dict(dtype=torch.float64), {}, "^query: expected the same on rank 1 as on rank 0"),
    "columns": (dict(columns=4), {}, "^query: expected the same on rank 1"),
    "batch": (dict(batch=2), {}, "^query: expected the same on rank 1"),
    "heads": (dict(heads=8), {}, "^query: expected the same on rank 1"),
    "rows": (dict(rows=11), {}, "^query: expected 10 rows on rank 0, as `shard` cuts 19, got 8"),
    "causal": ({}, dict(causal=True), r"^causal: expected the same on rank 1 .* \((on this rank (True|False))\)$"),
    "window": ({}, dict(window=(3, None)), "^window: expected the same on rank 1"),
    "scale": ({}, dict(scale=0.5), "^scale: expected the same on rank 1"),
    "dropout": ({}, dict(dropout_p=0.5, seed=1), "^dropout_p: expected the same on rank 1"),
    "key mask": ({}, dict(key_mask=torch.ones(1, 8, dtype=torch.bool)), "^key_mask: expected the same on rank 1"),
    "sinks": ({}, dict(sinks=torch.zeros(4)), "^sinks: expected the same on rank 1"),
    "return_lse": ({}, dict(return_lse=True), "^return_lse: expected the same on rank 1"),
    "an error": ({}, dict(softcap=-1.0), "raised ValueError: softcap: expected a finite number above 0|^softcap: "),
    "a wrong type": ({}, dict(causal="yes"), "raised TypeError: causal: expected a bool|^causal: expected a bool"),
}


def disagree(rank, size, method, sizes, options, message):
    other = rank == size - 1
    wanted = (ValueError, TypeError)
    with pytest.raises(wanted, match=message):
        getattr(distributed, method)(*inputs(**(sizes if other else {})), **(options if other else {}))
    # All have heard it, so that the next call is one again.
    return getattr(distributed, method)(*inputs()).shape


@pytest.mark.parametrize("method", METHODS)
def test_ranks_that_disagree_raise_on_all(pools, method):
    for sizes, options, message in DISAGREE.values():
        assert pools(2).run(disagree, method, sizes, options, message) == [(1, 4, 8, 8)] * 2


def other_functions(rank, size):
    with pytest.raises(ValueError, match="expected the same function on all ranks, rank 1 and rank 0 called two"):
        (distributed.ring_attention if rank else distributed.gather_attention)(*inputs())


def test_ranks_that_call_two_functions_raise(pools):
    pools(2).run(other_functions)


def no_divisor(rank, size):
    for heads in ((3, 3), (6, 3)):
        query, key, value = (torch.randn(1, n, 8, 8) for n in (heads[0], heads[1], heads[1]))
        if heads[0] % size:
            with pytest.raises(ValueError, match="query: expected heads that 2 ranks divide, got 3 heads"):
                distributed.ulysses_attention(query, key, value)
        else:
            assert distributed.ulysses_attention(query, key, value).shape == (1, 6, 8, 8)


def test_heads_that_ranks_do_not_divide_are_refused(pools):
    pools(2).run(no_divisor)


def wrong_offsets(rank, size):
    query, key, value = (torch.randn(8, 2, 8) for _ in range(3))
    offsets = [0, 16] if rank else torch.tensor([0, 16], dtype=torch.int32)
    with pytest.raises((TypeError, ValueError), match="cu_seqlens: expected a tensor, got list"):
        distributed.gather_attention_varlen(query, key, value, offsets)
    with pytest.raises(ValueError, match="^cu_seqlens_q: expected "):
        distributed.gather_attention_varlen(query, key, value, torch.tensor([0, 15], dtype=torch.int32))
    for shape in ((1, 1, 8, 0), (1, 1, 8, 9)):
        mask = torch.ones(shape if rank else (1, 1, 1, 1), dtype=torch.bool)
        with pytest.raises(ValueError, match="^mask: expected all keys, 16, or 1 as its last size"):
            distributed.ulysses_attention(*inputs(), mask=mask)
    mask = torch.ones((1, 1, 8, 16) if rank else (1, 1, 1, 1), dtype=torch.bool)
    return distributed.ulysses_attention(*inputs(), mask=mask).shape


def test_sizes_and_types_that_differ_between_ranks(pools):
    assert pools(2).run(wrong_offsets) == [(1, 4, 8, 8)] * 2


WRONG = {
    "balance": (dict(balance="striped"), "^balance: expected None or 'zigzag', got 'striped'"),
    "rank": (dict(query=torch.randn(4, 8, 8)), r"^query: expected rank 4, \(B, H, rows, D\), got \(4, 8, 8\)"),
    "mask": (
        dict(mask=torch.ones(8, 9, dtype=torch.bool)),
        "^mask: expected all keys, 16, or 1 as its last size, got 9",
    ),
    "bias": (dict(bias=torch.ones(7, 16)), r"^bias: expected "),
}


def all_wrong(rank, size, options, message):
    query, key, value = inputs()
    with pytest.raises(ValueError, match=message):
        distributed.gather_attention(**dict(query=query, key=key, value=value) | options)


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_everywhere_raises_everywhere(pools, name):
    pools(2).run(all_wrong, *WRONG[name])


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: distributed.shard([1, 2], 0), TypeError, "^x: expected a tensor, got list"),
        (
            lambda: distributed.shard(torch.ones(3), 1),
            ValueError,
            "^dim: expected a dimension of x, which has 1, got 1",
        ),
        (lambda: distributed.shard(torch.ones(3), 0.0), TypeError, "^dim: expected an int, got float"),
        (lambda: distributed.unshard(torch.ones(3), 0, balance="x"), ValueError, "^balance: expected None or 'zigzag'"),
        (lambda: distributed.positions(-1), ValueError, "^length: expected 0 or more, got -1"),
        (lambda: distributed.positions(1.5), TypeError, "^length: expected an int, got float"),
        (lambda: distributed.positions(3, group="all"), TypeError, "^group: expected a process group, a DeviceMesh"),
        (lambda: distributed.ring_attention(1, 2, 3), TypeError, "^query: expected a tensor, got int"),
    ],
)
def test_wrong_arguments_of_one_process(call, error, message):
    with pytest.raises(error, match=message):
        call()


# Processes of their own: they end.
LIMIT = datetime.timedelta(seconds=2)


def _missing(rank, port, queue):
    join(rank, 3, port, LIMIT)
    distributed.ring_attention(*inputs())
    if rank == 2:
        time.sleep(3 * LIMIT.total_seconds())
        return
    try:
        distributed.ring_attention(*inputs())
        queue.put((rank, "nothing was raised"))
    except RuntimeError as error:
        queue.put((rank, str(error)))


def _killed(rank, port, queue):
    join(rank, 3, port, datetime.timedelta(minutes=5))
    query, key, value = (x.requires_grad_() for x in inputs(rows=64))
    began = None
    try:
        for step in range(10**6):
            if rank == 1 and step == 5:
                os._exit(9)
            began = time.monotonic()
            distributed.ring_attention(query, key, value, causal=True).sum().backward()
    except RuntimeError as error:
        queue.put((rank, f"{time.monotonic() - began:.1f} {error}"))


def _answers(target, ranks, seconds):
    context = multiprocessing.get_context("spawn")
    queue, port = context.Queue(), free_port()
    processes = [context.Process(target=target, args=(rank, port, queue), daemon=True) for rank in range(3)]
    for process in processes:
        process.start()
    answers = dict(queue.get(timeout=seconds) for _ in ranks)
    for process in processes:
        process.kill()
    assert answers.keys() == set(ranks)
    return answers


def test_a_rank_that_does_not_come_is_named():
    for rank, message in _answers(_missing, (0, 1), 40).items():
        assert "ring_attention: rank 2 of the group did not call it within 2 s, or has ended" in message, (
            rank,
            message,
        )


def test_a_rank_that_is_killed_ends_the_others():
    for message in _answers(_killed, (0, 2), 60).values():
        assert float(message.split()[0]) < 30
