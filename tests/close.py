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


def sizes_of_terms(tensors, options, grads):
    """How large the terms are that the gradients of options sum up: {name: root of the sum of squares, the largest}."""
    if not any(name in options for name in LEARNED):
        return {}
    batch, heads, rows, keys = tensors["weights"].shape
    bias = options.get("bias", torch.zeros(1, 1)).double().to(tensors["query"].device).expand(batch, heads, rows, keys)
    found = with_gradients(reference.attention, in_float64(tensors), {**options, "bias": bias}, grads)
    ds = found["bias"]  # of the scores, pair by pair
    i, j = torch.arange(rows, device=ds.device)[:, None], torch.arange(keys, device=ds.device)[None, :]
    shift = 0 if options["align"] == "top_left" else keys - rows
    # What is added to all scores of a row, the sink's with them, changes its lse alone.
    dlse = tensors["lse"].double().nan_to_num(0, 0, 0) if "lse" in grads else torch.zeros(())
    terms = {"bias": ds, "alibi_slopes": ds * (i + shift - j).abs(), "sinks": dlse - ds.sum(3)}
    sizes = {}
    for name in LEARNED:
        if name in options:
            shape = options[name].shape if name == "bias" else (heads, 1) if name == "sinks" else (heads, 1, 1)
            sizes[name] = terms[name].square().sum_to_size(shape).sqrt().max().item()
    return sizes


def assert_close(got, tensors, options, grads="out and lse"):
    """`got`, from `with_gradients`, is as good as eager PyTorch in the inputs' dtype, measured against float64."""
    eager = with_gradients(reference.eager, tensors, options, grads)
    oracle = with_gradients(reference.attention, in_float64(tensors), options, grads)
    terms = sizes_of_terms(tensors, options, grads)
    wrong = {name: verdict.why for name, verdict in verdicts(got, eager, oracle, terms).items() if not verdict.ok}
    assert not wrong, wrong
