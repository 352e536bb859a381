"""Derivatives of the fused path beyond the first backward: torch.func, vmap, second and third, forward mode."""

import pytest
import torch
from torch.autograd import forward_ad

import fusedattn as fa
from fusedattn.naive import formula as naive, second

from ..inside import BACKENDS, HQ, OPTIONS, SK, SQ, draw, learned, loss, same


def test_func_grad_and_vmap(device):
    query, key, value = draw(device)
    many = torch.randn(3, *query.shape, device=device)
    fused, naive = loss("triton"), loss("naive")
    for transform in (
        lambda f: torch.func.grad(f, argnums=(0, 1, 2))(query, key, value),
        lambda f: [torch.vmap(f, (0, None, None))(many, key, value)],
        lambda f: [torch.vmap(f, (1, None, None))(many.movedim(0, 1), key, value)],
        lambda f: torch.vmap(torch.func.grad(f, argnums=(0, 1)), (0, None, None))(many, key, value),
        lambda f: [torch.func.grad(lambda k: torch.vmap(f, (0, None, None))(many, k, value).sum())(key)],
        lambda f: [torch.vmap(torch.vmap(f, (0, None, None)), (0, None, None))(many[None], key, value)],
        lambda f: [torch.func.jacrev(lambda q: f(q, key, value))(query)],
    ):
        same(transform(fused), transform(naive), atol=1e-4)


def test_vmap_and_what_is_learned(device):
    query, key, value = draw(device)
    many = torch.randn(3, *query.shape, device=device)
    bias, sinks = torch.randn(1, HQ, 1, SK, device=device), torch.randn(HQ, device=device)
    biases = torch.randn(3, *bias.shape, device=device)

    def total(backend):
        def compute(query, bias, sinks):
            out, weights = fa.attention(query, key, value, bias=bias, sinks=sinks, return_weights=True, backend=backend)
            return out.square().sum() + weights.square().sum()

        return compute

    for dims in ((0, None, None), (None, 0, None), (0, 0, None)):
        given = [x if dim is None else y for x, y, dim in zip((query, bias), (many, biases), dims, strict=False)]
        results = [
            torch.vmap(torch.func.grad(total(backend), argnums=(0, 1, 2)), dims)(*given, sinks) for backend in BACKENDS
        ]
        same(*results, atol=1e-4)


@pytest.mark.parametrize("backend", ["triton", "naive"])
def test_vmap_with_dropout_has_planes_of_its_own_for_each_call(device, backend):
    query, key, value = draw(device)
    many = torch.stack([query, query + 1])

    def attend(query, key, value, backend=backend):
        return fa.attention(query, key, value, dropout_p=0.5, seed=3, backend=backend)

    folded = attend(many.flatten(0, 1), *(torch.cat([x, x]) for x in (key, value)), backend="naive")
    same([torch.vmap(attend, (0, None, None))(many, key, value)], [folded.view_as(many[..., : value.shape[3]])])
    alike = torch.vmap(attend, (0, None, None), randomness="same")(many, key, value)
    same([alike], [torch.stack([attend(x, key, value) for x in many])])
    seeds = torch.tensor([[3], [4]], device=device)
    mapped = torch.vmap(lambda s: fa.attention(query, key, value, dropout_p=0.5, seed=s, backend=backend))(seeds)
    same([mapped], [torch.stack([fa.attention(query, key, value, dropout_p=0.5, seed=s) for s in seeds])])


def test_vmap_over_masks(device):
    query, key, value = draw(device)
    for shape, name in (((3, 1, 1, SQ, SK), "mask"), ((3, SQ, SK), "mask"), ((3, 1, SK), "key_mask")):
        masks = torch.rand(shape, device=device) < 0.7
        got, want = (
            torch.vmap(lambda m, b=backend: fa.attention(query, key, value, backend=b, **{name: m}))(masks)  # noqa: B023
            for backend in ("triton", "naive")
        )
        same([got], [want])


@pytest.mark.parametrize("name", OPTIONS)
def test_a_gradient_penalty_is_right(name, device):
    """Second derivatives, of a loss of output, lse and weights, in every input."""
    options = OPTIONS[name](SQ, SK, device)
    inputs = [*draw(device, requires_grad=True), *learned(options)]
    seconds = []
    for backend in BACKENDS:
        results = fa.attention(*inputs[:3], **options, return_lse=True, return_weights=True, backend=backend)
        total = sum(x.nan_to_num(0, 0, 0).square().sum() for x in results)
        grads = torch.autograd.grad(total, inputs, create_graph=True)
        seconds.append(torch.autograd.grad(sum(x.square().sum() for x in grads), inputs))
    for a, b in zip(*seconds, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5 * float(b.abs().max()))


def test_second_derivatives_of_some_inputs_and_under_torch_func(device):
    query, key, value = draw(device, requires_grad=True)
    fused, naive = loss("triton"), loss("naive")
    for ask in (
        lambda f: torch.autograd.grad(
            torch.autograd.grad(f(query, key, value), query, create_graph=True)[0].sum(), [query, key]
        ),
        lambda f: [torch.func.grad(lambda q: torch.func.grad(f)(q, key, value).square().sum())(query.detach())],
        lambda f: [torch.func.jacrev(torch.func.grad(f))(query.detach()[:, :1, :2], key.detach(), value.detach())],
    ):
        for a, b in zip(ask(fused), ask(naive), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    few = [x.detach()[:1, :, :2] for x in (query, key, value)]
    hessians = (torch.func.hessian(f)(*few) for f in (fused, naive))
    torch.testing.assert_close(*hessians, rtol=1e-4, atol=1e-4)


def test_third_derivatives(device):
    # On a GPU kernels take no float64.
    dtype, error = (torch.float64, 1e-8) if device == "cpu" else (torch.float32, 1e-5)
    small = [x.to(dtype).detach().requires_grad_() for x in draw(device, batch=1, sq=3, sk=4)]
    thirds = []
    for backend in BACKENDS:
        (first,) = torch.autograd.grad(loss(backend)(*small), small[0], create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), small[1], create_graph=True)
        thirds.append(torch.autograd.grad(second.square().sum(), small))
    same(*thirds, atol=error * max(1, *(x.abs().max().item() for x in thirds[0])))


def _gradients(f):
    return lambda *x: torch.func.grad(f, tuple(range(len(x))))(*x)


SECOND = {
    "autograd": lambda f, x: torch.autograd.grad(
        sum(y.square().sum() for y in torch.autograd.grad(f(*x), x, create_graph=True)), x
    ),
    "reverse over reverse": lambda f, x: torch.func.vjp(_gradients(f), *x)[1](tuple(x)),
    "forward over reverse": lambda f, x: torch.func.jvp(torch.func.grad(f, tuple(range(len(x)))), tuple(x), tuple(x))[
        1
    ],
    "reverse over forward": lambda f, x: _gradients(lambda *y: torch.func.jvp(f, y, tuple(x))[1])(*x),
    "forward over forward": lambda f, x: [
        torch.func.jvp(lambda *y: torch.func.jvp(f, y, tuple(x))[1], tuple(x), tuple(x))[1]
    ],
}


@pytest.mark.parametrize("way", SECOND)
def test_second_derivatives_take_rows_by_the_block(way, device, monkeypatch):
    options = OPTIONS["added"](SQ, SK, device) | OPTIONS["masks"](SQ, SK, device) | OPTIONS["dropout"](SQ, SK, device)
    names = [name for name, x in options.items() if isinstance(x, torch.Tensor) and x.requires_grad]
    inputs = [*draw(device, requires_grad=True), *(options.pop(name) for name in names)]
    if way != "autograd":
        inputs = [x.detach() for x in inputs]

    def total(*x):
        more = options | dict(zip(names, x[3:], strict=True))
        results = fa.attention(*x[:3], **more, return_lse=True, return_weights=True, backend="triton")
        return sum(x.square().sum() for x in results)

    whole, blocks = SECOND[way](total, inputs), []
    of_rows = second._whole
    monkeypatch.setattr(second, "_whole", lambda call, *span: blocks.append(span) or of_rows(call, *span))
    monkeypatch.setattr(naive, "BUDGET", 4 * 2 * HQ * SK * 2)
    for a, b in zip(SECOND[way](total, inputs), whole, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert len(set(blocks)) > 1 and all(last - first < SQ for first, last in blocks)


@pytest.mark.parametrize("backend", [*BACKENDS, "cpu"])
def test_second_derivatives_of_no_rows(device, backend):
    query, key, value = draw("cpu" if backend == "cpu" else device, sq=0, requires_grad=True)
    grads = torch.autograd.grad(fa.attention(query, key, value, backend=backend).sum(), query, create_graph=True)
    seconds = torch.autograd.grad(grads[0].sum(), [query, key, value], allow_unused=True, materialize_grads=True)
    assert [x.shape for x in seconds] == [x.shape for x in (query, key, value)]
    grad = torch.func.grad(lambda q: fa.attention(q, key, value, backend=backend).sum())
    assert torch.func.jvp(grad, (query,), (query,))[1].shape == query.shape


@pytest.mark.parametrize("backend", BACKENDS)
def test_forward_mode_is_what_the_gradient_says(device, backend):
    query, key, value = draw(device)
    expected = (torch.func.grad(loss("naive"))(query, key, value) * query).sum()
    _, tangent = torch.func.jvp(lambda q: loss(backend)(q, key, value), (query,), (query,))
    torch.testing.assert_close(tangent, expected, rtol=1e-4, atol=1e-4)
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(loss(backend)(forward_ad.make_dual(query, query), key, value)).tangent
    torch.testing.assert_close(tangent, expected, rtol=1e-4, atol=1e-4)
