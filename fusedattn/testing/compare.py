"""Compares results and gradients of an attention function with eager PyTorch, by the tolerance rule."""

from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor

from .. import reference
from .tolerance import Results, Verdict, verdicts

INPUTS = ("query", "key", "value")
LEARNED = ("bias", "alibi_slopes", "sinks")  # options that have gradients


def with_gradients(
    function: Callable, tensors: Results, options: Mapping,
    grads: str = "out and lse", learned: Collection[str] = LEARNED, **call,
) -> dict[str, Tensor]:  # fmt: skip
    """Run a function like `attention` and its backward. Return {name: result, or gradient of an input}.

    Args:
        tensors: query, key and value; under "out", "lse" and "weights" the incoming gradients.
        options: options of the call.
        grads: names of results that the loss depends on, such as "out and lse". Weights are computed only if named.
        learned: names from LEARNED whose gradients are wanted, if present.
    """
    inputs = {name: tensors[name].detach().requires_grad_() for name in INPUTS}
    inputs |= {name: options[name].detach().requires_grad_() for name in learned if name in options}
    call |= dict(return_lse=True, return_weights="weights" in grads)
    outputs = dict(zip(("out", "lse", "weights"), function(**{**options, **inputs}, **call), strict=False))
    loss = {name: outputs[name] for name in outputs if name in grads}
    incoming = [tensors[name].to(outputs[name].dtype) for name in loss]
    # materialize_grads: a loss of lse alone does not depend on value.
    gradients = torch.autograd.grad([*loss.values()], [*inputs.values()], incoming, materialize_grads=True)
    return {name: x.detach() for name, x in outputs.items()} | dict(zip(inputs, gradients, strict=True))


def in_float64(tensors: Results) -> dict[str, Tensor]:
    return {name: x.double() for name, x in tensors.items()}


def _sizes_of_terms(tensors, options, grads, apply, lengths):
    """Return {name in LEARNED: largest norm of the terms that sum to an element of its gradient}, for `verdicts`."""
    if not any(name in options for name in LEARNED):
        return {}
    rows, keys = tensors["query"].shape[2], tensors["key"].shape[2]
    whole = (*tensors["query"].shape[:2], rows, keys)
    bias = options.get("bias", tensors["query"].new_zeros(1, 1)).double().expand(whole)
    ds = with_gradients(apply(reference.attention), in_float64(tensors), {**options, "bias": bias}, grads)["bias"]
    i, j = torch.arange(rows, device=ds.device)[:, None], torch.arange(keys, device=ds.device)[None, :]
    shift = 0 if options.get("align") == "top_left" else keys - rows
    if lengths is not None and options.get("align") != "top_left":
        own_rows, own_keys = (torch.tensor(each, device=ds.device) for each in lengths)
        shift = (own_keys - own_rows)[:, None, None, None]
    # Adding a number to a row's scores and sink adds it to the lse and changes no weight: its ds and dsink sum to dlse.
    dlse = tensors["lse"].double().nan_to_num(0, 0, 0) if "lse" in grads else ds.new_zeros(())
    terms = {"bias": ds, "alibi_slopes": ds * (i + shift - j).abs(), "sinks": (dlse - ds.sum(3))[..., None]}
    shapes = {name: (whole[1], 1, 1) if name != "bias" else options[name].shape for name in LEARNED if name in options}
    sums = {name: terms[name].square().sum_to_size(shape) for name, shape in shapes.items()}
    return {name: x.sqrt().max().item() for name, x in sums.items() if x.numel()}


def compare(
    got: Results, tensors: Results, options: dict, grads: str = "out and lse",
    apply: Callable = lambda function: function, lengths: tuple | None = None,
) -> dict[str, Verdict]:  # fmt: skip
    """Compare the results of `with_gradients` with eager PyTorch and float64, and return their Verdicts.

    Args:
        apply: turns `reference.attention` or `reference.eager` into the function that computed `got`.
        lengths: (rows, keys) of each batch, if some are shorter than the tensors.
    """
    learned = [name for name in LEARNED if name in got]
    eager = with_gradients(apply(reference.eager), tensors, options, grads, learned)
    exact = options | in_float64({name: x for name, x in options.items() if name in LEARNED})
    oracle = with_gradients(apply(reference.attention), in_float64(tensors), exact, grads, learned)
    return verdicts(got, eager, oracle, _sizes_of_terms(tensors, options, grads, apply, lengths))
