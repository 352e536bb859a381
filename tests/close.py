"""The one tolerance rule, as an assertion: `fusedattn.testing.tolerance` holds the rule itself."""

import copy

import torch
from torch.overrides import TorchFunctionMode

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


class InFloat64(TorchFunctionMode):
    """Converts to float64 where a model in float64 converts to float32: norms, softmax, rotary embeddings."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        func = torch.Tensor.double if func is torch.Tensor.float else func
        args = [torch.float64 if x is torch.float32 else x for x in args]
        kwargs = {name: torch.float64 if x is torch.float32 else x for name, x in (kwargs or {}).items()}
        return func(*args, **kwargs)


def exactly(function, model, *arguments, **options):
    """Return `function(model, ...)` with the model and floating inputs in float64: the oracle, where it is eager's."""
    model = copy.deepcopy(model).double()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # torch has no grouped product in float64
    with InFloat64():
        return function(model, *map(_double, arguments), **options)


def flat(tensors):
    """Return the elements of all tensors in one, None left out."""
    return torch.cat([x.flatten() for x in tensors if x is not None])


def _double(x):
    if isinstance(x, dict):
        return {name: _double(each) for name, each in x.items()}
    if isinstance(x, tuple):
        return tuple(map(_double, x))
    return x.double() if torch.is_tensor(x) and x.is_floating_point() else x
