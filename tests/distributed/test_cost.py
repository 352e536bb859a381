"""The model of what is sent, against the bytes that go through torch.distributed; and the page that is made of it."""

import contextlib
import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fusedattn import distributed
from fusedattn.distributed import cost, forecast
from fusedattn.distributed.cost import Shape
from fusedattn.distributed.shards import Chunk

from ..offline import distributed as page

DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
SMALL = Shape(2, 37, 4, 2, 8, 6, 2, 0, causal=True)
CASES = {
    "ring full": ("ring", dict(causal=False)),
    "ring causal": ("ring", {}),
    "ring zigzag": ("ring", dict(balance="zigzag")),
    "ring window": ("ring", dict(window=(7, None))),
    "ring window of both sides, zigzag": ("ring", dict(causal=False, window=(3, 2), balance="zigzag")),
    "ring fewer rows than ranks": ("ring", dict(length=3, causal=False)),
    "ring float64": ("ring", dict(element=8)),
    "gather": ("gather", {}),
    "gather zigzag": ("gather", dict(balance="zigzag", window=(7, None))),
    "gather float32": ("gather", dict(element=4)),
    "ulysses": ("ulysses", {}),
    "ulysses, as many key heads": ("ulysses", dict(key_heads=4)),
    "ulysses, one key head": ("ulysses", dict(key_heads=1, causal=False)),
    "ulysses float64": ("ulysses", dict(element=8, window=(7, 2))),
}


@contextlib.contextmanager
def counted(rank, size):
    """[bytes to each rank by the tensors' own operations, and by the agreement's]."""
    sent, said = [0] * size, [0] * size
    batch, exchange, gather = dist.batch_isend_irecv, dist.all_to_all_single, dist.all_gather

    def batch_isend_irecv(operations):
        for each in operations:
            if each.op is dist.isend:  # what ranks agree on are words, all else are bytes
                (said if each.tensor.dtype == torch.int64 else sent)[each.group_peer] += each.tensor.nbytes
        return batch(operations)

    def all_gather(out, own, **options):
        for peer in {*range(size)} - {rank}:
            sent[peer] += own.nbytes
        return gather(out, own, **options)

    def all_to_all_single(out, flat, received, given, **options):
        for peer in {*range(size)} - {rank}:
            sent[peer] += given[peer] * flat.element_size()
        return exchange(out, flat, received, given, **options)

    def refuse(*args, **options):
        raise AssertionError("nobody counts an all_reduce")

    with mock.patch.multiple(
        dist, batch_isend_irecv=batch_isend_irecv, all_reduce=refuse, all_gather=all_gather,
        all_to_all_single=all_to_all_single,
    ):  # fmt: skip
        yield sent, said


def count(rank, size, method, shape):
    """(bytes to each rank in the forward, in the backward, for the agreement) of a call, as a rank sends them."""
    torch.manual_seed(0)
    heads = (shape.heads, shape.width), (shape.key_heads, shape.width), (shape.key_heads, shape.value_width)
    whole = [torch.randn(shape.batch, h, shape.length, width, dtype=DTYPES[shape.element]) for h, width in heads]
    mine = [distributed.shard(x, 2, balance=shape.balance).requires_grad_() for x in whole]
    options = dict(causal=shape.causal, window=shape.window)
    options |= {} if method == "ulysses" else dict(balance=shape.balance)
    with counted(rank, size) as (sent, said):
        out = getattr(distributed, f"{method}_attention")(*mine, **options)
        forward, agreement = list(sent), list(said)
        out.sum().backward()
    return forward, [after - before for after, before in zip(sent, forward, strict=True)], agreement


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_bytes_are_those_that_are_sent(name, size, pools):
    method, fields = CASES[name]
    shape = SMALL._replace(world=size, **fields)
    forward, backward, agreement = (list(flow) for flow in zip(*pools(size).run(count, method, shape), strict=True))
    assert forward == cost.traffic(method, shape)
    assert backward == cost.traffic(method, shape, backward=True)
    assert agreement == cost.agreement(size)


def sums(flow):
    return [sum(row) for row in flow]


def test_sizes_by_hand():
    full = Shape(1, 64, 8, 2, 16, 16, 2, 4)
    shard = 16 * 2 * (16 + 16) * 2  # rows, key heads, columns of both, bytes
    assert sums(cost.traffic("ring", full)) == sums(cost.traffic("gather", full)) == [3 * shard] * 4
    assert sums(cost.traffic("ring", full, True)) == [3 * (shard + 2 * shard)] * 4
    causal = full._replace(causal=True)
    assert sums(cost.traffic("ring", causal)) == [3 * shard, 2 * shard, shard, 0]
    assert sums(cost.traffic("ring", causal._replace(balance="zigzag"))) == [3 * shard] * 4
    window = causal._replace(window=(8, None))
    assert cost.traffic("ring", window)[0] == [0, shard, 0, 0] and sums(cost.traffic("ring", window))[3] == 0
    assert sums(cost.traffic("gather", window)) == [3 * shard] * 4
    # Two query heads and, of the two key heads, one for each rank, there; two of the output and their lse back.
    there, back = 16 * (2 * 16 + 16 + 16) * 2, 16 * 2 * (16 * 2 + 4)
    assert sums(cost.traffic("ulysses", full)) == [3 * (there + back)] * 4
    assert sums(cost.traffic("ulysses", full, True)) == [3 * 16 * (2 * 16 * 2 + 2 * 16 * 2 + 2 * 16 * 4)] * 4
    assert cost.agreement(3) == [[0, 4608, 4608], [1536, 0, 0], [1536, 0, 0]]
    assert not cost.fits("ulysses", full._replace(world=16)) and cost.fits("ring", full._replace(world=16))


@pytest.mark.parametrize("window", [(None, None), (7, None), (5, 3), (0, 0), (None, 4), (50, 50)])
@pytest.mark.parametrize("balance", [None, "zigzag"])
def test_operations_are_those_of_the_pairs_that_are_seen(window, balance):
    shape = Shape(2, 37, 4, 2, 8, 6, 2, 4, balance, window=window)
    i, j = torch.arange(37)[:, None], torch.arange(37)
    low, high = (math.inf if side is None else side for side in window)
    seen = (j >= i - low) & (j <= i + high)
    for rank in range(4):
        for owner in range(4):
            rows, keys = (
                [n for chunk in cost.whole_of(shape).rows[r] for n in range(chunk.first, chunk.last)]
                for r in (rank, owner)
            )
            pairs = int(seen[rows][:, keys].sum())
            assert cost.operations(shape, rank, owner) == 2 * 2 * 4 * (8 + 6) * pairs


def test_causal_is_half():
    full = Shape(1, 4096, 32, 8, 128, 128, 2, 8, "zigzag")
    assert cost.operations(full._replace(world=1), 0, 0) == 2 * 2 * 4096**2 * 32 * 128
    causal = full._replace(causal=True)
    each = [sum(cost.operations(causal, rank, owner) for owner in range(8)) for rank in range(8)]
    assert max(each) == min(each) and sum(each) == 2 * 2 * (4096 * 4097 // 2) * 32 * 128
    assert Chunk(0, 4096 // 16, 0) in cost.whole_of(causal).rows[0]


SPEEDS = forecast.Speeds(1e12, 1e30, 1e9, 1e8, 4)


def test_a_ring_hides_what_its_links_bring_in_time():
    shape = Shape(1, 1024, 8, 8, 64, 64, 2, 4)
    slow, fast = SPEEDS, SPEEDS._replace(inside=1e30)
    compute = cost.operations(shape._replace(world=1), 0, 0) / 4 / 1e12
    transfer = sum(cost.traffic("ring", shape)[0]) / 1e9
    assert forecast.seconds("ring", shape, fast).total == pytest.approx(compute)
    assert forecast.seconds("ring", shape, slow) == pytest.approx((compute, transfer, transfer + compute / 4))
    assert forecast.seconds("gather", shape, slow).total == pytest.approx(compute + transfer)
    least = forecast.hiding_rows(shape, 1e12, 1e9)
    for rows, hides in ((math.ceil(least) + 8, True), (math.floor(least) - 8, False)):
        found = forecast.seconds("ring", shape._replace(length=4 * rows), slow)
        assert (found.total == pytest.approx(found.compute)) is hides


def test_a_gather_crosses_to_a_node_once():
    shape = Shape(1, 4096, 8, 8, 64, 64, 2, 8)
    shard = 512 * 8 * 128 * 2
    apart = forecast.seconds("ring", shape, SPEEDS._replace(operations=1e30, inside=1e30)).transfer
    assert forecast.seconds("gather", shape, SPEEDS._replace(inside=1e30)).transfer == pytest.approx(shard / 1e8)
    assert apart == pytest.approx(7 * shard / 1e8)  # each step some rank waits for another node


def test_the_page_is_what_its_command_writes():
    """After a change of the model: python -m tests.offline.distributed --report."""
    assert page.PAGE.read_text() == page.text()
    assert page.PAGE.with_suffix(".png").is_file()


def test_what_the_page_advises_is_what_the_model_finds():
    llama, large = page.MODELS.values()
    assert all(
        forecast.fastest(page.shape(heads, length, world), page.SPEEDS) == "ulysses"
        for heads, world in ((llama, 8), (large, 8), (large, 64))
        for length in page.LENGTHS
    )
    least = page.hidden_from(llama, page.INFINIBAND, True) * 64
    for length in page.LENGTHS:
        wanted = "ring" if length > least else "gather"
        assert forecast.fastest(page.shape(llama, length, 64), page.SPEEDS) == wanted


def test_the_picture_has_a_panel_for_each_model_and_number_of_gpus(monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(page, "SIZES", (2, 4))
    panels = page.draw().axes
    assert len(panels) == 4
    assert [line.get_label() for line in panels[0].lines] == list(cost.METHODS)
    assert all(min(line.get_ydata()) > 1 for axes in panels for line in axes.lines)
