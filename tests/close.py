"""The one tolerance rule, as an assertion: `fusedattn.tolerance` holds the rule itself."""

import torch

from fusedattn import reference
from fusedattn.tolerance import verdicts

INPUTS = ("query", "key", "value")


def with_gradients(function, tensors, options, grads="out and lse", **call):
    """{"out", "lse" and the gradients of "query", "key", "value"} of an attention function on the tensors of a case."""
    inputs = [tensors[name].detach().requires_grad_() for name in INPUTS]
    out, lse = function(*inputs, return_lse=True, **options, **call)
    outputs = {"out": out, "lse": lse}
    loss = {name: outputs[name] for name in outputs if name in grads}
    given = [tensors[name].to(outputs[name].dtype) for name in loss]
    found = torch.autograd.grad(list(loss.values()), inputs, given, allow_unused=True)
    # What the loss does not depend on has gradient 0: value, if the loss is made of lse alone.
    found = [torch.zeros_like(x) if grad is None else grad for x, grad in zip(inputs, found, strict=True)]
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip(INPUTS, found, strict=True))}


def in_float64(tensors):
    return {name: x.double() for name, x in tensors.items()}


def assert_close(got, tensors, options, grads="out and lse"):
    """`got`, from `with_gradients`, is as good as eager PyTorch in the inputs' dtype, measured against float64."""
    eager = with_gradients(reference.eager, tensors, options, grads)
    oracle = with_gradients(reference.attention, in_float64(tensors), options, grads)
    wrong = {name: verdict.why for name, verdict in verdicts(got, eager, oracle).items() if not verdict.ok}
    assert not wrong, wrong
