"""Assertions by the only rule of tolerance, which is in `fusedattn.testing.tolerance`."""

import copy

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

import fusedattn as fa
from fusedattn.testing.compare import LEARNED, compare, with_gradients
from fusedattn.testing.tolerance import verdict

from .sequences import by_sequence


def assert_ok(found):
    wrong = {name: verdict.why for name, verdict in found.items() if not verdict.ok}
    assert not wrong, wrong


def assert_close(got, tensors, options, grads="out and lse", **of):
    """Assert that results are as exact as eager PyTorch's in the same dtype, measured against float64."""
    assert_ok(compare(got, tensors, options, grads, **of))


def assert_computes(function, tensors, options, grads="out and lse", learned=LEARNED, lengths=None, **call):
    """Assert by `assert_close` that a function computes a call and its gradients, sequence by sequence if packed.

    lengths: (rows, keys) of packed sequences. Returns the results.
    """
    got = with_gradients(function, tensors, options, grads, learned, **call)
    of = {} if lengths is None else dict(apply=lambda function: by_sequence(function, *lengths), lengths=lengths)
    assert_close(got, tensors, options, grads, **of)
    return got


def assert_case(case, device="cpu", function=fa.attention, **more):
    tensors, options = case.draw(device)
    return assert_computes(function, tensors, options, case.grads, **more)


def assert_as_good(got, eager, oracle, name="result"):
    """Assert that `got` is as exact as `eager`, measured against `oracle`, eager PyTorch's result in float64."""
    found = verdict(got, eager, oracle)
    assert found.ok, f"{name}: {found.why}"


def assert_like(got, want, *arguments):
    """Assert that tensors are as exact as eager PyTorch's `want(*arguments)`, or match `want` itself, in float64."""
    eager, oracle = (want(*arguments), exactly(want, *arguments)) if callable(want) else (want, want)
    results = list(zip(*map(tree_leaves, (got, eager, oracle)), strict=True))
    # All results are judged together: the error of eager for a few elements is up to chance.
    together = [torch.cat([x.flatten().double() for x in each]) for each in zip(*results, strict=True)]
    for number, each in enumerate(results):
        assert each[2].dtype == torch.float64 and each[0].shape == each[2].shape
        few = each[2].numel() < 32
        x, *held_to = together if few else each
        # A gradient may be 0 because all its terms cancel.
        zero = torch.zeros(x.shape[:-1], dtype=torch.bool, device=x.device)
        found = verdict(x, *held_to, zero=zero, dtype=each[0].dtype)
        assert found.ok, f"result {number}: {found.why}"


class InFloat64(TorchFunctionMode):
    """Function mode that computes in float64: each narrower tensor is replaced by a float64 copy, in autograd too."""

    def __init__(self):
        super().__init__()
        self.twins = {}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        func = torch.Tensor.double if func is torch.Tensor.float else func
        dtype = (kwargs or {}).get("dtype", torch.float32)
        args, kwargs = tree_map(self.twin, (args, kwargs or {}))
        if func in (torch.rand, torch.randn):
            kwargs["dtype"] = dtype  # widening keeps the values
        return func(*args, **kwargs)

    def twin(self, x):
        if not torch.is_tensor(x) or not x.is_floating_point() or x.dtype is torch.float64:
            return torch.float64 if x is torch.float32 else x
        if id(x) not in self.twins:
            twin = x.detach().double()
            self.twins[id(x)] = x, twin.requires_grad_() if x.requires_grad else twin
        return self.twins[id(x)][1]


def exactly(function, *arguments, **options):
    """Return `function(...)` computed in float64, also for tensors that it closes over."""
    models = {id(x): copy.deepcopy(x).double() for x in arguments if isinstance(x, torch.nn.Module)}
    for model in models.values():
        if hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")  # torch has no grouped product in float64
    torch.set_default_dtype(torch.float64)
    try:
        mode = InFloat64()
        given = [models.get(id(x)) or tree_map(mode.twin, x) for x in arguments]
        with mode:
            results = function(*given, **options)
        return tree_map(mode.twin, results)
    finally:
        torch.set_default_dtype(torch.float32)


def flat(tensors):
    return torch.cat([x.flatten() for x in tensors if x is not None])
