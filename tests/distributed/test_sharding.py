"""Tests DTensors sharded on batch or heads: each rank computes its part, and nothing is sent."""

from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import fusedattn as fa
from fusedattn.distributed import register_sharding
from fusedattn.operators import dtensors

from ..inside import TRITON, fields
from .conftest import on_ranks

OPERATORS = torch.ops.fusedattn
B, SQ, SK, D = 3, 9, 7, 16  # rank 0 has two of the three batches
TOLERANCE = 1e-12
BATCH, HEADS, SAME = "Shard(0)", "Shard(1)", "Replicate()"
# {option: (shape, placement if batches are sharded, placement if heads are)}
OPTIONS = dict(
    bias=((B, 4, SQ, SK), BATCH, HEADS),
    shared_bias=((1, 1, SQ, SK), SAME, SAME),
    mask=((1, 4, SQ, SK), SAME, HEADS),
    key_mask=((B, SK), BATCH, SAME),
    query_mask=((B, SQ), SAME, SAME),  # cut if batches are sharded
    alibi_slopes=((B, 4), BATCH, HEADS),
    sinks=((4,), SAME, BATCH),
)
CASES = {
    "top left": ((), dict(causal=True, window=(4, None), align="top_left", softcap=3.0)),
    "masks": (("mask", "key_mask", "query_mask"), {}),
    "learned": (("bias", "alibi_slopes", "sinks"), dict(causal=True)),
    "one for all": (("shared_bias", "query_mask"), {}),
    "seed": ((), dict(dropout_p=0.4, seed=7, causal=True)),
    "dropout": ((), dict(dropout_p=0.4)),  # draws a seed
    "weights": ((), dict(causal=True, return_weights=True)),
}
# Torch 2.10 gathers gradients of uneven shards with the strides of even shards.
OLD = torch.__version__ < (2, 12)


def placement(name):
    from torch.distributed.tensor import Replicate, Shard

    return eval(name, dict(Shard=Shard, Replicate=Replicate))


def distributed(x, *names, mesh=None):
    from torch.distributed.tensor import distribute_tensor

    mesh = init_device_mesh("cpu", (2,)) if mesh is None else mesh
    made = distribute_tensor(x.detach(), mesh, [placement(name) for name in names])
    return made.requires_grad_(x.requires_grad)


def drawn(heads, key_heads, options=()):
    generator = torch.Generator().manual_seed(0)
    shapes = dict(query=(B, heads, SQ, D), key=(B, key_heads, SK, D), value=(B, key_heads, SK, D))
    shapes |= {name: OPTIONS[name][0] for name in options}
    made = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    return {name: x > -0.5 if "mask" in name else x.requires_grad_() for name, x in made.items()}


def assert_same(found, wanted):
    for mine, one in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine.full_tensor(), one, rtol=0, atol=TOLERANCE, equal_nan=False)


def called(tensors, options):
    return fa.attention(**{name.removeprefix("shared_"): x for name, x in tensors.items()}, return_lse=True, **options)


def check(tensors, places, options, function=called, compiled=False, sends=0, mesh=None):
    """Compare results and gradients with one process, and check the number of messages."""
    from torch.distributed.tensor.debug import CommDebugMode

    torch.manual_seed(0)  # before both calls: they may draw a seed for dropout
    wanted = function(tensors, options)
    grads = [torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(1)) for x in wanted]
    torch.autograd.backward(wanted, grads)
    ours = {name: distributed(x, *places[name], mesh=mesh) for name, x in tensors.items()}
    cuts = [HEADS if HEADS in both else both[0] for both in zip(places["query"], places["key"], strict=True)]
    our_grads = [distributed(x, *cuts, mesh=mesh) for x in grads]
    torch.manual_seed(0)
    if compiled:
        torch._dynamo.reset()
        found = torch.compile(function, backend="aot_eager", fullgraph=True)(ours, options)
        torch.autograd.backward(found, our_grads)
    else:
        with CommDebugMode() as sent:
            found = function(ours, options)
            torch.autograd.backward(found, our_grads)
        assert sends is None or bool(sent.get_total_counts()) == bool(sends), sent.get_comm_counts()
    if not sends:
        assert all(x.placements == tuple(map(placement, cuts)) for x in found)
        assert [x.stride() for x in found] == [x.stride() for x in wanted]
    assert_same(found, wanted)
    learned = [name for name, x in tensors.items() if x.requires_grad]
    assert_same([ours[name].grad for name in learned], [tensors[name].grad for name in learned])


def check_case(name, where, backend=None, compiled=False):
    extra, options = CASES[name]
    places = {option: (OPTIONS[option][1 + (where == HEADS)],) for option in extra}
    places |= dict.fromkeys(("query", "key", "value"), (where,))
    check(drawn(4, 2, extra), places, options | dict(backend=backend), compiled=compiled)


@on_ranks(2)
@pytest.mark.parametrize("where", [BATCH, HEADS])
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_one_process_and_nothing_is_sent(rank, size, name, where):
    for backend in (None, "naive"):
        check_case(name, where, backend)


@on_ranks(2)
@pytest.mark.parametrize("name", ["dropout", pytest.param("learned", marks=pytest.mark.matrix)])
@pytest.mark.parametrize("backend", [None, TRITON])
def test_compiled_and_by_kernels(rank, size, name, backend):
    check_case(name, BATCH if (name, backend) == ("learned", "triton") else HEADS, backend, compiled=backend is None)


@on_ranks(2)
@pytest.mark.parametrize(
    "heads, key_heads, where, key_where",
    [
        (4, 2, SAME, SAME),
        (5, 5, HEADS, HEADS),  # one rank has three heads, the other two
        (4, 1, HEADS, SAME),  # one kv head, which all ranks use
        (8, 2, HEADS, SAME),
        (4, 2, SAME, HEADS),
        (4, 2, BATCH, SAME),
    ],
)
def test_what_is_replicated_is_cut_and_its_gradient_is_a_partial_sum(rank, size, heads, key_heads, where, key_where):
    places = dict(query=(where,), key=(key_where,), value=(key_where,))
    check(drawn(heads, key_heads), places, {}, sends=None if heads == 5 and OLD else 0)


@pytest.mark.skipif(OLD, reason="DTensors of torch before 2.12 have no second derivative, and it says so")
@on_ranks(2)
def test_second_derivatives(rank, size):
    def of(tensors):
        (out, _), inputs = called(tensors, dict(causal=True)), list(tensors.values())
        first = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in first), inputs)

    tensors = drawn(4, 2)
    assert_same(of({name: distributed(x, HEADS) for name, x in tensors.items()}), of(tensors))


ALL = dict(query=HEADS, key=HEADS, value=HEADS)
REFUSED = [
    (ValueError, "query: .*2", 4, 2, dict.fromkeys(ALL, "Shard(2)")),
    (ValueError, "query: .*3.*head_dim", 4, 2, dict.fromkeys(ALL, "Shard(3)")),
    (ValueError, "query: .*head_dim", 4, 2, dict.fromkeys(ALL, "Shard(-1)")),
    (ValueError, "value: .*3.*head_dim", 4, 2, dict(query=SAME, key=SAME, value="Shard(3)")),
    (ValueError, "key:", 4, 2, dict(query=BATCH, key=HEADS, value=HEADS)),
    (ValueError, "key:", 6, 3, ALL),
    (ValueError, "key:", 6, 3, dict(query=HEADS, key=SAME, value=SAME)),
    (ValueError, "key:", 4, 1, ALL),
    (TypeError, "key:", 4, 2, ALL | dict(key=None)),
    (TypeError, "query:", 4, 2, ALL | dict(query=None)),
    (TypeError, "sinks:", 4, 2, ALL | dict(sinks=None)),
    (ValueError, "key_mask:", 4, 2, ALL | dict(key_mask="Shard(1)")),
    (ValueError, "mask:", 4, 2, dict.fromkeys(ALL, BATCH) | dict(mask=BATCH)),
    (ValueError, "bias:", 4, 2, ALL | dict(bias="Shard(2)")),
]


@on_ranks(2)
def test_what_a_rank_cannot_compute_alone_is_refused_on_each(rank, size):
    for error, message, heads, key_heads, places in REFUSED:
        tensors = drawn(heads, key_heads, [name for name in places if name in OPTIONS])
        ours = {name: x if places[name] is None else distributed(x, places[name]) for name, x in tensors.items()}
        with pytest.raises(error, match=f"^{message}"):
            called(ours, {})
    with pytest.raises(NotImplementedError, match="^dropout_p: .*seed"):
        called({name: distributed(x, SAME) for name, x in drawn(4, 2).items()}, dict(dropout_p=0.5))
    x, offsets = distributed(torch.randn(8, 2, D), SAME), torch.tensor([0, 8], dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="^query: "):
        fa.attention_varlen(x, x, x, offsets, offsets)
    x = distributed(torch.randn(1, 2, 8, D), SAME)
    with pytest.raises(NotImplementedError, match="^query: "):
        fa.attention_decode(x, x, x, cache_seqlens=torch.tensor([8], dtype=torch.int32))
    with pytest.raises(NotImplementedError, match="query: "):
        fa.distributed.ring_attention(x, x, x)
    with pytest.raises(NotImplementedError, match="^key_mask: "):
        fa.plan(key_mask=distributed(torch.ones(1, 8, dtype=torch.bool), SAME))


def operators(tensors, options):
    call = fields(**tensors | dict(sinks=tensors["sinks"][None]), right=0)
    return OPERATORS.forward(*call, True, False, True, "cpu")[:2]


@on_ranks(2)
@pytest.mark.parametrize(
    "key_heads, where, key_where, sends",
    [(2, BATCH, BATCH, 0), (2, HEADS, HEADS, 0), (1, HEADS, SAME, 0), (2, SAME, SAME, 0), (2, *["Shard(2)"] * 2, 1)],
)
def test_the_operators_by_name(rank, size, key_heads, where, key_where, sends):
    """Operators called by name accept DTensors; DTensor gathers shards that an operator cannot use."""
    register_sharding()
    register_sharding()
    tensors = drawn(4, key_heads, ("sinks", "key_mask"))
    two = {name: x[:2].detach().requires_grad_(x.requires_grad) for name, x in tensors.items() if name != "sinks"}
    places = dict(query=where, key=key_where, value=key_where, sinks=BATCH if where == HEADS else SAME)
    places |= dict(key_mask=BATCH if where == BATCH else SAME)
    check(tensors | two, {name: (x,) for name, x in places.items()}, {}, operators, sends=sends)


@on_ranks(2)
def test_weights_by_the_operator(rank, size):
    def results(tensors):
        return OPERATORS.forward(*fields(**tensors), False, True, False, "naive")

    register_sharding()
    tensors = {name: x.detach() for name, x in drawn(4, 2).items()}
    assert_same(results({name: distributed(x, HEADS) for name, x in tensors.items()}), results(tensors))


def test_spans_do_not_depend_on_the_rest_of_a_mesh():
    with mock.patch.object(dtensors, "_place", wraps=dtensors._place) as place:
        assert dtensors._span(256, 256, (128, 8), (3, 5), (0,), (0,)) == (0, 2)
        assert dtensors._span(64, 8, (128, 8), (3, 5), (1,), ()) == (5, 1)
    assert place.call_count <= 2 + 2 * 8


@on_ranks(4)
def test_a_mesh_of_three_dimensions(rank, size):
    mesh = init_device_mesh("cpu", (2, 1, 2))
    for where, keys in (((BATCH, SAME, HEADS),) * 2, ((HEADS,) * 3, (HEADS, HEADS, SAME)), ((BATCH,) * 3, (SAME,) * 3)):
        places = dict(query=where, key=keys, value=keys)
        check(drawn(8, 2), places, dict(dropout_p=0.3, causal=True), sends=None, mesh=mesh)
