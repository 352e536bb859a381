"""Tests that a backward raises if a saved tensor was changed in place, or computes the same gradients."""

import pytest
import torch

import fusedattn as fa

from ..inside import TRITON

B, Hq, Hkv, Sq, Sk, D = 2, 4, 2, 3, 5, 8


@pytest.fixture(params=["naive", "cpu", TRITON])
def backend(request):
    return request.param


INPUTS = "query", "key", "value"
LEARNED = dict(cpu=INPUTS, naive=(*INPUTS, "bias", "sinks", "alibi_slopes"))  # PyTorch's kernel has no other gradients


def drawn(packed, names, backend):
    learned = LEARNED["cpu" if backend == "cpu" else "naive"]
    rows, keys = (4, 4) if packed else (Sq, Sk)
    made = dict(mask=torch.rand(rows, keys) < 0.7, bias=torch.randn(rows, keys), seed=torch.tensor([3]))
    made |= dict(alibi_slopes=torch.randn(Hq), sinks=torch.randn(Hq))
    tokens = (6, 6) if packed else ((B, Sk), (B, Sq))
    made |= {name: torch.rand(size) < 0.8 for name, size in zip(("key_mask", "query_mask"), tokens, strict=True)}
    if packed:
        inputs = dict(query=torch.randn(6, Hq, D), key=torch.randn(6, Hkv, D), value=torch.randn(6, Hkv, D))
        inputs |= {f"cu_seqlens_{side}": torch.tensor([0, 2, 6], dtype=torch.int32) for side in "qk"}
    else:
        sizes = (Hq, Sq), (Hkv, Sk), (Hkv, Sk)
        names_of = zip(INPUTS, sizes, strict=True)
        inputs = {name: torch.randn(B, *size, D) for name, size in names_of}
    inputs |= {name: made[name] for name in names}
    return {name: x.requires_grad_() if name in learned else x for name, x in inputs.items()}


@torch.no_grad()
def change(x):
    if x.dtype == torch.bool:
        x.logical_not_()
    elif x.is_floating_point():
        x.mul_(2.0)
    else:
        x.add_(1)


def hold(inputs, name, results):
    """Assert that a change in place leaves gradients equal. Return True if the backward raises instead."""
    learned = [x for x in inputs.values() if x.requires_grad]
    incoming = [torch.ones_like(x) for x in results]
    before = torch.autograd.grad(results, learned, incoming, retain_graph=True)
    change((inputs | {"out": results[0].detach(), "last": results[-1].detach()})[name])
    try:
        after = torch.autograd.grad(results, learned, incoming)
    except RuntimeError as error:
        assert "modified" in str(error) and "inplace" in str(error).replace("in-place", "inplace"), error
        return True
    for was, now in zip(before, after, strict=True):
        assert torch.equal(now.nan_to_num(7.0), was.nan_to_num(7.0)), f"{name} was changed"
    return False


OPTIONS = [(), ("mask", "key_mask"), ("bias", "sinks", "alibi_slopes", "query_mask", "seed")]


@pytest.mark.parametrize("packed", [False, True], ids=["attention", "attention_varlen"])
@pytest.mark.parametrize("names", OPTIONS, ids=lambda names: " ".join(names) or "plain")
@pytest.mark.one_in(5)
def test_a_tensor_that_was_changed_gives_no_other_gradient(names, packed, backend):
    function, raised = fa.attention_varlen if packed else fa.attention, set()
    more = dict(dropout_p=0.5) if "seed" in names else {}
    for name in (*drawn(packed, names, backend), "out", "last"):
        inputs = drawn(packed, names, backend)
        if backend == "cpu" and "seed" in names:
            pytest.skip("PyTorch's kernel drops nothing")
        if hold(inputs, name, function(**inputs, **more, return_lse=True, backend=backend)):
            raised.add(name)
    assert raised >= set(INPUTS) or backend == "naive"  # the naive path may save copies


def test_a_call_that_is_like_an_earlier_one(backend):
    """The backward of a replayed call also notices changes in place: a replay saves its tensors by other code."""
    for name in (*INPUTS, "out"):
        for _ in range(3):
            inputs = drawn(False, (), backend)
            out = fa.attention(**inputs, causal=True, backend=backend)
            assert hold(inputs, name, (out,)) or name == "out"
