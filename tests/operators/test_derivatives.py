"""Tests of second derivatives, and of torch.vmap of gradients."""

import functools

import pytest
import torch

import fusedattn as fa
from fusedattn.naive import formula as naive, second

from ..close import assert_like
from ..inside import BACKENDS, HQ, OPTIONS, SK, SQ, by, draw, leaves


def test_vmap_and_what_is_learned(device):
    query, key, value = draw(device)
    many = torch.randn(3, *query.shape, device=device)
    bias, sinks = torch.randn(1, HQ, 1, SK, device=device), torch.randn(HQ, device=device)
    biases = torch.randn(3, *bias.shape, device=device)

    def total(query, bias, sinks, backend="eager"):
        results = by(backend)(query, key, value, bias=bias, sinks=sinks, return_weights=True)
        return sum(x.square().sum() for x in results)

    for dims in ((None, 0, None), (0, 0, None)):
        given = [x if dim is None else y for x, y, dim in zip((query, bias), (many, biases), dims, strict=False)]
        derive = lambda f, *x, dims=dims: torch.vmap(torch.func.grad(f, argnums=(0, 1, 2)), dims)(*x)  # noqa: E731
        for backend in (*BACKENDS, None):
            assert_like(derive(functools.partial(total, backend=backend), *given, sinks), derive, total, *given, sinks)


@pytest.mark.parametrize("backend", ["triton", "naive"])
def test_vmap_with_dropout_has_planes_of_its_own_for_each_call(device, backend):
    query, key, value = draw(device)
    many = torch.stack([query, query + 1])

    def attend(query, key, value, seed=3, backend=backend):
        return by(backend)(query, key, value, dropout_p=0.5, seed=seed)

    eagerly, twice = functools.partial(attend, backend="eager"), [torch.cat([x, x]) for x in (key, value)]
    got = torch.vmap(attend, (0, None, None))(many, key, value)
    assert_like(got.flatten(0, 1), eagerly, many.flatten(0, 1), *twice)
    alike = torch.vmap(attend, (0, None, None), randomness="same")(many, key, value)
    assert_like(alike, lambda: torch.stack([eagerly(x, key, value) for x in many]))
    seeds = torch.tensor([[3], [4]], device=device)
    mapped = torch.vmap(attend, (None, None, None, 0))(query, key, value, seeds)
    assert_like(mapped, lambda: torch.stack([eagerly(query, key, value, s) for s in seeds]))


def test_vmap_over_masks(device):
    query, key, value = draw(device)
    for shape, name in (((3, 1, 1, SQ, SK), "mask"), ((3, SQ, SK), "mask"), ((3, 1, SK), "key_mask")):
        masks = torch.rand(shape, device=device) < 0.7
        got = torch.vmap(lambda m, name=name: fa.attention(query, key, value, backend="triton", **{name: m}))(masks)
        eagerly = lambda masks, name=name: [by("eager")(query, key, value, **{name: m}) for m in masks]  # noqa: E731
        assert_like(list(got), eagerly, masks)


def _gradients(f):
    return lambda *x: torch.func.grad(lambda *y: f(*y).sum(), tuple(range(len(x))))(*x)


SECOND = {
    "autograd": lambda f, x: torch.autograd.grad(
        sum(y.square().sum() for y in torch.autograd.grad(f(*x).sum(), x, create_graph=True)), x
    ),
    "reverse over reverse": lambda f, x: torch.func.vjp(_gradients(f), *x)[1](tuple(x)),
    "forward over reverse": lambda f, x: torch.func.jvp(_gradients(f), tuple(x), tuple(x))[1],
    "reverse over forward": lambda f, x: _gradients(lambda *y: torch.func.jvp(f, y, tuple(x))[1])(*x),
    "forward over forward": lambda f, x: [
        torch.func.jvp(lambda *y: torch.func.jvp(f, y, tuple(x))[1], tuple(x), tuple(x))[1]
    ],
}


@pytest.mark.parametrize("way", SECOND)
@pytest.mark.one_in(3)
def test_second_derivatives_take_rows_by_the_block(way, device, monkeypatch):
    options = OPTIONS["added"](SQ, SK, device) | OPTIONS["masks"](SQ, SK, device) | OPTIONS["dropout"](SQ, SK, device)
    names = [name for name, x in options.items() if isinstance(x, torch.Tensor) and x.requires_grad]
    inputs = [*draw(device, requires_grad=True), *(options.pop(name) for name in names)]

    def squares(*x, backend="triton"):
        more = options | dict(zip(names, x[3:], strict=True))
        results = by(backend)(*x[:3], **more, return_lse=True, return_weights=True)
        return torch.cat([x.square().flatten() for x in results])

    blocks, of_rows = [], second._whole
    monkeypatch.setattr(second, "_whole", lambda call, *span: blocks.append(span) or of_rows(call, *span))
    monkeypatch.setattr(naive, "BUDGET", 4 * 2 * HQ * SK * 2)
    got, eagerly = SECOND[way](squares, inputs), functools.partial(squares, backend="eager")
    assert_like(got, SECOND[way], eagerly, inputs)
    assert len(set(blocks)) > 1 and all(last - first < SQ for first, last in blocks)


def test_second_derivatives_in_bfloat16_add_up_in_float32(device, monkeypatch):
    monkeypatch.setattr(naive, "BUDGET", 1)  # one row at a time
    query, *inputs = draw(device, batch=1, dtype=torch.bfloat16)
    query, inputs = query[:, :, :1].expand(-1, -1, 6, -1), leaves(*inputs)
    factor = query.new_tensor([500, 1, 1, 1, 1, -500])[:, None]  # a sum in bfloat16 would drop the ones
    fused, eagerly = (lambda *x, b=b: by(b)(query, *x) * factor for b in (None, "eager"))
    assert_like(SECOND["autograd"](fused, inputs), SECOND["autograd"], eagerly, inputs)


@pytest.mark.parametrize("backend", [*BACKENDS, "cpu"])
def test_second_derivatives_of_no_rows(device, backend):
    inputs = draw(device, sq=0, requires_grad=True)
    for way in ("autograd", "forward over reverse"):
        assert [x.shape for x in SECOND[way](by(backend), inputs)] == [x.shape for x in inputs]
