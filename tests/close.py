"""The one tolerance rule, as assertions: `fusedattn.testing.tolerance` holds the rule itself."""

import copy

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from fusedattn.testing.compare import compare
from fusedattn.testing.tolerance import verdict


def assert_close(got, tensors, options, grads="out and lse", **of):
    """`got`, from `with_gradients`, is as good as eager PyTorch in the inputs' dtype, measured against float64."""
    found = compare(got, tensors, options, grads, **of)
    wrong = {name: verdict.why for name, verdict in found.items() if not verdict.ok}
    assert not wrong, wrong


def assert_as_good(got, eager, oracle, name="result"):
    """`got` is as good as `eager`, measured against `oracle`: the same computation by eager PyTorch in float64."""
    found = verdict(got, eager, oracle)
    assert found.ok, f"{name}: {found.why}"


def assert_like(got, want, *arguments):
    """Each tensor of `got` is as good as eager PyTorch's: `want(*arguments)`, or `want`, if that is in float64."""
    eager, oracle = (want(*arguments), exactly(want, *arguments)) if callable(want) else (want, want)
    for number, (x, *held_to) in enumerate(zip(*map(tree_leaves, (got, eager, oracle)), strict=True)):
        assert held_to[1].dtype == torch.float64, "only a function can be computed in float64 as well"
        # A gradient may be 0 by cancellation alone.
        found = verdict(x, *held_to, zero=torch.zeros(x.shape[:-1], dtype=torch.bool, device=x.device))
        assert found.ok, f"result {number}: {found.why}"


_AS_WIDE = {
    torch.Tensor.float: torch.Tensor.double,
    torch.tensor: lambda data, **more: torch.tensor(np.array(data), **more),  # numbers of Python stay float64
}


class InFloat64(TorchFunctionMode):
    """Computes in float64: each narrower tensor has a twin, which stands for it in all calls, autograd's included."""

    def __init__(self):
        super().__init__()
        self.twins = {}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        func = _AS_WIDE.get(func, func)
        args, kwargs = tree_map(self.twin, (args, kwargs or {}))
        return func(*args, **kwargs)

    def twin(self, x):
        if not torch.is_tensor(x) or not x.is_floating_point() or x.dtype is torch.float64:
            return torch.float64 if x is torch.float32 else x
        if id(x) not in self.twins:
            twin = x.detach().double()
            self.twins[id(x)] = x, twin.requires_grad_() if x.requires_grad else twin
        return self.twins[id(x)][1]


def exactly(function, *arguments, **options):
    """Return `function(...)` computed in float64, also of tensors that it closes over: the oracle, where it is eager's."""
    models = {id(x): copy.deepcopy(x).double() for x in arguments if isinstance(x, torch.nn.Module)}
    for model in models.values():
        if hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")  # torch has no grouped product in float64
    with InFloat64() as mode:
        return function(*(models.get(id(x)) or tree_map(mode.twin, x) for x in arguments), **options)


def flat(tensors):
    """Return the elements of all tensors in one, None left out."""
    return torch.cat([x.flatten() for x in tensors if x is not None])
