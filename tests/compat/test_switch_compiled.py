"""sdpa and enable_sdpa of fusedattn.compat.torch beside torch.compile: what is compiled inside, and what outside."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as taken_before

import fusedattn.compat.torch as compat
from fusedattn.compat import _switch

from ..close import assert_like
from .test_switch import OPERATOR, X, in_a_thread


class Watched:
    """A backend of torch.compile that keeps how often it compiled, and runs what it gets."""

    def __init__(self):
        self.graphs = []

    def __call__(self, graph, inputs):
        self.graphs.append([node.target for node in graph.graph.nodes])
        return graph.forward

    def ours(self):
        """Of each graph, whether the call in it is ours."""
        torchs = {*_switch._TORCHS, F.multi_head_attention_forward}
        return [not torchs & set(filter(callable, targets)) for targets in self.graphs]


def by_name(x):
    return F.scaled_dot_product_attention(x, x, x, is_causal=True) + 1


def by_reference(x):
    return taken_before(x, x, x, is_causal=True) + 1


def by_operator(x):
    return OPERATOR.default(x, x, x, None, 0.0, True) + 1


@pytest.mark.parametrize(
    ("function", "first", "everywhere"),
    [
        (by_name, True, True),
        (by_operator, False, False),
    ],
)
def test_compiled_code_is_ours_inside_and_torchs_outside(function, first, everywhere):
    torch._dynamo.reset()
    watched = Watched()
    compiled = torch.compile(function, fullgraph=True, backend=watched)
    for inside in (first, not first, first):
        if not inside:
            out = compiled(X)
        elif everywhere:
            compat.enable_sdpa()
            out = compiled(X)
            compat.disable_sdpa()
        else:
            with compat.sdpa():
                out = compiled(X)
        assert_like(out, function, X)
    assert watched.ours() == [first, not first]


def test_a_with_inside_of_what_is_compiled():
    watched = Watched()

    def inside(x):
        with compat.sdpa():
            y = by_name(x)
        return y, by_name(x)

    ours, torchs = torch.compile(inside, fullgraph=True, backend=watched)(X)
    assert_like(ours, by_name, X)
    assert torch.equal(torchs, by_name(X)) and watched.graphs[0].count(taken_before) == 1


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_compiled_models_of_torch_are_ours_with_gradients():
    torch._dynamo.reset()
    model = nn.MultiheadAttention(8, 2, batch_first=True)
    watched = Watched()
    compiled = torch.compile(lambda x: model(x, x, x, need_weights=False)[0].sin().sum(), backend=watched)
    grads, x = [], X[0].clone().requires_grad_()
    for inside in (False, True, False):
        if inside:
            with compat.sdpa():
                grads += torch.autograd.grad(compiled(x), x)
        else:
            grads += torch.autograd.grad(compiled(x), x)
    assert_like(grads[1], lambda: torch.autograd.grad(model(x, x, x, need_weights=False)[0].sin().sum(), x)[0])
    assert torch.equal(grads[0], grads[2]) and watched.ours() == [False, True]


def test_what_another_thread_compiles_is_torchs_unless_it_enables_too():
    torch._dynamo.reset()
    watched = Watched()
    compat.enable_sdpa()

    def compiled():
        return torch.compile(by_reference, fullgraph=True, backend=watched)(X)

    def enabled():
        compat.enable_sdpa()
        return compiled()

    for run in (compiled, enabled):
        assert_like(in_a_thread(run), by_reference, X)
    compat.disable_sdpa()
    assert watched.ours() == [False, True]
