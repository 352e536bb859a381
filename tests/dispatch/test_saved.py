"""What a forward keeps for its backward: what hooks make of it, and what a trace makes of the call."""

import warnings

import pytest
import torch

import fusedattn as fa
from fusedattn.dispatch import replay

from ..close import assert_like
from ..inside import draw

pytestmark = pytest.mark.usefixtures("deterministic")


@pytest.mark.parametrize("record_after", [1, 2], ids=["replayed", "first"])
@pytest.mark.parametrize("change", [lambda x: x.half(), lambda x: x[:, :, :4].contiguous()], ids=["dtype", "shape"])
def test_saved_tensors_that_hooks_change_are_refused(change, record_after, monkeypatch):
    """Kernels would read outside of what is shorter, and take numbers of another dtype for what they are not."""
    monkeypatch.setattr(replay, "RECORD_AFTER", record_after)
    inputs = draw("cpu", requires_grad=True)

    def unpack(x):
        return change(x) if x.shape[-1] < inputs[0].shape[-1] else x  # stats

    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
        out = fa.attention(*inputs, backend="triton")
    with pytest.raises(ValueError, match="^saved_tensors_hooks: expected a tensor of torch.float32 and shape"):
        torch.autograd.grad(out.sum(), inputs)


def test_a_backward_is_not_repeated_for_tensors_of_another_shape():
    """A hook that loses heads leaves no recording that a call without it would take."""
    inputs = draw("cpu", requires_grad=True)

    def gradients(unpack):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
            out = fa.attention(*inputs, backend="triton")
        return torch.autograd.grad(out.sum(), inputs)

    with pytest.raises(ValueError, match="^saved_tensors_hooks: "):
        gradients(lambda x: x[:, :1])
    assert_like(gradients(lambda x: x), lambda: torch.autograd.grad(fa.reference.eager(*inputs).sum(), inputs))


def test_a_traced_call_that_requires_a_gradient_runs():
    """While torch.jit traces, the number of columns, and so the default scale, is a tensor."""
    inputs = draw("cpu", requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(lambda *x: fa.attention(*x, backend="triton"), tuple(inputs), check_trace=False)
    more = [2 * x.detach() for x in inputs]
    assert_like(traced(*more), fa.reference.eager, *more)
