"""Names of torch that are not public: where one is gone the package is slower, and still right."""

import importlib
import os
import subprocess
import sys

import pytest
import torch

# Where each is. Without any of the first there are no replays; without the others they take longer.
FORBIDDING = {
    "_are_functorch_transforms_active": torch._C,
    "_is_any_autocast_enabled": torch._C,
    "_len_torch_dispatch_stack": torch._C,
    "_get_tracing_state": torch._C,
    "_current_level": torch.autograd.forward_ad,
}
SLOWING = {
    "_any_requires_grad": torch._C,
    "_AutoDispatchBelowAutograd": torch._C,
    "_has_storage": torch._C,
    "_cuda_getDevice": torch._C,
    "_ForceDispatchKeyGuard": torch._C,
    "TensorGuards": torch._C._dynamo.guards,
    "_empty_strided_cpu": torch._C._dynamo.guards,
    "_empty_strided_cuda": torch._C._dynamo.guards,
}


def _attend(fa, backend):
    """As many equal calls as it takes to replay one, its gradients, and a vmap; each as by the naive path."""
    inputs = [torch.randn(1, 1, 5, 16, requires_grad=True) for _ in range(3)]
    want = fa.reference.attention(*inputs, causal=True)
    for _ in range(3):
        got = fa.attention(*inputs, causal=True, backend=backend)
        torch.testing.assert_close(got, want, rtol=0, atol=2e-6)
    grads = zip(torch.autograd.grad(got.sum(), inputs), torch.autograd.grad(want.sum(), inputs), strict=True)
    for got, wanted in grads:
        torch.testing.assert_close(got, wanted, rtol=0, atol=2e-6)
    stacked = [torch.stack([x.detach(), x.detach()]) for x in inputs]
    got = torch.func.vmap(lambda *x: fa.attention(*x, causal=True, backend=backend))(*stacked)
    torch.testing.assert_close(got[1], want, rtol=0, atol=2e-6)


def without(names, backend):
    """Import the package where names are gone, in a process that has not imported it, and use it."""
    torch.set_num_threads(1)
    there = {name: getattr(owner, name) for name, owner in names.items() if hasattr(owner, name)}  # CUDA's may not be
    for name in there:
        delattr(names[name], name)
    fa = importlib.import_module("fusedattn")
    for name, value in there.items():
        setattr(names[name], name, value)  # torch itself needs it
    _attend(fa, backend)
    repeat = importlib.import_module("fusedattn.replay.cache")
    assert not repeat._recent and bool(repeat._known) == (backend is not None and names is SLOWING)


@pytest.mark.parametrize("group", ["FORBIDDING", "SLOWING"])
def test_names_that_are_gone_cost_time_and_nothing_else(group):
    interpreted = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
    backend = "triton" if interpreted else None
    code = f"from tests import conftest, test_private as t; t.without(t.{group}, {backend!r})"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr


def test_the_list_has_every_name_that_is_used():
    """And no other file reaches into torch past its public names."""
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    for folder, _, files in os.walk(os.path.join(root, "fusedattn")):
        for file in files:
            if file.endswith(".py") and file != "private.py":
                with open(os.path.join(folder, file)) as source:
                    text = source.read()
                for part in ("torch._C", "torch._dynamo", "._current_level", "._cdata", "_dynamo_marked"):
                    assert part not in text, f"{file}: {part} belongs into private.py"
    with open(os.path.join(root, "fusedattn", "private.py")) as source:
        said = source.read().split('"""')[1]
    assert [name for name in {**FORBIDDING, **SLOWING} if name not in said and name != "_empty_strided_cuda"] == []
