"""Recordings of the kernel launches of a call, made on meta tensors and replayed with other addresses.

Calls with the same shapes, strides, dtypes, device and numbers, and with addresses that are multiples of 16, launch the
same kernels on the same grids. Only the addresses differ, and a replay replaces them.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.runtime.driver import driver

from ..call.private import EMPTY, TorchDispatchMode, current_device, storage
from ..kernels.vocabulary.memory import View
from . import launcher, run as launch
from .failures import Unrecordable

_ALLOCATE = {f"aten::{name}" for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")}


class Recording(NamedTuple):
    """Recorded launches, to replay on the caller's tensors and on new ones that `run` allocates.

    made: ((shape, strides, dtype), fill value or None) of each new tensor. steps: (function, programs, arguments,
    views, others) of each launch. views: (argument index, tensor index, strides); others: (argument index, function of
    all tensors). A replay sets these arguments.
    """

    device: torch.device
    kind: str  # device.type
    interpreted: bool
    made: tuple
    steps: tuple

    def run(self, given: Sequence) -> list:
        """Allocate new tensors and launch the recorded kernels; return the given tensors and the new ones."""
        if self.interpreted or (self.kind == "cuda" and current_device() != self.device.index):
            with launch.surroundings(self.device):
                return self._run(given)
        return self._run(given)

    def _run(self, given: Sequence) -> list:
        make, tensors = EMPTY[self.kind], [*given]
        for (shape, strides, dtype), value in self.made:
            if value is None:
                tensors.append(make(shape, strides, dtype))
            else:
                tensors.append(torch.full(shape, value, dtype=dtype, device=self.device))
        stream = None if self.interpreted else driver.active.get_current_stream(self.device.index)
        for run, programs, arguments, views, others in self.steps:
            arguments = arguments.copy()
            for index, number, strides in views:  # not as others: a call for each would take a microsecond
                arguments[index] = tensors[number], strides
            for index, value in others:
                arguments[index] = value(tensors)
            run(programs, stream, arguments)
        return tensors


def _interpret(kernel, options, programs, stream, arguments):
    kernel[(programs,)](*arguments, **options)


class _LaunchesAlone(TorchDispatchMode):
    """Mode in which torch may only allocate and view tensors, because a replay repeats no computation by torch."""

    def __torch_dispatch__(self, operator, types, arguments=(), options=None):
        made = operator(*arguments, **(options or {}))
        if operator.name().partition(".")[0] not in _ALLOCATE:
            for x in made if isinstance(made, (tuple, list)) else [made]:
                # Inference mode also passes on `contiguous`, `reshape` and others, which may view or copy.
                if isinstance(x, Tensor) and not (operator.is_view and storage(x) == storage(arguments[0])):
                    raise Unrecordable(str(operator))
        return made


class Recorder(contextlib.ExitStack):
    """Collector of kernel launches of this thread inside the `with`, which runs on meta tensors; makes a Recording.

    A tensor is identified by its storage, and must begin where its storage begins. The first tensors are the caller's.
    """

    replayed = True

    def __init__(self, device: torch.device, given: Sequence):
        super().__init__()
        self.device, self.given = device, len(given)
        self.steps: list[tuple] = []
        # Each with the value that fills it, or None. Storages stay alive, so that no address is reused.
        self.tensors: list[tuple[Tensor, float | None]] = [(x, None) for x in given]
        self.numbers = {storage(x): number for number, x in enumerate(given)}

    def __enter__(self):
        self.enter_context(launch.surroundings(self.device))
        if self.replayed:
            self.enter_context(_LaunchesAlone())
        self.callback(delattr, launch.recording, "recorder")
        launch.recording.recorder = self
        return self

    def make(self, tensor: Tensor, value: float | None = None) -> Tensor:
        """Register and return a tensor that each replay must allocate and, unless None, fill with a value."""
        self.numbers[storage(tensor)] = len(self.tensors)
        self.tensors.append((tensor, value))
        return tensor

    def position(self) -> tuple[int, int]:
        return len(self.steps), len(self.tensors)

    def back(self, position: tuple[int, int]) -> None:
        """Forget the launches and tensors recorded since `position`."""
        steps, tensors = position
        for tensor, _ in self.tensors[tensors:]:
            del self.numbers[storage(tensor)]
        del self.steps[steps:], self.tensors[tensors:]

    def number(self, tensor: Tensor | None) -> Any:
        """Return the index of a tensor in the result of `Recording.run`, and register it if it is unknown."""
        if tensor is None:
            return None
        if tensor.storage_offset():
            raise Unrecordable("a part of a tensor")  # a recording addresses tensors by the beginning of their storage
        if storage(tensor) not in self.numbers:
            self.make(tensor if tensor._base is None else tensor._base)
        return self.numbers[storage(tensor)]

    def add(self, kernel, compiled, programs: int, arguments: dict, options: dict) -> None:
        """Record a kernel launch. compiled: the compiled kernel, None in the interpreter."""
        values: list = []
        views: list[tuple] = []
        others: list[tuple] = []
        ordered = [arguments[name] for name in kernel.arg_names]
        described = [value for value in ordered if launcher.is_descriptor(value)]
        numbers = [self.number(value.base) for value in described]
        encoders = launcher.encoders(compiled, described, numbers, self.device) if described and compiled else None
        rebased = [functools.partial(launcher.rebased, *each) for each in zip(described, numbers, strict=True)]
        encoding = iter(rebased if encoders is None else encoders)
        for value in ordered:
            if isinstance(value, View) and compiled is not None:  # a compiled kernel accepts a plain tuple
                views.append((len(values), self.number(value.base), value.strides))
                values.append(None)
                continue
            is_descriptor = launcher.is_descriptor(value)
            place = next(encoding) if is_descriptor else self._place(value)
            if place is not None:
                others.append((len(values), place))
            values.append(value if place is None else None)
            if is_descriptor and encoders is not None:
                values += [*value.shape, *value.strides]
        interpret = functools.partial(_interpret, kernel, options)
        run = interpret if compiled is None else launcher.launched(compiled, encodes=encoders is None)
        self.steps.append((run, programs, values, tuple(views), tuple(others)))

    def _place(self, value) -> Callable[[Sequence], Any] | None:
        """Return a function that makes a kernel argument from a replay's tensors; None if the argument is constant."""
        if isinstance(value, Tensor):
            number = self.number(value)
            if self.tensors[number][0].dtype == value.dtype or not launch.interpreting():
                return itemgetter(number)
            return lambda tensors: tensors[number].view(value.dtype)  # only the interpreter looks at the dtype
        places = [self._place(x) for x in value] if isinstance(value, tuple) else []
        if not any(places):
            return None
        new, kind = tuple.__new__, type(value)
        constant = [x if place is None else None for x, place in zip(value, places, strict=True)]
        others = [(i, place) for i, place in enumerate(places) if place is not None]

        def placed(tensors):
            parts = constant.copy()
            for i, place in others:
                parts[i] = place(tensors)
            return new(kind, parts)

        return placed

    def recording(self) -> Recording:
        made = tuple(((tuple(x.shape), x.stride(), x.dtype), value) for x, value in self.tensors[self.given :])
        return Recording(self.device, self.device.type, launch.interpreting(), made, tuple(self.steps))
