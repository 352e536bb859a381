"""Tests of checkpoints: recomputed calls save the same tensors, and operators kept by name are not recomputed."""

import functools

import pytest
import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from ..close import assert_like
from ..inside import HQ, SK, SQ, by, draw, same

pytestmark = pytest.mark.usefixtures("deterministic")

# options with fewer dimensions than the backends use
LESS = {
    "key_mask": lambda: dict(key_mask=torch.arange(SK) < SK - 2),
    "query_mask": lambda: dict(query_mask=torch.arange(SQ) > 0),
    "mask": lambda: dict(mask=torch.ones(SQ, SK, dtype=torch.bool).tril(4)),
    "bias": lambda: dict(bias=torch.randn(SQ, SK)),
    "slopes and sinks": lambda: dict(alibi_slopes=torch.rand(HQ), sinks=torch.randn(HQ)),
}
KEPT = {"plain": {}, "dropout": dict(dropout_p=0.4), "masks": dict(key_mask=torch.arange(SK) < SK - 2)}


def attend(backend, options, query, key, value):
    return by(backend)(query * 1.5, key, value.sin(), causal=True, **options).square().sum()


@pytest.mark.parametrize("name", LESS)
def test_a_call_saves_the_same_whether_replayed_or_not(name, device, record_after):
    """The two calls of a checkpoint, one of them a replay, save the same tensors; otherwise torch raises."""
    record_after(2)
    options = {key: x.to(device) for key, x in LESS[name]().items()}
    inputs = draw(device, requires_grad=True)
    for _ in range(2):
        out = checkpoint(functools.partial(attend, "triton", options), *inputs, use_reentrant=False)
        want = lambda: torch.autograd.grad(attend("eager", options, *inputs), inputs)  # noqa: E731
        assert_like(torch.autograd.grad(out, inputs), want)


def kept_by_name(step):
    """Wrap a function in a checkpoint that keeps our operator's results and recomputes everything else."""
    keep = functools.partial(create_selective_checkpoint_contexts, [torch.ops.fusedattn.forward.default])
    return lambda *inputs: checkpoint(step, *inputs, use_reentrant=False, context_fn=keep)


def graded(step, inputs):
    torch.manual_seed(3)
    return torch.autograd.grad(step(*inputs), inputs)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", KEPT)
def test_what_is_kept_by_name_is_not_computed_again(name, compiled, device, launched, record_after):
    record_after(None)  # so that each launch is seen
    if compiled and name != "plain":
        pytest.skip("one call is enough")
    options = {key: x.to(device) if isinstance(x, torch.Tensor) else x for key, x in KEPT[name].items()}
    step, inputs = functools.partial(attend, "triton", options), draw(device, requires_grad=True)
    kept, want = kept_by_name(step), graded(step, inputs)
    if compiled:
        kept = torch.compile(kept, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        launched.clear()
        same(graded(kept, inputs), want)
        assert [name for name, _ in launched].count("forward") == 1
        same(graded(step, inputs), want)
