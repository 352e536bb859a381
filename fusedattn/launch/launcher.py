"""Loading of compiled kernels, and launches as direct as this version of Triton allows.

What we assume about Triton's launcher is in this file, and is checked before use. If this version of Triton differs,
its public `compiled[grid](...)` launches.
"""

import copy
import dataclasses
import functools
import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.backends.nvidia import driver as nvidia
from triton.runtime import JITFunction

# Parameters of `compiled.run` in Triton 3.6, and in 3.7. The kernel's arguments follow.
_RUN = ("gridX", "gridY", "gridZ", "stream", "function")
_RUN_NOW = (*_RUN, "kernel_metadata", "launch_metadata", "launch_enter_hook", "launch_exit_hook")
MOST_ADDRESSES = 256  # limit on cached encodings of a descriptor; at the limit all are dropped
_loading = threading.Lock()
_hashed: set[int] = set()  # the id of each function that `_hash` has seen


def _hash(function: object) -> None:
    """Make Triton hash a function for its disk cache, after all functions that it calls."""
    # Before Triton 3.9 a hash includes only the constants of callees that were hashed earlier. Processes with different
    # first calls would then not share the cache: triton-lang/triton#10494.
    if not isinstance(function, JITFunction) or id(function) in _hashed:
        return
    _hashed.add(id(function))
    names, scope = function.fn.__code__.co_names, function.fn.__globals__
    for value in map(scope.get, names):
        for callee in [vars(value).get(name) for name in names] if inspect.ismodule(value) else [value]:
            _hash(callee)
    function.cache_key  # noqa: B018 - a property that hashes


def load(kernel, programs: int, arguments: dict, options: dict):
    """Compile and load a kernel for these arguments. Raise whatever Triton raises."""
    with _loading:
        _hash(kernel)
    compiled = kernel.warmup(grid=(programs,), **arguments, **options)
    run = None
    with _loading:
        try:
            run = compiled.run  # a property: its first use sets compiled._run, then loads the kernel
        finally:
            if run is None:
                compiled._run = None  # otherwise the kernel counts as loaded the next time
    if isinstance(run, functools.partial):
        run()  # raises the error of the first load
    return compiled


@functools.lru_cache(maxsize=4096)  # `inspect.signature` takes longer than a launch
def launched(compiled, encodes: bool = True) -> Callable:
    """Return a function (programs, stream, arguments) that launches a loaded kernel and calls profilers' hooks."""
    # encodes: whether to encode TMA descriptors. Otherwise the arguments hold encoded descriptors (`encoders`).
    if (run := _run_of(compiled)) is None:
        return lambda programs, stream, arguments: compiled[(programs, 1, 1)](*arguments, stream=stream)
    if not encodes:
        run = copy.copy(run)
        run.launch = _launcher_of(run)  # the one that run.launch calls with encoded descriptors
    function, packed, hooks = compiled.function, compiled.packed_metadata, knobs.runtime

    def launch(programs, stream, arguments):
        enter, leave = hooks.launch_enter_hook, hooks.launch_exit_hook
        # Each of the two is None, a hook, or a chain of hooks, which may be empty.
        if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
            metadata = compiled.launch_metadata((programs, 1, 1), stream, *arguments)
            run(programs, 1, 1, stream, function, packed, metadata, enter, leave, *arguments)
        else:
            run(programs, 1, 1, stream, function, packed, None, None, None, *arguments)

    return launch


def _run_of(compiled) -> Any:
    if not all(hasattr(compiled, name) for name in ("function", "packed_metadata", "launch_metadata")):
        return None
    *named, rest = inspect.signature(compiled.run).parameters.values()
    known = tuple(x.name for x in named) in (_RUN, _RUN_NOW) and rest.kind is inspect.Parameter.VAR_POSITIONAL
    return compiled.run if known else None


def _launcher_of(run) -> Any:
    """Return Triton's inner launcher, which takes encoded descriptors; None if `run` does not wrap one."""
    wrapped: Any = getattr(run, "launch", None)
    names = getattr(getattr(wrapped, "__code__", None), "co_freevars", ())
    return wrapped.__closure__[names.index("launcher")].cell_contents if "launcher" in names else None


def is_descriptor(value) -> bool:
    return hasattr(value, "block_shape")


def rebased(descriptor, place: int, tensors: Sequence[Tensor]):
    return dataclasses.replace(descriptor, base=tensors[place].view(descriptor.base.dtype))


def _encoder(descriptor, place: int, encode: Callable) -> Callable[[Sequence[Tensor]], Any]:
    """Return a function that encodes a descriptor for tensors[place], of the same layout, and caches the result."""
    known: dict[int, Any] = {}

    def encoded(tensors):
        address = tensors[place].data_ptr()
        if (result := known.get(address)) is None:
            if len(known) >= MOST_ADDRESSES:
                known.clear()
            known[address] = result = encode(rebased(descriptor, place, tensors))[0]
        return result

    return encoded


def encoders(compiled, descriptors: Sequence, places: Sequence[int], device: torch.device) -> list[Callable] | None:
    """Return an `_encoder` for each descriptor; None if this version of Triton encodes descriptors differently."""
    # Shape and strides must follow each descriptor as arguments. Check this with a tensor of the device.
    run, kinds = _run_of(compiled), getattr(compiled.metadata, "tensordesc_meta", None)
    if run is None or _launcher_of(run) is None or not kinds or len(kinds) != len(descriptors) or None in kinds:
        return None
    make = getattr(nvidia, "make_tensordesc_arg", None)
    unused = -1 if make is None else len(inspect.signature(make).parameters) - 2  # Triton 3.8 added a parameter
    if unused not in (0, 1):
        return None
    encoded = []
    for descriptor, place, kind in zip(descriptors, places, kinds, strict=True):

        def encode(descriptor, kind=kind):
            return make(descriptor, kind, *(None,) * unused)

        _, *rest = encode(rebased(descriptor, 0, [torch.empty(16, dtype=descriptor.base.dtype, device=device)]))
        if rest != [*descriptor.shape, *descriptor.strides]:
            return None
        encoded.append(_encoder(descriptor, place, encode))
    return encoded
