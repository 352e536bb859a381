"""What the schemas of operators share, and how an operator is computed."""

import torch

from ..call.form import DIFFERENTIABLE, Call, plain
from ..call.rules import fail
from ..cpu import run as cpu
from ..private import below_autograd
from . import flops

CALL = (  # the fields of a Call, in their order
    "Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor? alibi_slopes, Tensor? sinks, "
    "Tensor? mask, Tensor? key_mask, Tensor? query_mask, Tensor? seed, Tensor? block_mask, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
    "SymInt? left, SymInt? right, bool top_left, float scale, float? softcap, float dropout_p, "
    "SymInt? max_seqlen_q, SymInt? max_seqlen_k, bool deterministic, bool named, SymInt[]? origin, bool partial"
)
INPUTS = Call._fields[:DIFFERENTIABLE]
RESULTS = "out", "lse", "weights"  # that derivatives are taken of


def run_operator(operator, implementation, arguments):
    """What an operator computes: by the dispatcher, if something must see the operator, otherwise at once.

    The dispatcher also materialises tensors that are not what lies in memory. What comes this way has been checked.
    """
    if plain(arguments):
        return implementation(*arguments)
    flops.offer(operator)
    with below_autograd():
        return operator(*arguments)


def apply(function, arguments):
    """Apply an autograd Function.

    Python's `apply` reads the signature of `forward` in each call and looks for tensors that torch.func has left
    behind, which takes 70 us; a plain call goes to that of C++ at once.
    """
    if plain(arguments):
        return super(torch.autograd.Function, function).apply(*arguments)
    return function.apply(*arguments)


def stats_columns(dtype: torch.dtype, width: int, backend: str = "triton") -> int:
    """How many numbers a row has in the stats that a forward keeps for its backward, as `kernels` and `cpu` have them.

    Kernels: two of the softmax, and of 16-bit outputs, so many columns wide, what rounding took, a byte an element.
    """
    if backend == "cpu":
        return cpu.stats_columns(dtype, width)
    if backend == "naive":
        return 0
    return 2 + (-(-width // 4) if dtype.itemsize == 2 else 0)


def facts(tensors) -> list:
    """(shape, dtype) of each tensor, or None."""
    return [None if x is None else (x.shape, x.dtype) for x in tensors]


def check_saved(before: list, after: list) -> None:
    """Raise for saved tensors that came back from hooks with other `facts`: kernels would read outside of them."""
    for saved, came in zip(before, after, strict=True):
        if saved != came:
            expected = f"a tensor of {saved[1]} and shape {tuple(saved[0])} back, as it was saved"
            fail(ValueError, "saved_tensors_hooks", expected, f"{came[1]} and shape {tuple(came[0])}")
