"""Tests the operators inside PyTorch: compile, export, checkpoints, autocast and fake tensors."""

import functools
import shutil

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import checkpoint as checkpoints
from torch.utils.checkpoint import checkpoint

import fusedattn as fa
from fusedattn.call.options import AssumedGPU, override

from ..close import assert_like
from ..inside import BACKENDS, HQ, OPTIONS, SK, SQ, D, Seen, by, draw, learned, loss, same

pytestmark = pytest.mark.usefixtures("deterministic")


@pytest.fixture(params=BACKENDS)
def backend(request, device):
    return request.param


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.one_in(6)
def test_compile_whole_graph_forward_and_backward(name, device, backend):
    def step(query, key, value, options, backend=backend):
        return by(backend)(query, key, value, return_lse=True, return_weights=True, **options)

    inputs, options = draw(device, requires_grad=True), OPTIONS[name](SQ, SK, device)
    # Inductor takes half a minute for each naive graph on a CPU: one is enough.
    compiler = "inductor" if name == "causal" or backend == "triton" else "aot_eager"
    got = torch.compile(step, fullgraph=True, backend=compiler)(*inputs, options)
    assert [x.stride() for x in got] == [x.stride() for x in step(*inputs, options)]

    def with_gradients(results):
        total = sum(x.nan_to_num(0, 0, 0).square().sum() for x in results)
        return [*results, *torch.autograd.grad(total, [*inputs, *learned(options)])]

    assert_like(with_gradients(got), lambda: with_gradients(step(*inputs, options, "eager")))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_compile_does_not_recompile_for_each_length(device):
    step = torch.compile(
        lambda *x: fa.attention(*x, causal=True, backend="triton"), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for sq, sk in ((8, 9), (13, 20), (17, 5)):
        inputs = draw(device, sq=sq, sk=sk)
        assert_like(step(*inputs), functools.partial(fa.reference.eager, causal=True), *inputs)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


def test_compiled_dropout_knows_no_lengths():
    step = torch.compile(lambda x: fa.attention(x, x, x, dropout_p=0.3), fullgraph=True, backend="eager")
    for length in (16, 32, 48, 64, 96, 128, 176, 33, 47, 5):  # random bits have blocks of 16
        assert step(torch.randn(1, 2, length, 16)).shape == (1, 2, length, 16)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 4
    assert not torch.equal(*(step(torch.ones(1, 2, 33, 16)) for _ in range(2)))  # each call draws a seed


@pytest.mark.parametrize("capability", [None, 80, 90])
def test_an_export_takes_any_lengths(capability):
    class Attend(torch.nn.Module):
        def forward(self, query, key):
            out = fa.attention(query, key, key, bias=query @ key.mT, dropout_p=0.3, seed=5)
            return out, fa.attention_decode(query, key, key, cache_seqlens=torch.full((1,), 3).int())

    given = torch.randn(1, 2, 20, 9), torch.randn(1, 2, 37, 9)
    rows, keys = torch.export.Dim("rows"), torch.export.Dim("keys")
    with override(gpu=capability and AssumedGPU(capability)):
        exported = torch.export.export(Attend(), given, dynamic_shapes=({2: rows}, {2: keys})).module()
    for sq, sk in () if capability else ((20, 37), (32, 16), (5, 70)):
        given = torch.randn(1, 2, sq, 9), torch.randn(1, 2, sk, 9)
        same(exported(*given), Attend()(*given))


OPEN = {0: torch.export.Dim("batch", min=2, max=64), 1: torch.export.Dim("length", min=2, max=4096)}

GROUPED = dict(num_heads=4, num_kv_heads=2)
EXPORTED = {  # {name: (options of a module, True if it returns weights)}; narrow heads differentiate few keys otherwise
    "softcap": (GROUPED | dict(softcap=3.0), True), "triton": (GROUPED | dict(backend="triton"), True),
    "plain": (GROUPED, True), "wide": (dict(num_heads=1), False), "narrow": (dict(num_heads=2), False),
}  # fmt: skip


@pytest.mark.parametrize("options, weights", EXPORTED.values(), ids=EXPORTED)
@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("traced", [7, 90])
@pytest.mark.one_in(7)
def test_an_export_of_a_module_takes_any_length(traced, gradients, options, weights):
    layer = fa.MultiHeadAttention(16, **options).eval().requires_grad_(gradients)
    given, dims = (torch.randn(3, traced, 16),), dict(query=OPEN, need_weights=None)
    exported = torch.export.export(layer, given, dict(need_weights=weights), dynamic_shapes=dims).module()
    for batch, length in ((2, 2), (3, 40)):
        x = torch.randn(batch, length, 16)
        got = exported(x, need_weights=weights)
        with fa.use_backend("naive"):
            assert_like([*got[: 1 + weights]], lambda layer: [*layer(x, need_weights=weights)[: 1 + weights]], layer)  # noqa: B023


@pytest.mark.parametrize("backend, dropout_p", [(None, 0.0), (None, 0.3), ("naive", 0.0)])
def test_a_checkpoint_may_keep_products(backend, dropout_p):
    keep = [torch.ops.aten.mm.default, torch.ops.aten.bmm.default]  # torch raises if attention writes to their results
    contexts = functools.partial(checkpoints.create_selective_checkpoint_contexts, keep)
    inputs = draw("cpu", sq=33, sk=33, requires_grad=True)

    def attend(*tensors):
        return fa.attention(*tensors, dropout_p=dropout_p, seed=5, backend=backend)

    made = checkpoint(attend, *inputs, use_reentrant=False, context_fn=contexts)
    grads = (torch.autograd.grad(out.square().sum(), inputs) for out in (made, attend(*inputs)))
    assert all(map(torch.equal, *grads))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_compile_sees_use_backend(device):
    inputs = draw(device)
    step = torch.compile(lambda *x: fa.attention(*x), fullgraph=True, backend="aot_eager")
    with (triton := fa.use_backend("triton")), fa.use_backend("naive"), triton:
        assert torch.equal(step(*inputs), fa.attention(*inputs, backend="triton"))
    with fa.use_backend("naive"):
        assert_like(step(*inputs), fa.reference.eager, *inputs)

    def inside(*x):
        with fa.use_backend("triton"):
            return fa.attention(*x)

    compiled = torch.compile(inside, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*inputs), fa.attention(*inputs, backend="triton"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_a_gradient_penalty_of_a_compiled_call_raises_or_is_right(compiler, device):
    query, key, value = draw(device, requires_grad=True)

    def penalty(function):
        (grad,) = torch.autograd.grad(function(query, key, value), query, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), (query, key, value))

    compiled = torch.compile(loss("triton"), fullgraph=True, backend=compiler)
    if compiler == "eager":
        assert_like(penalty(compiled), penalty, loss("eager"))
    else:
        with pytest.raises(RuntimeError, match="double backward"):
            penalty(compiled)


@pytest.mark.filterwarnings("ignore")
def test_what_eager_calls_have_learned_compiles_nothing_anew(device):
    inputs = draw(device)
    graphs, compiler = [], lambda graph, _: graphs.append(1) or graph
    step = torch.compile(lambda *x: fa.attention(*x, backend="triton"), fullgraph=True, backend=compiler)
    for scale in (0.5, 0.25, 0.125):
        step(*inputs)
        fa.attention(*inputs, scale=scale, backend="triton")
    assert len(graphs) == 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.one_in(3)
def test_a_scale_that_varies_compiles(device, backend):
    inputs = draw(device)
    attend = lambda scale: fa.attention(*inputs, scale=scale, backend=backend)  # noqa: E731
    step = torch.compile(attend, fullgraph=True, backend="eager")
    for scale in (0.5, 0.25, 0.125):
        assert_like(step(scale), functools.partial(fa.reference.eager, scale=scale), *inputs)


def test_autocast_casts_as_sdpa_does_and_no_further(device, backend):
    query, key, value = draw(device)
    lower = [x.bfloat16() for x in (query, key, value)]
    want = fa.attention(*lower, backend=backend)
    with torch.autocast(device, torch.bfloat16):
        got = fa.attention(query, lower[1], value, backend=backend)
        again = fa.attention(*lower, bias=torch.zeros(SQ, SK, device=device), backend=backend)
        with pytest.raises(TypeError, match="^key: expected "):
            fa.attention(query, key.double(), value, backend=backend)
        if device == "cpu":
            assert fa.attention(*(x.double() for x in (query, key, value)), backend=backend).dtype == torch.float64
        with torch.autocast(device, enabled=False):
            assert fa.attention(query, key, value, backend=backend).dtype == torch.float32
    assert got.dtype == torch.bfloat16 and torch.equal(got, want) and torch.equal(again, want)
    layer = fa.MultiHeadAttention(16, 2, backend=backend, device=device)
    with torch.autocast(device, torch.bfloat16):
        layer(torch.randn(2, 5, 16, device=device))[0].float().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in layer.parameters())


def test_fake_tensors_have_the_strides_of_the_real(device, backend):
    for order in ((0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (0, 1, 3, 2)):
        for expanded in (False, True):
            query, key, value = draw(device)
            query = query.permute(order).contiguous().permute([order.index(axis) for axis in range(4)])
            query = query[:1].expand(2, -1, -1, -1) if expanded else query
            real = fa.attention(query, key, value, return_lse=True, backend=backend)
            with FakeTensorMode() as mode:
                fake = fa.attention(*map(mode.from_tensor, (query, key, value)), return_lse=True, backend=backend)
            for a, b in zip(real, fake, strict=True):
                assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


@pytest.mark.parametrize("backend", ["triton", "cpu"])
def test_a_mode_sees_each_operator_and_a_negated_view_is_read_as_such(backend, device):
    inputs = draw(device, requires_grad=True)
    negated = [torch._neg_view(-x.detach()).requires_grad_() for x in inputs]
    cache, lengths = torch.randn(2, 2, HQ, SK, D, device=device), torch.ones(2, dtype=torch.int32, device=device)
    query = torch.randn(2, HQ, 1, D, device=device)

    def both(inputs):
        out = fa.attention(*inputs, causal=True, backend=backend)
        decoded = fa.attention_decode(query, *cache, cache_seqlens=lengths, backend=backend)
        return out, *torch.autograd.grad(out.square().sum(), inputs), decoded

    with Seen() as seen:
        want = both(inputs)
    names = {f"fusedattn.{name}.default" for name in ("forward", "backward", "decode")}
    assert names <= seen.names
    same(both(negated), want)


@pytest.mark.matrix
def test_a_compiler_drops_the_same(device):
    if device == "cpu" and shutil.which("g++") is None and shutil.which("clang++") is None:
        pytest.skip("needs a C++ compiler")
    x = torch.randn(1, 2, 40, 16, device=device)

    def visible(x):  # Inductor's C++ assumes no integer overflow
        return fa.attention(x, x, x, dropout_p=0.4, seed=2**62 + 12345, backend="naive", return_weights=True)[1] > 0

    assert torch.equal(torch.compile(visible)(x), visible(x))
