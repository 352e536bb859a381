"""What else calls over several processes promise: packed sequences, weights, 16 bits, groups, transforms, modules."""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import fusedattn as fa
from fusedattn import distributed, reference
from fusedattn.testing.compare import in_float64
from fusedattn.testing.tolerance import verdicts

from .cases import Case, leaves, run, whole_and_shard
from .test_methods import TOLERANCE

METHODS = ("ring_attention", "gather_attention", "ulysses_attention")
OFFSETS = 0, 9, 9, 10, 24, 24, 37  # of documents that no shard of 37 rows ends with


# Packed sequences
def varlen_inputs(with_options):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    n, longest = len(OFFSETS) - 1, 14
    tensors = dict(query=normal(37, 4, 8), key=normal(37, 2, 8), value=normal(37, 2, 6))
    dims = dict.fromkeys(tensors, 0)
    if with_options:
        tensors |= dict(bias=normal(n, 4, longest, longest), alibi_slopes=normal(n, 4).abs(), sinks=normal(4))
        tensors |= dict(mask=torch.rand(1, 4, longest, longest, generator=generator) > 0.2)
        tensors |= {name: torch.rand(37, generator=generator) > 0.2 for name in ("key_mask", "query_mask")}
        dims |= dict(bias=None, alibi_slopes=None, sinks=None, mask=None, key_mask=0, query_mask=0)
    return tensors, dims, normal(37, 4, 6), normal(4, 37)


def varlen_differences(rank, size, balance, with_options, options):
    tensors, dims, grad_out, grad_lse = varlen_inputs(with_options)
    offsets = torch.tensor(OFFSETS, dtype=torch.int32)
    of_one = functools.partial(_packed, fa.attention_varlen, offsets, offsets)
    wanted = run(of_one, tensors, (grad_out, grad_lse), options | dict(backend="naive"))

    def cut(x, dim):
        return x if dim is None else distributed.shard(x, dim, balance=balance)

    shards = {name: cut(x, dims[name]) for name, x in tensors.items()}
    of_many = functools.partial(_packed, distributed.gather_attention_varlen, offsets)
    found = run(of_many, shards, (cut(grad_out, 0), cut(grad_lse, 1)), options | dict(balance=balance))
    if "bias" in tensors:  # whose gradient is that of the rank's own rows
        found["grad of bias"] = sum_of(found["grad of bias"])
    places = dict(out=0, lse=1) | {f"grad of {name}": dim for name, dim in dims.items()}
    return {name: largest(cut(want, places[name]), found[name]) for name, want in wanted.items()}


def _packed(function, *rest, **options):
    """attention_varlen with its offsets behind the tensors."""
    *offsets, query, key, value = rest
    return function(query, key, value, *offsets, **options)


def sum_of(x):
    total = x.clone()
    dist.all_reduce(total)
    return total


def largest(want, have):
    assert want.shape == have.shape and want.dtype == have.dtype
    same = (want == have) | (want.isnan() & have.isnan())
    return float(torch.where(same, 0.0, (want - have).abs()).max()) if want.numel() else 0.0


VARLEN = {
    "full": (False, {}),
    "causal": (False, dict(causal=True)),
    "window": (True, dict(window=(5, 2))),
    "causal, everything": (True, dict(causal=True, softcap=2.0, dropout_p=0.2, seed=3)),
}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("balance", [None, "zigzag"])
@pytest.mark.parametrize("name", VARLEN)
def test_documents_may_be_cut_anywhere(pools, size, balance, name):
    for found in pools(size).run(varlen_differences, balance, *VARLEN[name]):
        assert all(difference < TOLERANCE for difference in found.values()), found


# Weights
def weights_differences(rank, size, case):
    tensors, dims = case.draw(torch.float64)
    generator = torch.Generator().manual_seed(2)
    shape = *tensors["query"].shape[:3], tensors["key"].shape[2]
    grad = torch.randn(*shape, generator=generator, dtype=torch.float64)

    def attend(function, tensors, grad, **options):
        inputs = leaves(tensors)
        query, key, value = (inputs[name] for name in ("query", "key", "value"))
        rest = {name: x for name, x in inputs.items() if name not in ("query", "key", "value")}
        out, lse, weights = function(
            query, key, value, **rest, **case.options, return_lse=True, return_weights=True, **options
        )
        (weights * grad).sum().backward()
        results = dict(out=out.detach(), lse=lse.detach(), weights=weights.detach())
        return results | {f"grad of {name}": x.grad for name, x in inputs.items() if x.grad is not None}

    def cut(x, dim):
        return x if dim is None else distributed.shard(x, dim)

    wanted = attend(fa.attention, tensors, grad, backend="naive")
    shards = {name: cut(x, dims[name]) for name, x in tensors.items()}
    found = attend(distributed.ulysses_attention, shards, cut(grad, 2))
    places = dict(out=2, lse=2, weights=2) | {f"grad of {name}": dim for name, dim in dims.items()}
    return {name: largest(cut(want, places[name]), found[name]) for name, want in wanted.items() if name in found}


@pytest.mark.parametrize("size", [2, 4])
def test_ulysses_returns_the_weights_of_the_rows_of_a_rank(pools, size):
    case = Case("weights", dict(causal=True, dropout_p=0.2, seed=1), ("bias", "alibi_slopes", "sinks", "key_mask"))
    for found in pools(size).run(weights_differences, case):
        assert {"out", "lse", "weights", "grad of query", "grad of bias", "grad of sinks"} <= found.keys()
        assert all(difference < TOLERANCE for difference in found.values()), found


# 16 bits
def errors_of_16_bits(rank, size, method, balance, dtype):
    """{name: why it breaks the rule of one machine, or ""}, and the mean errors, of the whole put together."""
    case = Case("16 bits", dict(causal=True), (), rows=256, columns=(32, 32), heads=(8, 8 if size == 8 else 2))
    _, found, places = whole_and_shard(case, method, dtype, balance)
    more = {} if balance is None else dict(balance=balance)
    got = {name.removeprefix("grad of "): distributed.unshard(x, places[name], **more) for name, x in found.items()}
    tensors, _ = case.draw(dtype)
    generator = torch.Generator().manual_seed(1)
    shape = (*tensors["query"].shape[:3], tensors["value"].shape[3])
    grad_out = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    grad_lse = torch.randn(shape[:3], generator=generator, dtype=torch.float64).float()

    def of_one(function, tensors, incoming):
        found = run(function, tensors, incoming, case.options)
        return {name.removeprefix("grad of "): x for name, x in found.items()}

    eager = of_one(reference.eager, tensors, (grad_out, grad_lse))
    oracle = of_one(reference.attention, in_float64(tensors), (grad_out.double(), grad_lse.double()))
    verdict = verdicts(got, eager, oracle)
    return {name: (each.why, each.mean_error) for name, each in verdict.items()}


def test_16_bits_are_as_right_on_any_number_of_ranks(pools):
    """No partial result is rounded: errors do not grow with the number of ranks. One test, so that 8 start once."""
    for method in METHODS:
        balance, errors = None if method == "ulysses_attention" else "zigzag", {}
        for size in (2, 4, 8):
            found, *_ = pools(size).run(errors_of_16_bits, method, balance, torch.bfloat16)
            assert not any(why for why, _ in found.values()), (method, size, found)
            errors[size] = {name: error for name, (_, error) in found.items()}
        if method != "ulysses_attention":  # which has other heads with 8
            names = "out", "query", "key", "value"
            assert all(errors[8][name] < 1.05 * errors[2][name] + 1e-7 for name in names), (method, errors)


# Groups
def in_a_subgroup(rank, size, method):
    """Ranks 3, 1 of four: not those of the default group."""
    group = dist.new_group([1, 3])
    if rank in (1, 3):
        wanted, found, _ = whole_and_shard(Case("subgroup", dict(causal=True)), method, torch.float64, None, group)
        return max(largest(wanted[name], found[name]) for name in wanted)
    with pytest.raises(ValueError, match="^group: expected a group that this process is a member of"):
        distributed.positions(4, group=group)
    return 0.0


@pytest.mark.parametrize("method", METHODS)
def test_ranks_within_a_group_are_not_those_of_all(pools, method):
    assert max(pools(4).run(in_a_subgroup, method)) < TOLERANCE


def in_a_mesh(rank, size):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence"))
    with pytest.raises(ValueError, match="^group: expected a DeviceMesh of one dimension"):
        distributed.positions(4, group=mesh)
    case, group = Case("mesh", dict(causal=True)), mesh["sequence"]
    wanted, found, _ = whole_and_shard(case, "ring_attention", torch.float64, "zigzag", group)
    return max(largest(wanted[name], found[name]) for name in wanted)


def test_a_mesh_of_one_dimension_is_a_group(pools):
    assert max(pools(4).run(in_a_mesh)) < TOLERANCE


# What surrounds a call
def draw(rank, size):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 4, 24, 8, generator=generator, dtype=torch.float64) for _ in range(3)]


def shards_of(tensors, requires_grad=True):
    return [distributed.shard(x, 2).requires_grad_(requires_grad) for x in tensors]


def without_gradients(rank, size, method):
    tensors = draw(rank, size)
    attend = getattr(distributed, method)
    with torch.no_grad():
        out = attend(*shards_of(tensors), causal=True)
    assert not out.requires_grad
    assert not attend(*shards_of(tensors, False), causal=True).requires_grad
    return largest(distributed.shard(fa.attention(*tensors, causal=True), 2), out)


def with_a_checkpoint(rank, size, method):
    """Bit for bit the gradients without, dropout without a seed included."""
    attend = functools.partial(getattr(distributed, method), causal=True, dropout_p=0.3)
    found = []
    for again in (False, True):
        torch.manual_seed(rank)
        inputs = shards_of(draw(rank, size))
        out = checkpoint(attend, *inputs, use_reentrant=False) if again else attend(*inputs)
        out.square().sum().backward()
        found.append([out.detach(), *(x.grad for x in inputs)])
    return all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def compiled(rank, size, method):
    attend = getattr(distributed, method)

    def double(*inputs):
        return attend(*(x * 2 for x in inputs), causal=True) * 3

    found = []
    for function in (double, torch.compile(double, backend="aot_eager")):
        inputs = shards_of(draw(rank, size))
        out = function(*inputs)
        out.square().sum().backward()
        found.append([out.detach(), *(x.grad for x in inputs)])
    return max(largest(a, b) for a, b in zip(*found, strict=True))


def with_one_seed(rank, size, method):
    """Without a seed that of rank 0 is everyone's, and the next call has another."""
    tensors, attend = draw(rank, size), getattr(distributed, method)
    torch.manual_seed(100 + rank)
    outs = [attend(*shards_of(tensors, False), dropout_p=0.3) for _ in range(2)]
    torch.manual_seed(100)
    wanted = [distributed.shard(fa.attention(*tensors, dropout_p=0.3), 2) for _ in range(2)]
    assert not torch.equal(*outs)
    return max(largest(a, b) for a, b in zip(outs, wanted, strict=True))


def some_want_gradients(rank, size, method):
    """Rank 0 wants those of key and slopes alone, the last one those of query and sinks, the others none."""
    tensors = dict(zip(("query", "key", "value"), draw(rank, size), strict=True))
    tensors |= dict(alibi_slopes=torch.rand(4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))
    tensors |= dict(sinks=torch.zeros(4, dtype=torch.float64))
    if method != "ring_attention":
        tensors |= dict(bias=torch.randn(24, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(2)))
    whole = leaves(tensors)
    grad = torch.randn(tensors["query"].shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    fa.attention(**whole, causal=True).backward(grad)
    dims = dict(query=2, key=2, value=2, bias=0)

    def cut(name, x):
        return distributed.shard(x, dims[name]) if name in dims else x

    inputs = {name: cut(name, x).detach().clone() for name, x in tensors.items()}
    wanted = {0: ("key", "alibi_slopes", "bias"), size - 1: ("query", "sinks")}.get(rank, ())
    for name in wanted:
        if name in inputs:
            inputs[name].requires_grad_()
    getattr(distributed, method)(**inputs, causal=True).backward(distributed.shard(grad, 2))
    assert all((x.grad is None) == (name not in wanted) for name, x in inputs.items())
    return max([0.0, *(largest(cut(name, whole[name].grad), inputs[name].grad) for name in wanted if name in inputs)])


def some_results_are_used(rank, size, method):
    """The loss of rank 0 is of output and lse, that of the others of the output alone, or of nothing but lse."""
    whole = [x.requires_grad_() for x in draw(rank, size)]
    out, lse = fa.attention(*whole, causal=True, return_lse=True)
    rows = distributed.positions(24)
    first = distributed.shards.chunks(24, size, None)[0][0]
    (out.sum() + lse[:, :, first.first : first.last].sum()).backward()
    inputs = shards_of(draw(rank, size))
    out, lse = getattr(distributed, method)(*inputs, causal=True, return_lse=True)
    (out.sum() + lse.sum() if rank == 0 else out.sum()).backward()
    assert len(rows) == inputs[0].shape[2]
    return max(largest(distributed.shard(a.grad, 2), b.grad) for a, b in zip(whole, inputs, strict=True))


def what_changes_in_place(rank, size, method):
    """A seed may, and what hides may not: as for one process."""
    inputs, attend = shards_of(draw(rank, size)), getattr(distributed, method)
    seed, wanted = torch.tensor([5]), None
    for step in (0, 3):
        for x in inputs:
            x.grad = None
        out = attend(*inputs, dropout_p=0.4, seed=seed)
        seed.add_(step)
        out.square().sum().backward()
        found = [x.grad.clone() for x in inputs]
        wanted = found if wanted is None else wanted
    mask = torch.ones(2, inputs[1].shape[2], dtype=torch.bool)
    mask[:, 0] = False
    out = attend(*inputs, key_mask=mask)
    mask.zero_()
    if method == "ulysses_attention":  # which has got that of all keys
        out.sum().backward()
        return max(largest(a, b) for a, b in zip(wanted, found, strict=True))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    return max(largest(a, b) for a, b in zip(wanted, found, strict=True))


def tangents(rank, size, method):
    """They are refused, on every rank, and nothing is sent."""
    inputs, attend = shards_of(draw(rank, size), False), getattr(distributed, method)
    with pytest.raises((NotImplementedError, ValueError), match="no derivative in forward mode"):
        with torch.autograd.forward_ad.dual_level():
            attend(torch.autograd.forward_ad.make_dual(inputs[0], inputs[0]), *inputs[1:])
    with pytest.raises((NotImplementedError, ValueError), match="torch.func cannot look into"):
        torch.func.jvp(attend, tuple(inputs), tuple(inputs))
    return 0.0


def without_heads(rank, size, method):
    for heads, key_heads in ((0, 0), (0, 2)):
        query, key = (
            torch.randn(2, heads, 6, 8, requires_grad=True),
            torch.randn(2, key_heads, 6, 8, requires_grad=True),
        )
        out = getattr(distributed, method)(query, key, key)
        assert out.shape == (2, 0, 6, 8)
        out.sum().backward()
        assert key.grad is None or not key.grad.any()
    return 0.0


def under_autocast(rank, size, method):
    inputs = [x.float() for x in shards_of(draw(rank, size), False)]
    attend = functools.partial(getattr(distributed, method), causal=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attend(*inputs)
    assert out.dtype == torch.bfloat16
    return largest(attend(*(x.bfloat16() for x in inputs)), out)


def second_order(rank, size, method):
    inputs = shards_of(draw(rank, size))
    out = getattr(distributed, method)(*inputs)
    (grad,) = torch.autograd.grad(out.square().sum(), inputs[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
    return 0.0


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "surrounded",
    [
        *(without_gradients, compiled, with_one_seed, some_want_gradients, some_results_are_used),
        *(what_changes_in_place, tangents, without_heads, under_autocast, second_order),
    ],
    ids=lambda x: x.__name__,
)
def test_calls_within(pools, surrounded, method):
    assert max(pools(2).run(surrounded, method)) < TOLERANCE


@pytest.mark.parametrize("method", METHODS)
def test_a_checkpoint_has_the_same_bits(pools, method):
    assert all(pools(2).run(with_a_checkpoint, method))


@pytest.mark.parametrize("method", [*METHODS, "gather_attention_varlen"])
def test_without_a_group_it_is_attention(method):
    attend = getattr(distributed, method)
    if method.endswith("varlen"):
        inputs, offsets = [torch.randn(10, 2, 8) for _ in range(3)], torch.tensor([0, 4, 10], dtype=torch.int32)
        wanted = fa.attention_varlen(*inputs, offsets, offsets, causal=True, return_lse=True)
        found = attend(*inputs, offsets, causal=True, return_lse=True)
    else:
        inputs = [torch.randn(1, 2, 10, 8) for _ in range(3)]
        wanted = fa.attention(*inputs, causal=True, return_lse=True)
        found = attend(*inputs, causal=True, return_lse=True)
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))


# Shards
def put_together(rank, size, balance):
    x = torch.arange(37.0 * 3).view(37, 3).requires_grad_()
    own = distributed.shard(x, 0, balance=balance)
    places = distributed.positions(37, balance=balance)
    assert torch.equal(own, x[places])
    whole = distributed.unshard(own, 0, balance=balance)
    (whole * (rank + 1)).sum().backward()
    assert torch.equal(whole, x)
    wanted = torch.zeros_like(x)
    wanted[places] = sum(range(1, size + 1))
    assert torch.equal(x.grad, wanted)
    return places.tolist()


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("balance", [None, "zigzag"])
def test_shards_make_the_whole(pools, size, balance):
    places = pools(size).run(put_together, balance)
    assert sorted(sum(places, [])) == list(range(37))
    if balance is None:
        assert sum(places, []) == list(range(37)) and [len(some) for some in places][0] == -(-37 // size)


# Modules
def in_a_module(rank, size, method, balance):
    torch.manual_seed(0)
    layer = fa.MultiHeadAttention(32, 4, num_kv_heads=2, causal=True, dtype=torch.float64)
    alone = copy.deepcopy(layer)
    layer.context_parallel = distributed.ContextParallel(method, balance=balance)
    x = torch.randn(2, 21, 32, dtype=torch.float64)
    wanted, _ = alone(x)
    wanted.square().sum().backward()
    found, _ = layer(distributed.shard(x, 1, balance=balance))
    found.square().sum().backward()
    pairs = zip(layer.parameters(), alone.parameters(), strict=True)
    return max(
        largest(distributed.shard(wanted, 1, balance=balance), found),
        *(largest(b.grad, sum_of(a.grad)) for a, b in pairs),
    )


@pytest.mark.parametrize("method, balance", [("ring", "zigzag"), ("gather", None), ("ulysses", None)])
def test_a_module_attends_over_shards(pools, method, balance):
    assert max(pools(2).run(in_a_module, method, balance)) < TOLERANCE


def test_a_copy_of_a_module_has_the_group():
    """Which cannot be copied itself."""
    group = torch.nn.Module()  # nothing of it is asked here
    group.__deepcopy__ = group.__reduce_ex__ = lambda *given: pytest.fail("the group was copied")
    layer = fa.MultiHeadAttention(8, 2, context_parallel=distributed.ContextParallel("ring", group))
    assert copy.deepcopy(layer).context_parallel.group is group


def test_a_module_takes_no_other_context():
    with pytest.raises(TypeError, match="^context_parallel: expected a ContextParallel or None, got str"):
        fa.MultiHeadAttention(8, 2, context_parallel="ring")
    with pytest.raises(ValueError, match="^context_parallel: expected a method among ring, gather, ulysses"):
        fa.MultiHeadAttention(8, 2, context_parallel=distributed.ContextParallel("star"))
    with pytest.raises(ValueError, match="^context_parallel: expected no balance with 'ulysses'"):
        fa.MultiHeadAttention(8, 2, context_parallel=distributed.ContextParallel("ulysses", balance="zigzag"))
    layer = fa.MultiHeadAttention(8, 2, context_parallel=distributed.ContextParallel("ring"))
    with pytest.raises(NotImplementedError, match="^mask: 'ring' of context_parallel cannot take it"):
        layer(torch.randn(1, 3, 8), mask=torch.ones(3, 3, dtype=torch.bool))
    layer.context_parallel = distributed.ContextParallel("star")
    with pytest.raises(ValueError, match="^context_parallel: expected a method among ring, gather, ulysses"):
        layer(torch.randn(1, 3, 8))
