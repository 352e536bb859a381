"""Tests that tensor subclasses, modes and default devices change neither numbers nor classes of results."""

import contextlib
from typing import NamedTuple

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import fusedattn as fa

from ..inside import HQ, draw, leaves, same
from ..sequences import draw_packed, offsets

pytestmark = pytest.mark.usefixtures("deterministic")


class Kind(NamedTuple):
    """One kind of tensors: a context, a wrapper of inputs, an unwrapper of results, and the class of the results."""

    context: object = contextlib.nullcontext
    wrap: object = lambda x: x
    unwrap: object = lambda x: x
    made: type = torch.Tensor


KINDS = {
    "default device": Kind(lambda: torch.device("meta")),  # what torch.set_default_device sets
    "__torch_dispatch__": Kind(wrap=lambda x: TwoTensor(x, x.clone()), unwrap=lambda x: x.a, made=TwoTensor),
}


def dense(device, backend):
    options = dict(causal=True, key_mask=torch.arange(11, device=device) < 9, sinks=torch.randn(HQ, device=device))
    return draw(device), lambda *x: fa.attention(*x, **options, return_lse=True, backend=backend)


def dropped(device, backend):
    mask = torch.ones(9, 11, dtype=torch.bool, device=device).tril(4)
    return draw(device), lambda *x: (fa.attention(*x, mask=mask, dropout_p=0.3, backend=backend),)


def packed(device, backend):
    *inputs, _ = draw_packed((5, 3), (4, 6), device)
    cu = offsets((5, 3), device), offsets((4, 6), device)
    return inputs, lambda *x: (fa.attention_varlen(*x, *cu, causal=True, backend=backend),)


def merged(device, backend):
    def attend(*x):
        return fa.merge(*(2 * fa.attention(*x, return_lse=True, backend=backend)))

    return draw(device), attend


def cached(device, backend):
    lengths = torch.tensor([1, 4], device=device).int()
    angles = torch.rand(2, 9, 4, device=device)
    shapes = (2, 4, 1, 16), (2, 2, 6, 16), (2, 2, 6, 16), (2, 2, 1, 16), (2, 2, 1, 16)

    def attend(query, keys, values, *new):
        caches, new = (keys.detach().clone(), values.detach().clone()), dict(new_key=new[0], new_value=new[1])
        more = new | dict(rotary_cos=angles[0], rotary_sin=angles[1], cache_seqlens=lengths, backend=backend)
        with torch.no_grad():
            return fa.attention_decode(query, *caches, **more), *caches

    return [torch.randn(shape, device=device) for shape in shapes], attend


def computed(kind, inputs, attend):
    inputs = [kind.wrap(x.detach().clone()).requires_grad_() for x in inputs]
    torch.manual_seed(3)
    with kind.context():
        results = attend(*inputs)
        if results[0].requires_grad:
            results = *results, *torch.autograd.grad(sum(x.square().sum() for x in results), inputs)
    assert all(type(x) is kind.made for x in results)
    return [kind.unwrap(x.detach()) for x in results]


@pytest.mark.parametrize("backend", ["naive", "cpu", "triton"])
@pytest.mark.parametrize("call", [dense, dropped, packed, merged, cached], ids=lambda call: call.__name__)
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.one_in(7)
def test_the_numbers_are_those_of_plain_tensors(name, call, backend, device):
    if backend == "cpu" and call is dropped:
        pytest.skip("the backend knows no dropout")
    inputs, attend = call(device, backend)
    for _ in range(2):
        want = computed(Kind(), inputs, attend)
        got = computed(KINDS[name], inputs, attend)
        same(got, want)


@pytest.mark.parametrize("backend", ["naive", "triton"])
def test_modules_under_a_default_device_are_made_there_and_run_where_they_are(backend, device):
    with torch.device("meta"):
        empty = fa.layers.TransformerEncoderLayer(16, 2, 32, backend=backend)
    assert all(x.is_meta for x in empty.parameters())
    layer = fa.layers.TransformerEncoderLayer(16, 2, 32, backend=backend, device=device)
    (x,) = leaves(torch.randn(2, 5, 16, device=device))
    want = layer(x)
    with torch.device("meta"):
        assert torch.equal(layer(x), want)
