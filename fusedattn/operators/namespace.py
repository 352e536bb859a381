"""Registration of operators with torch, in a namespace named after the package.

The installed package has torch.ops.fusedattn. A copy in another package, such as mypkg._vendor.fusedattn, has
torch.ops.mypkg__vendor_fusedattn, so both can live in one process.
"""

from collections.abc import Callable
from typing import Any

import torch

from ..call.checks import fail
from ..call.decode import check_gradients
from ..call.options import Call, differentiated
from ..call.private import any_requires_grad, eager, forward_level, in_onnx_export, redispatch, transforms_active
from . import flops, repeats
from .schema import KERNELS, Signature, run_operator, save
from .vmap_rule import vmap_rule

NAME = __name__.rpartition(".operators.")[0].replace(".", "_")  # the namespace
LIBRARY = torch.library.Library(NAME, "FRAGMENT")  # operators live as long as this object does
OPERATORS = getattr(torch.ops, NAME)
_Run = Callable[..., Any]
_FOREIGN = {"cpu": KERNELS, "cuda": ("cpu",)}  # {device: backends of another device}
# Takes (call, backend of another device, whether the call has caches); returns a backend of the call's device.
# dispatch/backends.py sets it.
backend_here: Callable[[Call, str, bool], str] | None = None


def _facts(x):
    """Return the shape, strides, dtype and device of a tensor, or any other argument, in hashable form."""
    if isinstance(x, torch.Tensor):
        return x.shape, x.stride(), x.dtype, x.device
    return (*x,) if isinstance(x, list) else x


def register(
    schema: str, run: _Run, new: _Run, check: _Run, differentiate: _Run | None = None, decompose: _Run | None = None
) -> None:
    """Define an operator for CUDA and CPU tensors."""
    # run computes the operator. new is the fake: from tensors without data, it makes results of the same shapes, dtypes
    # and strides. check runs before both: it raises for arguments that `run` cannot take, and reads no tensor's values.
    # differentiate computes it with derivatives (torch's register_autograd drops tangents); None if it has none.
    # decompose computes it with torch's own operators, for ONNX, without branches on sizes.
    name, _, declared = schema.partition("(")
    types = [part.split(" ")[:2] for part in declared.partition(") -> ")[0].split(", ")]
    # torch accepts None even for a tensor that the schema requires.
    required = [(n, field) for n, (kind, field) in enumerate(types) if kind.startswith("Tensor") and "?" not in kind]
    places = {field: n for n, (_, field) in enumerate(types)}
    chosen, of = places["backend"], places.get("query", places.get("new_key"))
    passed = repeats.Learned()  # {shapes, strides, dtypes and devices of a call that passed the checks: None}

    def on_device(arguments):
        """Return the arguments with a backend of their device. An exported program may name that of another device."""
        if (x := arguments[of]) is None or arguments[chosen] not in _FOREIGN.get(x.device.type, ()):
            return arguments
        fields = dict(query=x, key=x, value=x) | {k: arguments[n] for k, n in places.items() if k in Call._fields}
        backend = backend_here(Call(**fields), arguments[chosen], "key_cache" in places)
        return *arguments[:chosen], backend, *arguments[chosen + 1 :]

    def check_all(*arguments):
        for n, field in required:
            if arguments[n] is None:
                fail(TypeError, field, "a tensor", "NoneType")
        check(*arguments)

    @eager  # if the caller's graph breaks in here, the compiler would trace the rest of this function
    def checked_run(*arguments):
        arguments = on_device(arguments)
        facts = tuple(map(_facts, arguments))
        if facts not in passed:
            check_all(*arguments)
            passed.keep(facts, None)
        return run(*arguments)

    def checked_new(*arguments):
        arguments = on_device(arguments)
        check_all(*arguments)
        return new(*arguments)

    def run_recorded(keyset, *arguments):
        flops.offer(operator)
        # Do not use torch's table of decompositions: if the environment sets CI, Inductor raises for entries of it.
        if decompose is not None and in_onnx_export():
            return decompose(*arguments)
        recorded = torch.is_grad_enabled() and any_requires_grad(*arguments)
        if recorded or (forward_level() >= 0 and differentiated(arguments)):
            if transforms_active():
                raise NotImplementedError(f"{NAME}::{name}: torch.func takes the function, not its operator")
            arguments = on_device(arguments)
            check_all(*arguments)  # before a Function saves the arguments
            if differentiate is not None:
                return differentiate(*arguments)
            check_gradients(dict(zip(places, arguments, strict=True)))
        return redispatch(operator.default, keyset, arguments)

    LIBRARY.define(schema)
    for key in ("CUDA", "CPU"):
        LIBRARY.impl(name, checked_run, key)
    torch.library.register_fake(f"{NAME}::{name}", checked_new, lib=LIBRARY)
    operator = getattr(OPERATORS, name)
    LIBRARY.impl(name, run_recorded, "Autograd", with_keyset=True)


class Node(torch.autograd.Function):
    """Autograd node of an operator, whose name, Signature, implementation and names of results a subclass declares."""

    operator: str
    signature: Signature
    implementation: _Run
    results: tuple[str, ...]

    @classmethod
    def forward(cls, *arguments):
        return run_operator(getattr(OPERATORS, cls.operator), cls.implementation, *arguments)

    @staticmethod
    def setup_context(ctx, inputs, output):
        save(ctx, inputs)

    @classmethod
    def vmap(cls, info, in_dims, *arguments):
        return vmap_rule(cls.apply, cls.signature.names, cls.results, info, in_dims, arguments)
