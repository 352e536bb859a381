"""bfloat16 on a CPU that cannot multiply it: computed in float32."""

import pytest
import torch

import fusedattn as fa
from fusedattn.cpu import tiling
from fusedattn.dispatch import replay
from fusedattn.testing.compare import with_gradients

from ..close import assert_close

OPTIONS = {
    "plain": {},
    "causal": dict(causal=True),
    "window": dict(window=(9, 4)),
    "key_mask": dict(key_mask=torch.arange(70) < torch.tensor([[70], [41]])),
    "sinks": dict(sinks=torch.randn(4)),
}


@pytest.fixture
def without_units(monkeypatch):
    monkeypatch.setattr(tiling, "multiplies_bfloat16", lambda: False)
    replay.forget()
    yield
    replay.forget()


@pytest.mark.parametrize("common", [0.0, 8.0], ids=["values", "values with a mean"])
@pytest.mark.parametrize("name", OPTIONS)
def test_output_and_gradients_are_as_good_as_eagers(name, common, without_units):
    torch.manual_seed(0)
    sizes = dict(query=(2, 4, 50, 32), key=(2, 2, 70, 32), value=(2, 2, 70, 24), out=(2, 4, 50, 24), lse=(2, 4, 50))
    tensors = {
        name: torch.randn(size).to(torch.float32 if name == "lse" else torch.bfloat16) for name, size in sizes.items()
    }
    tensors["value"] += common
    assert fa.explain(*(tensors[name] for name in ("query", "key", "value")), **OPTIONS[name]).backend == "cpu"
    assert_close(with_gradients(fa.attention, tensors, OPTIONS[name]), tensors, OPTIONS[name])
