"""Tests torch's own parallelism: parallelize_module splits heads, FSDP2 and DDP batches, and context_parallel rows."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

import fusedattn as fa

from ..close import assert_like
from ..inside import interpreted, provider_on_cpu
from .conftest import on_ranks

TOLERANCE = 1e-12
WIDTH, HEADS = 32, 4
MODULES = dict(
    attention=lambda: fa.MultiHeadAttention(WIDTH, HEADS, causal=True),
    grouped=lambda: fa.MultiHeadAttention(WIDTH, HEADS, num_kv_heads=2, head_dim=6, value_head_dim=10, bias=False),
    layer=lambda: fa.layers.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, 0.0),
    encoder=lambda: fa.layers.TransformerEncoder(2, WIDTH, HEADS, 2 * WIDTH, 0.0),
)
# (module, whether activations are plain tensors instead of DTensors, whether the module is compiled)
CASES = [(name, local, False) for name in MODULES for local in (True, False)]
CASES += [("attention", True, True), ("grouped", False, True), ("layer", False, True), ("encoder", True, True)]


def parallel(module, size, local=True):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    columns, rows = ("q_proj", "k_proj", "v_proj", "linear_1"), ("out_proj", "linear_2")
    plan = {f"*{name}": ColwiseParallel(use_local_output=local) for name in columns}
    plan |= {f"*{name}": RowwiseParallel() for name in rows}
    every = [name for name, _ in module.named_modules()]
    plan = {name: plan[f"*{last}"] for name in every if f"*{(last := name.rpartition('.')[2])}" in plan}
    return parallelize_module(copy.deepcopy(module), init_device_mesh("cpu", (size,)), plan)


@on_ranks(2)
@pytest.mark.parametrize("name, local, compiled", CASES)
@pytest.mark.one_in(3)
def test_outputs_and_gradients_are_those_of_one_process(rank, size, name, local, compiled):
    one, x = MODULES[name]().double(), torch.randn(2, 7, WIDTH, dtype=torch.float64, requires_grad=True)
    cut, mine = parallel(one, size, local), x.detach().clone().requires_grad_()
    found, wanted = (torch.compile(cut, backend="aot_eager", fullgraph=True) if compiled else cut)(mine), one(x)
    found, wanted = (y[0] if isinstance(y, tuple) else y for y in (found, wanted))
    for y in (found, wanted):
        y.square().sum().backward()
    grads = [y.grad.full_tensor() if hasattr(y.grad, "full_tensor") else y.grad for y in cut.parameters()]
    same = [found, mine.grad, *grads], [wanted, x.grad, *(y.grad for y in one.parameters())]
    torch.testing.assert_close(*same, rtol=0, atol=TOLERANCE)


@on_ranks(2)
@pytest.mark.parametrize("wrapper", ["fsdp2", "ddp"])
@pytest.mark.parametrize("name", ["grouped", "encoder"])
def test_modules_are_trained_by_parts_of_the_batch_as_by_one_process(rank, size, name, wrapper):
    from torch.distributed.fsdp import fully_shard

    one, x = MODULES[name]().double(), torch.randn(2 * size, 7, WIDTH, dtype=torch.float64)
    key_mask = torch.arange(7) < torch.tensor([7, 5, 1, 4])[:, None]
    model = copy.deepcopy(one)
    if wrapper == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model)
    else:
        for part in (*getattr(model, "layers", ()), model):
            fully_shard(part, mesh=init_device_mesh("cpu", (size,)))
    before = next(one.parameters()).clone()
    for module, batches in ((one, slice(None)), (model, slice(2 * rank, 2 * rank + 2))):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)  # Adam would amplify rounding
        for _ in range(2):
            out = module(x[batches], key_mask=key_mask[batches])
            (out[0] if isinstance(out, tuple) else out).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    found = [y.full_tensor() if hasattr(y, "full_tensor") else y for y in model.parameters()]
    assert not torch.equal(found[0], before)
    torch.testing.assert_close(found, [*one.parameters()], rtol=0, atol=TOLERANCE)


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


@interpreted
@on_ranks(2)
def test_the_operators_of_the_provider_run_inside_torchs_ring(rank, size):
    """The provider's operators in torch's ring give the results and gradients of one process.

    On a CPU torch lacks these operators and its attention never calls them, so the test calls them by name.
    """
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.experimental import context_parallel

    ours = provider_on_cpu(lambda name, key: None)
    mesh = init_device_mesh("cpu", (size,))
    whole = [torch.randn(1, heads, 8 * size, 16).half() for heads in (2, 2, 2, 2)]
    *inputs, given = (x.clone() for x in whole)

    def in_one_process():
        leaves = [x.detach().requires_grad_() for x in inputs]
        out = fa.reference.eager(*leaves, causal=True)
        results = out, *torch.autograd.grad(out, leaves, given)
        return [fa.distributed.shard(x.detach(), 2, balance="zigzag") for x in results]

    with context_parallel(mesh, buffers=whole, buffer_seq_dims=[2] * 4):
        *shards, grad = (DTensor.from_local(x.clone(), mesh, [Shard(2)], run_check=False) for x in whole)
        shards = [x.requires_grad_() for x in shards]
        out = torch.ops.aten._scaled_dot_product_flash_attention(*shards, 0.0, True)[0]
        out.backward(grad)
        found = [x.to_local() for x in (out, *(x.grad for x in shards))]
    ours.remove()
    assert_like(found, in_one_process)


@on_ranks(2)
def test_where_torchs_function_is_ours_a_shard_is_not_taken_for_the_whole(rank, size):
    from torch.distributed.tensor.experimental import context_parallel

    mesh, whole = init_device_mesh("cpu", (size,)), torch.randn(1, 2, 8 * size, 16)
    with context_parallel(mesh, buffers=[whole], buffer_seq_dims=[2]), fa.compat.torch.sdpa():
        with pytest.raises(ValueError, match="^query: "):
            F.scaled_dot_product_attention(whole, whole, whole, is_causal=True)
