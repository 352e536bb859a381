"""torch's own wrappers train our modules over two processes as one process does: FSDP2 and DDP."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fusedattn as fa

TOLERANCE = 1e-13
STEPS, BATCH, ROWS, WIDTH, HEADS = 3, 4, 10, 32, 4
LENGTHS = 10, 7, 1, 4  # of the sequences


def modules():
    return dict(
        attention=lambda: fa.MultiHeadAttention(WIDTH, HEADS, causal=True),
        grouped=lambda: fa.MultiHeadAttention(WIDTH, HEADS, num_kv_heads=2),
        layers=lambda: nn.ModuleList(
            [fa.layers.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, 0.0) for _ in range(2)]
        ),
    )


def drawn(name):
    """(a module, inputs of each step, targets, which tokens are real), the same in each process."""
    torch.manual_seed(0)
    module = modules()[name]().to(torch.float64)
    inputs = torch.randn(2, STEPS, BATCH, ROWS, WIDTH, dtype=torch.float64)
    return module, *inputs, torch.arange(ROWS) < torch.tensor(LENGTHS)[:, None]


def applied(module, x, key_mask):
    """The output of a module, or of a row of modules."""
    for layer in module if isinstance(module, nn.ModuleList) else [module]:
        x = layer(x, key_mask=key_mask)
        x = x[0] if isinstance(x, tuple) else x
    return x


class Row(nn.Module):
    """What `applied` computes, as one module with a forward, which wrappers ask for."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x, key_mask):
        return applied(self.module, x, key_mask)


def trained(model, inputs, targets, real, of_rank=slice(None)):
    """Losses of STEPS steps on some of the batch: of these alone. Not by Adam, to which rounding is a gradient too."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for x, target in zip(inputs, targets, strict=True):
        loss = (model(x[of_rank], real[of_rank]) - target[of_rank]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


def differences(rank, size, name, wrapper):
    """How far losses and parameters are from those of one process."""
    module, *data = drawn(name)
    one = Row(module)
    wanted = trained(one, *data)
    model = Row(drawn(name)[0])
    mesh = init_device_mesh("cpu", (size,))
    if wrapper == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        from torch.distributed.fsdp import fully_shard

        for layer in model.module if isinstance(model.module, nn.ModuleList) else [model.module]:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    share = BATCH // size
    losses = trained(model, *data, slice(rank * share, (rank + 1) * share))
    torch.distributed.all_reduce(losses)
    found = [x.full_tensor() if hasattr(x, "full_tensor") else x for x in model.parameters()]
    assert any(not torch.equal(x, before) for x, before in zip(found, drawn(name)[0].parameters(), strict=True))
    pairs = [(losses / size, wanted), *zip(found, one.parameters(), strict=True)]
    return [(mine - one).abs().max().item() for mine, one in pairs]


@pytest.mark.parametrize("wrapper", ["fsdp2", "ddp"])
@pytest.mark.parametrize("name", modules())
def test_losses_and_parameters_are_those_of_one_process(pools, name, wrapper):
    for found in pools(2).run(differences, name, wrapper):
        assert all(x < TOLERANCE for x in found), found
