"""Registers operators with torch, in a namespace named after the package.

The namespace is the package's own name, torch.ops.fusedattn as installed. A copy in another package, such as
mypkg._vendor.fusedattn, has torch.ops.mypkg__vendor_fusedattn: so both live in one process.
"""

from collections.abc import Callable

import torch

from ..call.options import differentiated
from ..call.private import any_requires_grad, eager, forward_level, in_onnx_export, redispatch, transforms_active
from ..call.rules import fail
from . import flops

NAME = __name__.rpartition(".operators.")[0].replace(".", "_")  # of the package
LIBRARY = torch.library.Library(NAME, "FRAGMENT")  # at module level: operators live as long as it does
OPERATORS = getattr(torch.ops, NAME)
MOST = 1024  # facts of arguments that are remembered as right, before all are forgotten


_checks: dict[str, Callable] = {}  # of arguments, by the name of an operator
_decompositions: dict[str, Callable] = {}  # into torch's own operators, by the name of an operator


def _facts(x):
    """Return what a check may look at, as a hashable value."""
    if isinstance(x, torch.Tensor):
        return x.shape, x.stride(), x.dtype, x.device
    return (*x,) if isinstance(x, list) else x


def _once(check: Callable) -> Callable:
    """Return `check`, skipped for arguments with the same facts as earlier ones that passed."""
    known: set[tuple] = set()

    def checked(*arguments):
        facts = tuple(map(_facts, arguments))
        if facts not in known:
            check(*arguments)
            if len(known) >= MOST:
                known.clear()
            known.add(facts)

    return checked


def register(schema: str, run: Callable, new: Callable, check: Callable, decompose: Callable | None = None) -> None:
    """Define an operator that runs on CUDA tensors, and on CPU tensors in Triton's interpreter.

    Args:
        run: computes it. new: makes results of the same shapes, dtypes and strides, for tensors without data.
        check: raises for shapes, strides, dtypes, devices and numbers that `run` cannot take. It does not look at what
            tensors hold. Both are called after it.
        decompose: computes the same with torch's own operators, for ONNX; without branches on sizes.
    """
    name, _, declared = schema.partition("(")
    types = [part.split(" ")[:2] for part in declared.partition(") -> ")[0].split(", ")]
    # torch passes None for a tensor that a schema requires.
    required = [(n, field) for n, (kind, field) in enumerate(types) if kind.startswith("Tensor") and "?" not in kind]

    def check_all(*arguments):
        for n, field in required:
            if arguments[n] is None:
                fail(TypeError, field, "a tensor", "NoneType")
        check(*arguments)

    _checks[name] = check_all
    known = _once(check_all)

    @eager  # somebody's graph may break inside of it, and the compiler then take it for the next one
    def checked_run(*arguments):
        known(*arguments)
        return run(*arguments)

    def checked_new(*arguments):
        check_all(*arguments)
        return new(*arguments)

    LIBRARY.define(schema)
    for key in ("CUDA", "CPU"):
        LIBRARY.impl(name, checked_run, key)
    torch.library.register_fake(f"{NAME}::{name}", checked_new, lib=LIBRARY)
    if decompose is not None:
        _decompositions[name] = decompose


def register_derivative(name: str, differentiate: Callable) -> None:
    """Have `differentiate` take the calls of an operator that somebody may want a derivative of.

    torch's own register_autograd drops tangents in silence.
    """
    operator, decompose = getattr(OPERATORS, name), _decompositions.get(name)

    def run(keyset, *arguments):
        flops.offer(operator)
        # Not in torch's table of decompositions: where the environment sets CI, Inductor raises for what is in there.
        if decompose is not None and in_onnx_export():
            return decompose(*arguments)
        recorded = torch.is_grad_enabled() and any_requires_grad(*arguments)
        if recorded or (forward_level() >= 0 and differentiated(arguments)):
            if transforms_active():
                raise NotImplementedError(f"{NAME}::{name}: torch.func takes the function, not its operator")
            _checks[name](*arguments)  # before Functions, which compute at once, and keep what they are given
            return differentiate(*arguments)
        return redispatch(operator.default, keyset, arguments)

    LIBRARY.impl(name, run, "Autograd", with_keyset=True)
