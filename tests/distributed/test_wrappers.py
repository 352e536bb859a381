"""Tests that FSDP2 and DDP train our modules over two processes as one process does."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fusedattn as fa

from .conftest import on_ranks

STEPS, BATCH, ROWS, WIDTH, HEADS = 3, 4, 10, 32, 4
LENGTHS = 10, 7, 1, 4  # lengths of the sequences
MODULES = dict(
    attention=lambda: [fa.MultiHeadAttention(WIDTH, HEADS, num_kv_heads=2, causal=True)],
    layers=lambda: [fa.layers.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, 0.0) for _ in range(2)],
)


class Row(nn.Module):
    def __init__(self, name):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(MODULES[name]()).double()

    def forward(self, x, key_mask):
        for layer in self.layers:
            x = layer(x, key_mask=key_mask)
            x = x[0] if isinstance(x, tuple) else x
        return x


def train(model, inputs, targets, of_rank=slice(None)):
    """Return the losses of STEPS steps on part of the batch. SGD is used, as Adam would amplify rounding."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    real, losses = torch.arange(ROWS) < torch.tensor(LENGTHS)[:, None], []
    for x, target in zip(inputs, targets, strict=True):
        loss = (model(x[of_rank], real[of_rank]) - target[of_rank]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


@on_ranks(2)
@pytest.mark.parametrize("wrapper", ["fsdp2", "ddp"])
@pytest.mark.parametrize("name", MODULES)
def test_losses_and_parameters_are_those_of_one_process(rank, size, name, wrapper):
    from torch.distributed.fsdp import fully_shard

    data = torch.randn(2, STEPS, BATCH, ROWS, WIDTH, dtype=torch.float64)
    one, model = Row(name), Row(name)
    wanted, mesh = train(one, *data), init_device_mesh("cpu", (size,))
    if wrapper == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        for layer in (*model.layers, model):
            fully_shard(layer, mesh=mesh)
    share = BATCH // size
    losses = train(model, *data, slice(rank * share, (rank + 1) * share))
    torch.distributed.all_reduce(losses)
    found = [x.full_tensor() if hasattr(x, "full_tensor") else x for x in model.parameters()]
    assert not torch.equal(found[0], next(Row(name).parameters()))
    torch.testing.assert_close([losses / size, *found], [wanted, *one.parameters()], rtol=0, atol=1e-12)
