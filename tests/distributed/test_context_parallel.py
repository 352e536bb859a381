"""Tests torch's own context_parallel, whose ring calls our operators if the provider replaces torch's."""

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

import fusedattn as fa

from ..close import assert_like
from ..inside import interpreted, provider_on_cpu
from .conftest import on_ranks


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
