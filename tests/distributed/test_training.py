"""The model of the demo, its sequence cut over two processes, trains as it does in one."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from fusedattn import distributed
from fusedattn.cli.demo import model as demo, training

STEPS, ROWS = 5, 45  # rows that two ranks do not divide


def losses(rank, size, method, balance):
    """The losses of the steps, by shards or (method None) in one process."""
    torch.manual_seed(0)
    model = demo.LanguageModel().double().eval()  # without dropout of what is fed forward
    optimizer = training.optimizer_of(model)
    generator = torch.Generator().manual_seed(1)
    if method is not None:
        for block in model.blocks:
            block.attention.context_parallel = distributed.ContextParallel(method, balance=balance)
    found = []
    for _ in range(STEPS):
        windows = torch.randint(256, (3, ROWS + 1), generator=generator)
        if method is None:
            loss = model.loss(windows)
        else:
            tokens, targets = (distributed.shard(x, 1, balance=balance) for x in (windows[:, :-1], windows[:, 1:]))
            logits = model(tokens, first=distributed.positions(ROWS, balance=balance))
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / windows[:, 1:].numel()
        optimizer.zero_grad()
        loss.backward()
        total = loss.detach().clone()
        if method is not None:
            dist.all_reduce(total)
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        optimizer.step()
        found.append(total.item())
    return found


@pytest.mark.parametrize("method, balance", [("ring", "zigzag"), ("gather", "zigzag"), ("ulysses", None)])
def test_two_processes_have_the_losses_of_one(pools, method, balance):
    wanted = losses(0, 1, None, None)
    assert wanted[0] > wanted[-1] + 0.05  # it learns
    for found in pools(2).run(losses, method, balance):
        assert found == pytest.approx(wanted, abs=1e-11)
