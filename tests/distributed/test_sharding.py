"""DTensors that are sharded on batch or heads: each rank computes its part, nothing is sent, and no answer is wrong."""

import itertools
import os
import re
import subprocess
import sys

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import fusedattn as fa
from fusedattn.call.form import Call
from fusedattn.distributed.sharding import register_sharding
from fusedattn.operators.namespace import OPERATORS

B, SQ, SK, D = 3, 9, 7, 16  # of batches rank 0 has two of three
TOLERANCE = 1e-13
BATCH, HEADS, SAME = "Shard(0)", "Shard(1)", "Replicate()"
# {option: (shape, its placement where batches are sharded, and where heads are)}
OPTIONS = dict(
    bias=((B, 4, SQ, SK), BATCH, HEADS),
    shared_bias=((1, 1, SQ, SK), SAME, SAME),
    mask=((1, 4, SQ, SK), SAME, HEADS),
    key_mask=((B, SK), BATCH, SAME),
    query_mask=((B, SQ), SAME, SAME),  # which is cut where batches are
    alibi_slopes=((B, 4), BATCH, HEADS),
    sinks=((4,), SAME, BATCH),
)
CASES = {
    "plain": ((), {}),
    "causal window": ((), dict(causal=True, window=(4, None))),
    "top left": ((), dict(causal=True, align="top_left", softcap=3.0)),
    "masks": (("mask", "key_mask", "query_mask"), {}),
    "learned": (("bias", "alibi_slopes", "sinks"), dict(causal=True)),
    "one for all": (("shared_bias", "query_mask"), {}),
    "dropout": ((), dict(dropout_p=0.4, seed=7, causal=True)),
    "weights": ((), dict(causal=True, return_weights=True)),
}


def placement(name):
    from torch.distributed.tensor import Replicate, Shard

    return eval(name, dict(Shard=Shard, Replicate=Replicate))  # noqa: S307


def distributed(x, *names, mesh=None):
    from torch.distributed.tensor import distribute_tensor

    mesh = init_device_mesh("cpu", (2,)) if mesh is None else mesh
    made = distribute_tensor(x.detach(), mesh, [placement(name) for name in names])
    return made.requires_grad_(x.requires_grad)


def drawn(heads, key_heads, options=()):
    """{name: a tensor of all ranks}, in float64 with a gradient, or bool."""
    generator = torch.Generator().manual_seed(0)
    shapes = dict(query=(B, heads, SQ, D), key=(B, key_heads, SK, D), value=(B, key_heads, SK, D))
    shapes |= {name: OPTIONS[name][0] for name in options}
    made = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    return {name: x > -0.5 if "mask" in name else x.requires_grad_() for name, x in made.items()}


# Its DTensors gather gradients of uneven shards, whose strides it reckons as those of even ones.
OLDEST = torch.__version__ < (2, 11)


def largest(pairs):
    """The largest difference of DTensors from tensors of one process; NaN if one is."""
    differences = [torch.where(mine.full_tensor() == one, 0.0, (mine.full_tensor() - one).abs()) for mine, one in pairs]
    return torch.stack([x.max() for x in differences]).max().item()


def called(tensors, options):
    return fa.attention(**{name.removeprefix("shared_"): x for name, x in tensors.items()}, return_lse=True, **options)


def differences(rank, size, tensors, places, options, compiled=False):
    """How far results and gradients are from those of one process; what is sent meanwhile must be nothing."""
    from torch.distributed.tensor.debug import CommDebugMode

    wanted = called(tensors, options)
    grads = [torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=x.dtype) for x in wanted]
    torch.autograd.backward(wanted, grads)
    ours = {name: distributed(x, places[name]) for name, x in tensors.items()}
    cut = HEADS if HEADS in (places["query"], places["key"]) else places["query"]
    our_grads = [distributed(x, cut) for x in grads]
    if compiled:
        torch._dynamo.reset()
        found = torch.compile(called, backend="aot_eager", fullgraph=True)(ours, options)
        torch.autograd.backward(found, our_grads)
    else:
        with CommDebugMode() as sent:
            found = called(ours, options)
            torch.autograd.backward(found, our_grads)
        uneven = cut == HEADS and tensors["query"].shape[1] % size != 0
        assert sent.get_total_counts() == 0 or (uneven and OLDEST), sent.get_comm_counts()
    assert all(x.placements == (placement(cut),) for x in found)
    assert [x.stride() for x in found] == [x.stride() for x in wanted]
    pairs = [*zip(found, wanted, strict=True)]
    pairs += [(ours[name].grad, x.grad) for name, x in tensors.items() if x.requires_grad]
    return largest(pairs)


def case(rank, size, name, where, backend=None, compiled=False):
    extra, options = CASES[name]
    places = {option: OPTIONS[option][1 + (where == HEADS)] for option in extra}
    places |= dict.fromkeys(("query", "key", "value"), where)
    return differences(rank, size, drawn(4, 2, extra), places, options | dict(backend=backend), compiled)


@pytest.mark.parametrize("backend", [None, "naive"])
@pytest.mark.parametrize("where", [BATCH, HEADS])
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_one_process_and_nothing_is_sent(pools, name, where, backend):
    assert all(x < TOLERANCE for x in pools(2).run(case, name, where, backend))


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="on the CPU kernels need TRITON_INTERPRET=1")
@pytest.mark.parametrize("name, where", [("dropout", HEADS), ("learned", BATCH)])
def test_kernels(pools, name, where):
    assert all(x < TOLERANCE for x in pools(2).run(case, name, where, "triton"))


_REFUSED = pytest.mark.skipif(OLDEST, reason="the compiler of torch 2.10 takes Shard for another class: it is refused")


@pytest.mark.parametrize("name", ["dropout", pytest.param("learned", marks=[pytest.mark.matrix, _REFUSED])])
def test_compiled(pools, name):
    assert all(x < TOLERANCE for x in pools(2).run(case, name, HEADS, None, True))


def with_heads(rank, size, heads, key_heads, where, key_where):
    places = dict(query=where, key=key_where, value=key_where)
    return differences(rank, size, drawn(heads, key_heads), places, {})


@pytest.mark.parametrize(
    "heads, key_heads, where, key_where",
    [
        (4, 2, SAME, SAME),
        (5, 5, HEADS, HEADS),  # three and two
        (4, 1, HEADS, SAME),  # one head of keys for all ranks
        (8, 2, HEADS, SAME),
        (4, 2, SAME, HEADS),
        (4, 2, BATCH, SAME),
    ],
)
def test_what_is_replicated_is_cut_and_its_gradient_is_a_partial_sum(pools, heads, key_heads, where, key_where):
    assert all(x < TOLERANCE for x in pools(2).run(with_heads, heads, key_heads, where, key_where))


def second_derivatives(rank, size):
    def of(tensors):
        (out, _), inputs = called(tensors, dict(causal=True)), list(tensors.values())
        first = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in first), inputs)

    tensors = drawn(4, 2)
    found = of({name: distributed(x, HEADS) for name, x in tensors.items()})
    return largest(zip(found, of(tensors), strict=True))


@pytest.mark.skipif(OLDEST, reason="DTensors of torch 2.10 have no second derivative, and it says so")
def test_second_derivatives(pools):
    assert all(x < 1e-11 for x in pools(2).run(second_derivatives))


def gradients_that_do_not_come(rank, size):
    """(hooks that calls without a gradient leave at a tensor, the gradients of a call whose results get none)"""
    from torch.distributed.tensor import distribute_tensor

    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return None

    mesh = init_device_mesh("cpu", (size,))
    drawn = [torch.randn(1, 2, 4, 8, requires_grad=True) for _ in range(3)]
    inputs = [distribute_tensor(x, mesh, [placement(HEADS)]) for x in drawn]
    for _ in range(2):
        with torch.no_grad():
            fa.attention(*inputs)
    with torch.no_grad():
        left = [len(x.to_local()._backward_hooks or ()) for x in inputs]
    leaves = [distributed(torch.randn(1, 2, 4, 8, requires_grad=True), HEADS) for _ in range(3)]
    found = torch.autograd.grad(Nothing.apply(fa.attention(*leaves)).sum(), leaves, allow_unused=True)
    return left, [x is None or not x.to_local().any() for x in found]


def test_gradients_that_do_not_come_leave_nothing_and_are_none(pools):
    assert all(found == ([0] * 3, [True] * 3) for found in pools(2).run(gradients_that_do_not_come))


def message(rank, size, heads, key_heads, places, options=None):
    """What a call raises."""
    tensors = drawn(heads, key_heads, [name for name in places if name in OPTIONS])
    ours = {name: x if places[name] is None else distributed(x, places[name]) for name, x in tensors.items()}
    try:
        called(ours, options or {})
    except (TypeError, ValueError, NotImplementedError) as error:
        kinds = TypeError, ValueError, NotImplementedError
        return f"{next(kind.__name__ for kind in kinds if isinstance(error, kind))}: {error}"
    return "nothing"


ALL = dict(query=HEADS, key=HEADS, value=HEADS)
REFUSED = [
    ("ValueError: query: .* sequences in shards", 4, 2, dict.fromkeys(ALL, "Shard(2)"), {}),
    ("ValueError: query: .* got .*head_dim.*redistribute", 4, 2, dict.fromkeys(ALL, "Shard(3)"), {}),
    ("ValueError: query: .* got .*head_dim.*redistribute", 4, 2, dict.fromkeys(ALL, "Shard(-1)"), {}),
    ("ValueError: value: .* got .*head_dim.*redistribute", 4, 2, dict(query=SAME, key=SAME, value="Shard(3)"), {}),
    ("ValueError: key:", 4, 2, dict(query=BATCH, key=HEADS, value=HEADS), {}),
    ("ValueError: key:", 6, 3, ALL, {}),
    ("ValueError: key:", 6, 3, dict(query=HEADS, key=SAME, value=SAME), {}),
    ("ValueError: key:", 4, 1, ALL, {}),
    ("TypeError: key:", 4, 2, ALL | dict(key=None), {}),
    ("TypeError: query:", 4, 2, ALL | dict(query=None), {}),
    ("TypeError: sinks:", 4, 2, ALL | dict(sinks=None), {}),
    ("ValueError: key_mask:", 4, 2, ALL | dict(key_mask="Shard(1)"), {}),
    ("ValueError: mask:", 4, 2, dict.fromkeys(ALL, BATCH) | dict(mask=BATCH), {}),
    ("ValueError: bias:", 4, 2, ALL | dict(bias="Shard(2)"), {}),
    ("NotImplementedError: dropout_p: .* seed", 4, 2, ALL, dict(dropout_p=0.5)),
]


@pytest.mark.parametrize("expected, heads, key_heads, places, options", REFUSED)
def test_what_a_rank_cannot_compute_alone_is_refused_on_each(pools, expected, heads, key_heads, places, options):
    for said in pools(2).run(message, heads, key_heads, places, options):
        assert re.match(expected, said), said


def other_functions(rank, size):
    x, offsets = distributed(torch.randn(8, 2, D), SAME), torch.tensor([0, 8], dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="query: .* DTensor"):
        fa.attention_varlen(x, x, x, offsets, offsets)
    x = distributed(torch.randn(1, 2, 8, D), SAME)
    with pytest.raises(NotImplementedError, match="query: .* DTensor"):
        fa.attention_decode(x, x, x, cache_seqlens=torch.tensor([8], dtype=torch.int32))


def test_packed_sequences_and_caches_take_none(pools):
    pools(2).run(other_functions)


def operators(rank, size, key_heads, where, key_where):
    """As `differences`, of the operators by name."""
    from torch.distributed.tensor.debug import CommDebugMode

    register_sharding()
    register_sharding()

    def run(tensors):
        call = Call(**tensors | dict(sinks=tensors["sinks"][None]), right=0, scale=0.25)
        return OPERATORS.forward(*call, True, False, True, "cpu")[:2]

    tensors = drawn(4, key_heads, ("sinks", "key_mask"))
    tensors = {
        name: x[:2].detach().requires_grad_(x.requires_grad) if name != "sinks" else x for name, x in tensors.items()
    }
    places = dict(query=where, key=key_where, value=key_where, sinks=SAME, key_mask=SAME)
    places |= dict(key_mask=BATCH) if where == BATCH else dict(sinks=BATCH) if where == HEADS else {}
    ours = {name: distributed(x, places[name]) for name, x in tensors.items()}
    wanted = run(tensors)
    grads = [torch.ones_like(x) for x in wanted]
    torch.autograd.backward(wanted, grads)
    our_grads = [distributed(x, where) for x in grads]
    with CommDebugMode() as sent:
        found = run(ours)
        torch.autograd.backward(found, our_grads)
    pairs = [*zip(found, wanted, strict=True)]
    pairs += [(ours[name].grad, x.grad) for name, x in tensors.items() if x.requires_grad]
    return largest(pairs), sent.get_total_counts()


@pytest.mark.parametrize(
    "key_heads, where, key_where, sends",
    [(2, BATCH, BATCH, False), (2, HEADS, HEADS, False), (1, HEADS, SAME, False), (2, SAME, SAME, False)]
    + [(2, "Shard(2)", "Shard(2)", True)],
)
def test_the_operators_by_name(pools, key_heads, where, key_where, sends):
    """What they cannot compute as it is sharded, DTensor gathers."""
    for differs, sent in pools(2).run(operators, key_heads, where, key_where):
        assert differs < TOLERANCE
        assert bool(sent) == sends


def on_two_dimensions(rank, size, shape):
    mesh = init_device_mesh("cpu", shape)
    found_by_case = []
    for where, key_where in (((BATCH, HEADS),) * 2, ((HEADS, HEADS), (HEADS, SAME)), ((BATCH, BATCH), (BATCH, SAME))):
        tensors, options = drawn(8, 2), dict(dropout_p=0.3, seed=3, causal=True)
        places = dict(query=where, key=key_where, value=key_where)
        ours = {name: distributed(x, *places[name], mesh=mesh) for name, x in tensors.items()}
        found, wanted = called(ours, options)[0], called(tensors, options)[0]
        wanted.sum().backward()
        found.backward(distributed(torch.ones_like(wanted), *where, mesh=mesh))
        pairs = (found, wanted), *((ours[name].grad, x.grad) for name, x in tensors.items())
        found_by_case.append(largest(pairs))
    return found_by_case


def flags(rank, size):
    register_sharding()
    x = drawn(4, 4)["query"].detach()
    ours, call = distributed(x, HEADS), Call(x, x, x)
    for need_lse, need_weights, save in itertools.product((False, True), repeat=3):
        more = need_lse, need_weights, save, "cpu"
        wanted = OPERATORS.forward(*call, *more)
        found = OPERATORS.forward(*call._replace(query=ours, key=ours, value=ours), *more)
        assert [y.shape for y in found] == [y.shape for y in wanted]
        assert largest((y, z) for y, z in zip(found, wanted, strict=True) if z.numel()) < TOLERANCE


def test_the_operators_are_not_taken_for_others_with_other_flags(pools):
    pools(2).run(flags)


@pytest.mark.parametrize("shape", [(1, 2), (2, 1), pytest.param((2, 2), marks=pytest.mark.matrix)])
def test_a_mesh_of_two_dimensions(pools, shape):
    for found in pools(shape[0] * shape[1]).run(on_two_dimensions, shape):
        assert all(x < TOLERANCE for x in found)


def order_of_dimensions(rank, size):
    query, key, value = (torch.randn(2, n, 4, D, dtype=torch.float64).transpose(1, 2) for n in (SQ, SK, SK))
    wanted = fa.attention(query, key, value)
    found = fa.attention(*(distributed(x, HEADS) for x in (query, key, value)))
    assert found.stride() == wanted.stride()
    packed = distributed(query[:, 0], BATCH)  # of rank 3, one head
    assert fa.attention(packed, packed, packed).shape == packed.shape


def test_the_output_has_the_order_of_dimensions_of_the_query(pools):
    pools(2).run(order_of_dimensions)


def test_who_has_no_dtensor_does_not_import_them():
    code = "import sys, torch, fusedattn; x = torch.ones(1, 1, 4, 16); fusedattn.attention(x, x, x, causal=True)"
    subprocess.run([sys.executable, "-c", f"{code}; sys.exit('torch.distributed.tensor' in sys.modules)"], check=True)
