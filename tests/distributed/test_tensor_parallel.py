"""Tests torch's parallelize_module, which splits the heads of modules over two processes."""

import copy

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import fusedattn as fa

from ..close import assert_like
from .conftest import on_ranks

TOLERANCE = 1e-12
WIDTH, HEADS = 32, 4
MODULES = dict(
    attention=lambda: fa.MultiHeadAttention(WIDTH, HEADS, causal=True),
    grouped=lambda: fa.MultiHeadAttention(WIDTH, HEADS, num_kv_heads=2, head_dim=6, value_head_dim=10, bias=False),
    layer=lambda: fa.layers.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, 0.0),
    encoder=lambda: fa.layers.TransformerEncoder(2, WIDTH, HEADS, 2 * WIDTH, 0.0),
)


def parallel(module, size, local=True):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    columns, rows = ("q_proj", "k_proj", "v_proj", "linear_1"), ("out_proj", "linear_2")
    plan = {f"*{name}": ColwiseParallel(use_local_output=local) for name in columns}
    plan |= {f"*{name}": RowwiseParallel() for name in rows}
    every = [name for name, _ in module.named_modules()]
    plan = {name: plan[f"*{last}"] for name in every if f"*{(last := name.rpartition('.')[2])}" in plan}
    return parallelize_module(copy.deepcopy(module), init_device_mesh("cpu", (size,)), plan)


@on_ranks(2)
@pytest.mark.parametrize("local, compiled", [(True, False), (False, False), (True, True)])
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.one_in(3)
def test_outputs_and_gradients_are_those_of_one_process(rank, size, name, local, compiled):
    one, x = MODULES[name]().double(), torch.randn(2, 7, WIDTH, dtype=torch.float64, requires_grad=True)
    cut, mine = parallel(one, size, local), x.detach().clone().requires_grad_()
    found, wanted = (torch.compile(cut, backend="aot_eager") if compiled else cut)(mine), one(x)
    found, wanted = (y[0] if isinstance(y, tuple) else y for y in (found, wanted))
    for y in (found, wanted):
        y.square().sum().backward()
    grads = [y.grad.full_tensor() if hasattr(y.grad, "full_tensor") else y.grad for y in cut.parameters()]
    same = [found, mine.grad, *grads], [wanted, x.grad, *(y.grad for y in one.parameters())]
    torch.testing.assert_close(*same, rtol=0, atol=TOLERANCE)


@on_ranks(2)
def test_weights_and_masks_are_of_the_heads_of_the_process(rank, size):
    one, x = fa.MultiHeadAttention(WIDTH, HEADS), torch.randn(2, 7, WIDTH)
    own, seen = slice(rank * HEADS // size, (rank + 1) * HEADS // size), torch.rand(2, HEADS, 7, 7) > 0.3
    found = parallel(one, size)(x, mask=seen[:, own], need_weights=True)

    def wanted(one):
        out, weights = one(x, mask=seen, need_weights=True)
        return out, weights[:, own]

    assert_like(found, wanted, one)


@on_ranks(2)
def test_heads_that_processes_do_not_divide_are_refused(rank, size):
    x = torch.randn(2, 7, WIDTH)
    for local in (True, False):
        with pytest.raises(ValueError, match="^num_heads: .* 3"):
            parallel(fa.MultiHeadAttention(WIDTH, 3, head_dim=8), size, local)(x)
        with pytest.raises(ValueError, match="^num_kv_heads: .* 1"):
            parallel(fa.MultiHeadAttention(WIDTH, HEADS, num_kv_heads=1), size, local)(x)
    whole = parallel(fa.MultiHeadAttention(WIDTH, HEADS, num_kv_heads=2), size)
    whole.k_proj, whole.v_proj = (torch.nn.Linear(WIDTH, 16) for _ in range(2))
    with pytest.raises(ValueError, match="^num_kv_heads: "):
        whole(x)
    with pytest.raises(ValueError, match="^q_proj: .* 32 .* 16"):
        parallel(fa.SelfAttention(WIDTH), size)(x)
