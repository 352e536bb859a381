"""Tests that the package stays right, but becomes slower, if a private name of torch is missing."""

import importlib
import os
import pathlib
import re

import pytest
import torch

from . import conftest

# {name: its owner}. Without a name of FORBIDDING there are no replays; without a name of SLOWING replays are slower.
FORBIDDING = {"_current_level": torch.autograd.forward_ad} | dict.fromkeys(
    "_are_functorch_transforms_active _is_any_autocast_enabled _len_torch_dispatch_stack _get_tracing_state".split(),
    torch._C,
)
SLOWING = {"_softmax_backward_data": torch} | dict.fromkeys(
    "_any_requires_grad _AutoDispatchBelowAutograd _has_storage _cuda_getDevice _ForceDispatchKeyGuard".split(),
    torch._C,
)
SLOWING |= dict.fromkeys(("TensorGuards", "_empty_strided_cpu", "_empty_strided_cuda"), torch._C._dynamo.guards)
ASKED = {"_current_level"}  # looked up at each call, not at import; torch's compiler needs it


def _attend(fa, backend, put_back):
    """Repeat a call until it is replayed, then use vmap and compile; compare all results with eager PyTorch."""
    from .close import assert_as_good, exactly  # not at the top: close imports the package

    inputs = [torch.randn(1, 1, 5, 16, requires_grad=True) for _ in range(3)]

    def results(out):
        return out, *torch.autograd.grad(out.sum(), inputs)

    def want():
        return results(fa.reference.eager(*inputs, causal=True))

    exact = exactly(want)  # before the calls, as a change of the default dtype forgets replays
    eager = want()

    def held(*got):
        for each in zip(got, eager, exact, strict=False):
            assert_as_good(*each)

    def attend(*inputs):
        return fa.attention(*inputs, causal=True, backend=backend)

    for _ in range(3):
        held(*results(attend(*inputs)))
    put_back()
    held(*results(torch.compile(attend, backend="aot_eager")(*inputs)))
    stacked = [torch.stack([x.detach(), x.detach()]) for x in inputs]
    held(torch.func.vmap(attend)(*stacked)[1])


def without(names, backend):
    """Import the package without some private names of torch, in a new process, and use it."""
    torch.set_num_threads(1)
    there = {name: getattr(owner, name) for name, owner in names.items() if hasattr(owner, name)}  # CUDA has more
    for name in there:
        delattr(names[name], name)
    fa = importlib.import_module("fusedattn")

    def put_back(some):
        for name in some:
            setattr(names[name], name, there[name])  # torch itself needs the name

    put_back(there.keys() - ASKED)
    _attend(fa, backend, lambda: put_back(there.keys() & ASKED))
    repeat = importlib.import_module("fusedattn.dispatch.replay")
    assert not repeat._recent and bool(repeat._known) == (backend is not None and names is SLOWING)


@pytest.mark.matrix
@pytest.mark.parametrize("group", ["FORBIDDING", "SLOWING"])
def test_names_that_are_gone_cost_time_and_nothing_else(group):
    interpreted = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
    backend = "triton" if interpreted else None
    code = f"from tests import conftest, test_private as t; t.without(t.{group}, {backend!r})"
    conftest.run_python("-c", code)


# Private names of ours, of named tuples and of transformers. All others with an underscore are torch's.
OURS = r"_vendor|_replace|_asdict|_fields|_field_defaults|_known|_device|_leave_fast_path|_asks_\w*|_attn\w*|_run"
DOCUMENTED = r"_base|_modules|_parameters"  # attributes of tensors and modules


def test_the_list_has_every_name_that_is_used():
    root = pathlib.Path(__file__).parent.parent / "fusedattn"
    reached = re.compile(rf"(?<!self)(?<!cls)\.(?!(?:{OURS}|{DOCUMENTED})\b)_[a-zA-Z]\w*|_dynamo_marked|torch\._(?!_)")
    for path in sorted(root.rglob("*.py")):
        if path.name != "private.py":
            lines = [line for line in path.read_text().splitlines() if not re.match(r"\s*(from|import) ", line)]
            assert [line for line in lines if reached.search(line)] == []
    said = (root / "call" / "private.py").read_text()
    assert [name for name in {**FORBIDDING, **SLOWING} if name not in said] == []
