"""The one tolerance rule, as an assertion: `fusedattn.tolerance` holds the rule itself."""

import torch

from fusedattn import reference
from fusedattn.tolerance import verdicts

INPUTS = ("query", "key", "value")
LEARNED = ("bias", "alibi_slopes", "sinks")  # options that have gradients


def with_gradients(function, tensors, options, grads="out and lse", **call):
    """{"out", "lse", "weights" and the gradients of what has one} of an attention function on the tensors of a case.

    grads names what the loss is made of; "weights" are computed only if it does.
    """
    inputs = {name: tensors[name].detach().requires_grad_() for name in INPUTS}
    inputs |= {name: options[name].detach().requires_grad_() for name in LEARNED if name in options}
    call |= dict(return_lse=True, return_weights="weights" in grads)
    results = function(**{**options, **inputs}, **call)
    outputs = dict(zip(("out", "lse", "weights"), results, strict=False))
    loss = {name: outputs[name] for name in outputs if name in grads}
    given = [tensors[name].to(outputs[name].dtype) for name in loss]
    found = torch.autograd.grad(list(loss.values()), list(inputs.values()), given, allow_unused=True)
    # What the loss does not depend on has gradient 0: value, if the loss is made of lse alone.
    found = {
        name: torch.zeros_like(x) if grad is None else grad
        for (name, x), grad in zip(inputs.items(), found, strict=True)
    }
    return {**{name: x.detach() for name, x in outputs.items()}, **found}


def in_float64(tensors):
    return {name: x.double() for name, x in tensors.items()}


def assert_close(got, tensors, options, grads="out and lse"):
    """`got`, from `with_gradients`, is as good as eager PyTorch in the inputs' dtype, measured against float64."""
    eager = with_gradients(reference.eager, tensors, options, grads)
    oracle = with_gradients(reference.attention, in_float64(tensors), options, grads)
    wrong = {name: verdict.why for name, verdict in verdicts(got, eager, oracle).items() if not verdict.ok}
    assert not wrong, wrong
