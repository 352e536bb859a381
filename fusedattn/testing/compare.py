"""Runs an attention function beside eager PyTorch and float64, with gradients, and judges it by the tolerance rule."""

from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor

from .. import reference
from .tolerance import Verdict, verdicts

INPUTS = ("query", "key", "value")
LEARNED = ("bias", "alibi_slopes", "sinks")  # options that have gradients


def with_gradients(
    function: Callable,
    tensors: Mapping[str, Tensor],
    options: Mapping,
    grads: str = "out and lse",
    learned: Collection[str] = LEARNED,
    **call,
) -> dict[str, Tensor]:
    """Results of a function with the arguments of `attention`, and the gradients of a loss that is made of them.

    Args:
        tensors: {"query", "key", "value", "out", "lse", "weights": tensor}, the last three gradients of the loss.
        options: of the call. grads: names what the loss is made of; only if it names weights are they computed.
        learned: which of LEARNED have gradients, where they are there.
    Returns: {"out", "lse", "weights": result} and {name: gradient} of query, key, value, bias, alibi_slopes and sinks,
        as far as they are there.
    """
    inputs = {name: tensors[name].detach().requires_grad_() for name in INPUTS}
    inputs |= {name: options[name].detach().requires_grad_() for name in learned if name in options}
    call |= dict(return_lse=True, return_weights="weights" in grads)
    outputs = dict(zip(("out", "lse", "weights"), function(**{**options, **inputs}, **call), strict=False))
    loss = {name: outputs[name] for name in outputs if name in grads}
    given = [tensors[name].to(outputs[name].dtype) for name in loss]
    grads_of_inputs = torch.autograd.grad(list(loss.values()), list(inputs.values()), given, allow_unused=True)
    # What the loss does not depend on has gradient 0: value, if the loss is made of lse alone.
    gradients = {
        name: torch.zeros_like(x) if grad is None else grad
        for (name, x), grad in zip(inputs.items(), grads_of_inputs, strict=True)
    }
    return {**{name: x.detach() for name, x in outputs.items()}, **gradients}


def in_float64(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.double() for name, x in tensors.items()}


def _sizes_of_terms(tensors, options, grads, apply, lengths):
    """{name: the root of the sum of squares of the terms that the gradient of an option sums up, the largest}."""
    if not any(name in options for name in LEARNED):
        return {}
    rows, keys = tensors["query"].shape[2], tensors["key"].shape[2]
    whole = (*tensors["query"].shape[:2], rows, keys)
    bias = options.get("bias", tensors["query"].new_zeros(1, 1)).double().expand(whole)
    oracle = apply(reference.attention)
    ds = with_gradients(oracle, in_float64(tensors), {**options, "bias": bias}, grads)["bias"]
    i, j = torch.arange(rows, device=ds.device)[:, None], torch.arange(keys, device=ds.device)[None, :]
    shift = 0 if options.get("align") == "top_left" else keys - rows
    if lengths is not None and options.get("align") != "top_left":
        own_rows, own_keys = (torch.tensor(each, device=ds.device) for each in lengths)
        shift = (own_keys - own_rows)[:, None, None, None]
    # What is added to all scores of a row, the sink's with them, changes its lse alone.
    dlse = tensors["lse"].double().nan_to_num(0, 0, 0) if "lse" in grads else ds.new_zeros(())
    terms = {"bias": ds, "alibi_slopes": ds * (i + shift - j).abs(), "sinks": (dlse - ds.sum(3))[..., None]}
    shapes = {name: (whole[1], 1, 1) if name != "bias" else options[name].shape for name in LEARNED if name in options}
    return {name: terms[name].square().sum_to_size(shape).sqrt().max().item() for name, shape in shapes.items()}


def compare(
    got: Mapping[str, Tensor],
    tensors: Mapping[str, Tensor],
    options: dict,
    grads: str = "out and lse",
    apply: Callable = lambda function: function,
    lengths: tuple | None = None,
) -> dict[str, Verdict]:
    """Hold what `with_gradients` gave to the rule of `tolerance`.

    Args:
        apply: makes of a function like `attention` what `got` is held to. lengths: (of rows, of keys) of each batch,
            where not all of them are as long as the tensors.
    """
    learned = [name for name in LEARNED if name in got]
    eager = with_gradients(apply(reference.eager), tensors, options, grads, learned)
    exact = options | in_float64({name: x for name, x in options.items() if name in LEARNED})
    oracle = with_gradients(apply(reference.attention), in_float64(tensors), exact, grads, learned)
    return verdicts(got, eager, oracle, _sizes_of_terms(tensors, options, grads, apply, lengths))
