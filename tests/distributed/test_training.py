"""A language model whose sequence is cut over two processes trains as it does in one."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import fusedattn as fa
from fusedattn import distributed

STEPS, ROWS, WIDTH = 5, 45, 64  # rows that two ranks do not divide


class Model(nn.Module):
    """tokens (B, S) at positions (S,) -> logits (B, S, 256) of the byte after each."""

    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(ROWS, WIDTH)
        layers = (fa.layers.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, causal=True) for _ in range(2))
        self.blocks = nn.Sequential(*layers)
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256))

    def forward(self, tokens, positions):
        return self.head(self.blocks(self.tokens(tokens) + self.positions(positions)))


def losses(rank, size, method, balance):
    """The losses of the steps, by shards or (method None) in one process."""
    torch.manual_seed(0)
    model = Model().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.5e-3, weight_decay=0.1)
    generator = torch.Generator().manual_seed(1)
    if method is not None:
        for block in model.blocks:
            block.attention.context_parallel = distributed.ContextParallel(method, balance=balance)
    found = []
    for _ in range(STEPS):
        windows = torch.randint(256, (3, ROWS + 1), generator=generator)
        tokens, targets, positions = windows[:, :-1], windows[:, 1:], torch.arange(ROWS)
        if method is not None:
            tokens, targets = (distributed.shard(x, 1, balance=balance) for x in (tokens, targets))
            positions = distributed.positions(ROWS, balance=balance)
        logits = model(tokens, positions)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / (3 * ROWS)
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
