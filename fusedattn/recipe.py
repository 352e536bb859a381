"""What one kind of call launches: found out once, on tensors without data, and repeated on others of the same kind.

Of the same kind are tensors of the same shapes, strides and dtypes on the same device, at addresses that are multiples
of 16, with the same numbers beside them. Then the kernels, the grids and all of their arguments are the same, but for
the addresses: to repeat a call is to put these into their places.
"""

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._dynamo.guards import _empty_strided_cpu, _empty_strided_cuda  # type: ignore[attr-defined]
from triton import knobs
from triton.backends.nvidia import driver as nvidia
from triton.runtime.driver import driver

from . import hopper, launch
from .kernels.tiles import View

# Of (shape, strides, dtype), on the device that is current: in half the time that a tensor's own method takes.
EMPTY = {"cpu": _empty_strided_cpu, "cuda": _empty_strided_cuda}


class New(NamedTuple):
    """A tensor to be made: not one of the caller's."""

    shape: tuple
    strides: tuple
    dtype: torch.dtype


class Step(NamedTuple):
    """One launch, with what of its arguments depends on the tensors: (index of the argument, what to put there).

    views: the number of a tensor, and its strides. others: a function of all tensors.
    """

    launch: Callable
    programs: int
    arguments: list
    views: tuple
    others: tuple


class Recipe(NamedTuple):
    """Steps on `given` tensors of the caller's and those that are made before them; where, and by whom."""

    device: torch.device
    kind: str  # of device
    interpreted: bool
    made: tuple
    steps: tuple

    def run(self, given: Sequence) -> list:
        """Do it; returns the given tensors and the made ones, in one list."""
        if self.interpreted or (self.kind == "cuda" and torch._C._cuda_getDevice() != self.device.index):
            with launch.surroundings(self.device):
                return self._run(given)
        return self._run(given)

    def _run(self, given: Sequence) -> list:
        make = EMPTY[self.kind]
        tensors = [*given, *[make(*new) for new in self.made]]
        self.launch(tensors)
        return tensors

    def launch(self, tensors: Sequence) -> None:
        """The steps alone, on what `run` returns."""
        stream = None if self.interpreted else driver.active.get_current_stream(self.device.index)
        for run, programs, arguments, views, others in self.steps:
            arguments = arguments.copy()
            for index, number, strides in views:
                arguments[index] = tensors[number], strides
            for index, value in others:
                arguments[index] = value(tensors)
            run(programs, stream, arguments)


def _rebased(descriptor, tensor):
    """A descriptor of another tensor."""
    return dataclasses.replace(descriptor, base=tensor)


class _Encoded:
    """What the driver makes of a descriptor, of tensors that differ in their address alone: it stays what it is."""

    MOST = 256

    def __init__(self, descriptor, metadata):
        self.descriptor, self.metadata = descriptor, metadata
        self.known: dict[int, Any] = {}

    def __call__(self, tensor):
        address = tensor.data_ptr()
        found = self.known.get(address)
        if found is None:
            if len(self.known) >= self.MOST:
                self.known.clear()
            found, *_ = nvidia.make_tensordesc_arg(_rebased(self.descriptor, tensor), self.metadata)
            self.known[address] = found
        return found


def _without_encoding(kernel):
    """The launcher of a compiled kernel less the function that encodes descriptors each time; None if it is not known.

    That is how Triton 3.6 and 3.7 have it.
    """
    wrapped = getattr(kernel.run, "launch", None)
    names = getattr(getattr(wrapped, "__code__", None), "co_freevars", ())
    known = "launcher" in names and hasattr(nvidia, "make_tensordesc_arg")
    if not (known and getattr(kernel.metadata, "tensordesc_meta", None)):
        return None
    plain = copy.copy(kernel.run)
    plain.launch = wrapped.__closure__[names.index("launcher")].cell_contents
    return plain


def _compiled(kernel, run):
    """launch(programs, stream, arguments) of a compiled kernel, by its own `run`: what Triton's launch ends in.

    What that does before, 10 us of it, finds the kernel by the arguments. Hooks, such as a profiler's, are called.
    """
    function, packed = kernel.function, kernel.packed_metadata
    hooks = knobs.runtime

    def launched(programs, stream, arguments):
        enter, leave = hooks.launch_enter_hook, hooks.launch_exit_hook
        # A chain of hooks, empty or not, or one; or None.
        if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
            metadata = kernel.launch_metadata((programs, 1, 1), stream, *arguments)
            run(programs, 1, 1, stream, function, packed, metadata, enter, leave, *arguments)
        else:
            run(programs, 1, 1, stream, function, packed, None, None, None, *arguments)

    return launched


def _interpreted(kernel, options, views):
    def launched(programs, stream, arguments):
        for index, *_ in views:
            arguments[index] = View(*arguments[index])  # what is compiled takes any tuple for one
        kernel[(programs,)](*arguments, **options)

    return launched


class Recorder:
    """Keeps the launches on tensors without data, as `launch.recording` hands them over, as a Recipe.

    Tensors are known by their storage, and lie at its beginning: those that were `given`, `made` ones, and whatever
    else is met, which becomes a made one.
    """

    def __init__(self, device: torch.device, given: Sequence):
        self.device = device
        self.made: list[New] = []
        self.steps: list[Step] = []
        self.tensors = list(given)  # kept, so that no storage is used again
        self.numbers = {_storage(x): number for number, x in enumerate(given) if x is not None}

    def __enter__(self):
        self._within = contextlib.ExitStack()
        self._within.enter_context(launch.surroundings(self.device))
        self._within.enter_context(launch.recording(self))
        return self

    def __exit__(self, *error):
        self._within.close()

    def make(self, tensor: Tensor) -> Tensor:
        """A tensor of the recipe's own, as it will be made."""
        self.numbers[_storage(tensor)] = len(self.tensors)
        self.tensors.append(tensor)
        self.made.append(New(tuple(tensor.shape), tensor.stride(), tensor.dtype))
        return tensor

    def position(self) -> tuple[int, int]:
        """What `back` takes, to undo what comes after."""
        return len(self.steps), len(self.made)

    def back(self, position: tuple[int, int]) -> None:
        """Forget the steps since then, and the tensors that were made for them."""
        steps, made = position
        del self.steps[steps:]
        for tensor in self.tensors[len(self.tensors) - len(self.made) + made :]:
            del self.numbers[_storage(tensor)]
        del self.tensors[len(self.tensors) - len(self.made) + made :]
        del self.made[made:]

    def number(self, tensor: Tensor | None) -> int | None:
        """The place of a tensor among those that `Recipe.run` returns."""
        return None if tensor is None else self.numbers[_storage(tensor)]

    def add(self, kernel, programs: int, arguments: dict, options: dict) -> None:
        values: list = []
        views: list[tuple] = []
        others: list[tuple] = []
        compiled = None if launch.interpreting() else kernel.warmup(grid=(programs,), **arguments, **options)
        described = any(map(hopper.is_descriptor, arguments.values()))
        plain = _without_encoding(compiled) if described and compiled is not None else None
        encodings = iter(() if plain is None else compiled.metadata.tensordesc_meta)  # type: ignore[union-attr]
        for value in (arguments[name] for name in kernel.arg_names):
            index = len(values)
            if isinstance(value, View):
                views.append((index, self._number(value.base), value.strides))
                values.append(None)
            elif hopper.is_descriptor(value):
                number = self._number(value.base)
                if plain is None:
                    encode: Callable = functools.partial(_rebased, value)
                    values.append(None)
                else:
                    encode = _Encoded(value, next(encodings))
                    values += [None, *value.shape, *value.strides]
                others.append((index, lambda tensors, encode=encode, number=number: encode(tensors[number])))
            elif (place := self._place(value)) is not None:
                others.append((index, place))
                values.append(None)
            else:
                values.append(value)
        if compiled is None:
            run = _interpreted(kernel, options, views)
        else:
            run = _compiled(compiled, compiled.run if plain is None else plain)
        self.steps.append(Step(run, programs, values, tuple(views), tuple(others)))

    def _number(self, tensor):
        """`number` of a tensor in an argument: one that is not known is a buffer of the launches' own."""
        assert tensor.storage_offset() == 0, "a place in a recipe is the beginning of a tensor"
        if _storage(tensor) not in self.numbers:
            self.make(tensor if tensor._base is None else tensor._base)
        return self.numbers[_storage(tensor)]

    def _place(self, value) -> Callable[[Sequence], Any] | None:
        """What an argument is of all tensors; None if it is of none."""
        if isinstance(value, Tensor):
            number = self._number(value)
            if self.tensors[number].dtype == value.dtype or not launch.interpreting():
                return itemgetter(number)
            return lambda tensors: tensors[number].view(value.dtype)  # what is compiled takes an address for what it is
        places = [self._place(x) for x in value] if isinstance(value, tuple) else []
        if not any(places):
            return None
        new, kind = tuple.__new__, type(value)
        parts = [(lambda tensors, x=x: x) if place is None else place for x, place in zip(value, places, strict=True)]
        return lambda tensors: new(kind, [part(tensors) for part in parts])

    def recipe(self) -> Recipe:
        return Recipe(self.device, self.device.type, launch.interpreting(), tuple(self.made), tuple(self.steps))


def _storage(tensor):
    return tensor.untyped_storage()._cdata
