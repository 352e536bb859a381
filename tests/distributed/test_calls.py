"""Tests calls of several processes: groups, seeds, gradients, checkpoints, modules and shards."""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

import fusedattn as fa
from fusedattn import distributed
from fusedattn.testing.compare import with_gradients

from ..cases import Case
from ..inside import Seen
from .conftest import on_ranks
from .whole import METHODS, by_shards, largest, put_together, summed_gradients

TOLERANCE = 1e-11
CASE = Case("24 rows", B=2, Hq=4, Hkv=2, Sq=24, Sk=24, D=8, Dv=8, causal=True, dtype=torch.float64)
each_method = pytest.mark.parametrize("method", METHODS)


def draw():
    tensors, _ = CASE.draw()
    return [tensors[name] for name in ("query", "key", "value")]


def shards(requires_grad=True):
    return [distributed.shard(x, 2).clone().requires_grad_(requires_grad) for x in draw()]


def gradients(function, inputs):
    out = function(*inputs)
    return out.detach(), *torch.autograd.grad(out.square().sum(), inputs)


def assert_equals_one_process(method, group=None, **balance):
    tensors, options = CASE.draw()
    wanted = with_gradients(fa.attention, tensors, options)
    found = summed_gradients(by_shards(method, group=group, **balance), tensors, options, group=group)
    assert largest(found.values(), wanted.values()) < TOLERANCE


@on_ranks(4)
@each_method
def test_ranks_within_a_group_are_not_those_of_all(rank, size, method):
    group = dist.new_group([1, 3])
    if rank in (1, 3):
        assert_equals_one_process(method, group)
    else:
        with pytest.raises(ValueError, match="^group: "):
            distributed.positions(4, group=group)


@on_ranks(4)
def test_a_mesh_of_one_dimension_is_a_group(rank, size):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence"))
    of_rank_3 = DeviceMesh("cpu", [3])
    for wrong in (mesh, mesh if rank == 3 else of_rank_3):
        with pytest.raises(ValueError, match="^group: "):
            distributed.positions(4, group=wrong)
    with pytest.raises(TypeError, match="^group: "):
        distributed.positions(4, group="all")
    assert_equals_one_process("ring_attention", mesh["sequence"].get_group(), balance="zigzag")
    places = distributed.positions(5, group=mesh["sequence"])
    assert torch.equal(places, torch.arange(5).tensor_split(2)[rank % 2])


@on_ranks(2)
@each_method
def test_under_no_grad_and_autocast(rank, size, method):
    attend, tensors = getattr(distributed, method), draw()
    with torch.no_grad():
        out = attend(*shards(), causal=True)
    assert not out.requires_grad and not attend(*shards(False), causal=True).requires_grad
    assert largest([out], [distributed.shard(fa.attention(*tensors, causal=True), 2)]) < TOLERANCE
    inputs = [x.float() for x in shards(False)]
    with torch.autocast("cpu", torch.bfloat16):
        out = attend(*inputs)
    assert out.dtype == torch.bfloat16 and torch.equal(out, attend(*(x.bfloat16() for x in inputs)))


@on_ranks(2)
@each_method
@pytest.mark.one_in(2)
def test_a_checkpoint_has_the_same_bits(rank, size, method):
    attend = functools.partial(getattr(distributed, method), causal=True, dropout_p=0.3)
    found = []
    for function in (attend, functools.partial(checkpoint, attend, use_reentrant=False)):
        torch.manual_seed(rank)
        found.append(gradients(function, shards()))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@on_ranks(2)
@each_method
@pytest.mark.one_in(2)
def test_compiled(rank, size, method):
    def double(*inputs):
        return distributed.unshard(getattr(distributed, method)(*(x * 2 for x in inputs), causal=True), 2) * 3

    compiled = torch.compile(double, backend="aot_eager")
    assert largest(gradients(double, shards()), gradients(compiled, shards())) < TOLERANCE


@on_ranks(2)
@each_method
def test_without_a_seed_that_of_rank_0_is_everyones(rank, size, method):
    torch.manual_seed(100 + rank)
    outs = [getattr(distributed, method)(*shards(False), dropout_p=0.3) for _ in range(2)]
    torch.manual_seed(100)
    wanted = [distributed.shard(fa.attention(*draw(), dropout_p=0.3), 2) for _ in range(2)]
    assert not torch.equal(*outs)
    assert largest(outs, wanted) < TOLERANCE


@on_ranks(4)
@each_method
def test_ranks_may_want_gradients_of_different_inputs(rank, size, method):
    case = CASE._replace(alibi="shared", sinks=True, bias=None if method == "ring_attention" else "rank 2")
    tensors, options = case.draw()
    wanted = with_gradients(fa.attention, tensors, options, "out")
    mine = {0: ("key", "alibi_slopes", "bias"), size - 1: ("query", "sinks")}.get(rank, ())
    dims = dict(query=2, key=2, value=2, bias=0)

    def cut(name, x):
        return distributed.shard(x, dims[name]) if name in dims else x

    inputs = {name: tensors[name] for name in ("query", "key", "value")}
    inputs |= {name: options[name] for name in ("alibi_slopes", "sinks", "bias") if name in options}
    inputs = {name: cut(name, x).clone().requires_grad_(name in mine) for name, x in inputs.items()}
    getattr(distributed, method)(**inputs, causal=True).backward(cut("query", tensors["out"]))
    for name, x in inputs.items():
        assert (x.grad is None) == (name not in mine)
        assert x.grad is None or largest([x.grad], [cut(name, wanted[name])]) < TOLERANCE, name


@on_ranks(2)
@each_method
def test_ranks_may_use_different_results(rank, size, method):
    whole = [x.requires_grad_() for x in draw()]
    out, lse = fa.attention(*whole, causal=True, return_lse=True)
    rows = 24 // size
    wanted = torch.autograd.grad(out.sum() + lse[:, :, :rows].sum(), whole)
    inputs = shards()
    out, lse = getattr(distributed, method)(*inputs, causal=True, return_lse=True)
    found = torch.autograd.grad(out.sum() + lse.sum() if rank == 0 else out.sum(), inputs)
    assert largest(found, [distributed.shard(x, 2) for x in wanted]) < TOLERANCE


@on_ranks(2)
@each_method
def test_what_changes_in_place(rank, size, method):
    """A seed may change in place before the backward; a changed mask raises, unless it was copied."""
    attend, seed, found = getattr(distributed, method), torch.tensor([5]), []
    for step in (0, 3):
        inputs = shards()
        out = attend(*inputs, dropout_p=0.4, seed=seed)
        seed.add_(step)
        found.append(torch.autograd.grad(out.square().sum(), inputs))
    assert largest(*found) < TOLERANCE
    mask = torch.ones(2, inputs[1].shape[2], dtype=torch.bool)
    wanted = gradients(functools.partial(attend, key_mask=mask.clone()), inputs)[1:]
    out = attend(*inputs, key_mask=mask)
    mask.zero_()
    if method == "ulysses_attention":
        assert largest(torch.autograd.grad(out.square().sum(), inputs), wanted) < TOLERANCE
    else:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


@on_ranks(2)
@each_method
def test_no_heads(rank, size, method):
    for key_heads in (0, 2):
        query, key = (torch.randn(2, heads, 6, 8, requires_grad=True) for heads in (0, key_heads))
        out = getattr(distributed, method)(query, key, key)
        out.sum().backward()
        assert out.shape == (2, 0, 6, 8) and (key.grad is None or not key.grad.any())


@on_ranks(2)
def test_the_naive_backward_is_linear_in_the_number_of_documents(rank, size):
    counts = []
    for documents in (16, 128):
        offsets = torch.arange(0, 8 * documents + 1, 8, dtype=torch.int32)
        inputs = [torch.randn(8 * documents // size, 2, 32, requires_grad=True) for _ in range(3)]
        out = distributed.gather_attention_varlen(*inputs, offsets, causal=True, backend="naive")
        with Seen() as seen:
            out.sum().backward()
        counts.append(sum(numel for _, numel, _ in seen.made))
    assert counts[1] < 12 * counts[0], counts  # 8 times as many documents


@on_ranks(2)
@pytest.mark.parametrize("name", [*METHODS, "unshard"])
def test_other_derivatives_are_refused(rank, size, name):
    count = 1 if name == "unshard" else 3
    attend = getattr(distributed, name) if count == 3 else functools.partial(distributed.unshard, dim=2)
    inputs = shards(False)[:count]
    with pytest.raises(NotImplementedError, match="forward mode"), torch.autograd.forward_ad.dual_level():
        attend(torch.autograd.forward_ad.make_dual(inputs[0], inputs[0]), *inputs[1:])
    for transform in (torch.func.jacfwd, torch.func.jacrev, torch.vmap):
        with pytest.raises(NotImplementedError, match="torch.func"):
            transform(attend)(*inputs)
    with pytest.raises(NotImplementedError, match="FakeTensorMode"), FakeTensorMode() as mode:
        attend(*(mode.from_tensor(x) for x in inputs))
    inputs = shards()[:count]
    out = attend(*inputs)
    with pytest.raises(NotImplementedError, match="is_grads_batched"):
        torch.autograd.grad(out, inputs, out.detach().expand(2, *out.shape), is_grads_batched=True, retain_graph=True)
    (grad,) = torch.autograd.grad(out.square().sum(), inputs[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize("method", [*METHODS, "gather_attention_varlen"])
def test_without_a_group_it_is_attention(method):
    attend, inputs, offsets = getattr(distributed, method), [torch.randn(1, 2, 10, 8) for _ in range(3)], ()
    one = fa.attention
    if method.endswith("varlen"):
        one, inputs = fa.attention_varlen, [x[0].transpose(0, 1) for x in inputs]
        offsets = [torch.tensor([0, 4, 10], dtype=torch.int32)]
    wanted = one(*inputs, *offsets, *offsets, causal=True, return_lse=True)
    found = attend(*inputs, *offsets, causal=True, return_lse=True)
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))
    with pytest.raises(TypeError, match="unexpected keyword argument 'masks'"):
        attend(*inputs, *offsets, masks=None)


@on_ranks(4)
@pytest.mark.parametrize("balance", [None, "zigzag"])
def test_shards_make_the_whole(rank, size, balance):
    x = torch.arange(37.0 * 3).view(37, 3).requires_grad_()
    own, places = distributed.shard(x, 0, balance=balance), distributed.positions(37, balance=balance)
    assert torch.equal(own, x[places])
    whole = distributed.unshard(own, 0, balance=balance)
    (whole * (rank + 1)).sum().backward()
    assert torch.equal(whole, x)
    wanted = torch.zeros_like(x)
    wanted[places] = sum(range(1, size + 1))
    assert torch.equal(x.grad, wanted)
    cuts = torch.arange(37).tensor_split(size if balance is None else 2 * size)
    assert torch.equal(places, cuts[rank] if balance is None else torch.cat([cuts[rank], cuts[-1 - rank]]))


@on_ranks(2)
@pytest.mark.parametrize("method, balance", [("ring", "zigzag"), ("gather", None), ("ulysses", None)])
def test_a_module_attends_over_shards(rank, size, method, balance):
    layer = fa.MultiHeadAttention(32, 4, num_kv_heads=2, causal=True, dtype=torch.float64)
    alone, x = copy.deepcopy(layer), torch.randn(2, 21, 32, dtype=torch.float64)
    layer.context_parallel = distributed.ContextParallel(method, balance=balance)
    wanted, _ = alone(x)
    wanted.square().sum().backward()
    shard, _ = layer(distributed.shard(x, 1, balance=balance))
    found = put_together(shard, 1, balance=balance)
    found.square().sum().backward()
    for parameter in layer.parameters():
        dist.all_reduce(parameter.grad)
    grads = ([x.grad for x in module.parameters()] for module in (layer, alone))
    assert largest([found], [wanted]) < TOLERANCE and largest(*grads) < TOLERANCE


def test_a_copy_of_a_module_has_the_same_group():
    group = torch.nn.Module()  # stands for a process group, which must not be copied
    group.__deepcopy__ = group.__reduce_ex__ = lambda *given: pytest.fail("the group was copied")
    layer = fa.MultiHeadAttention(8, 2, context_parallel=distributed.ContextParallel("ring", group))
    assert copy.deepcopy(layer).context_parallel.group is group


def test_what_a_module_cannot_take():
    wrong = {"ring": TypeError, distributed.ContextParallel("star"): ValueError}
    wrong[distributed.ContextParallel("ulysses", balance="zigzag")] = ValueError
    for parallel, error in wrong.items():
        with pytest.raises(error, match="^context_parallel: "):
            fa.MultiHeadAttention(8, 2, context_parallel=parallel)
    x, layer = torch.randn(1, 3, 8), fa.MultiHeadAttention(8, 2, context_parallel=distributed.ContextParallel("ring"))
    with pytest.raises(NotImplementedError, match="^mask: .*'gather' or 'ulysses'"):
        layer(x, mask=torch.ones(3, 3, dtype=torch.bool))
    with pytest.raises(NotImplementedError, match="^need_weights: .*method 'ulysses'"):
        layer(x, need_weights=True)
    layer.context_parallel = distributed.ContextParallel("star")
    with pytest.raises(ValueError, match="^context_parallel: "):
        layer(x)
