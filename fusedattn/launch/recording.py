"""Records the kernel launches of a call on meta tensors, and replays them with other addresses.

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

    made: ((shape, strides, dtype), None or the value that fills it) of each new tensor. steps: (function, programs,
    arguments, views, others) of each launch. A replay replaces arguments by views, (argument index, tensor number,
    strides), and by others, (argument index, function of all tensors).
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
            tensors.append(make(shape, strides, dtype) if value is None else self._full(shape, value, dtype))
        stream = None if self.interpreted else driver.active.get_current_stream(self.device.index)
        for run, programs, arguments, views, others in self.steps:
            arguments = arguments.copy()
            for index, number, strides in views:
                arguments[index] = tensors[number], strides
            for index, value in others:
                arguments[index] = value(tensors)
            run(programs, stream, arguments)
        return tensors

    def _full(self, shape, value, dtype):
        return torch.full(shape, value, dtype=dtype, device=self.device)


def _interpreted(kernel, options, views):
    def launched(programs, stream, arguments):
        for index, *_ in views:
            arguments[index] = View(*arguments[index])  # compiled kernels accept a plain tuple
        kernel[(programs,)](*arguments, **options)

    return launched


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
    """Collects kernel launches of this thread inside the `with`, which runs on meta tensors, and makes a Recording.

    A tensor is identified by its storage, and must begin where its storage begins. The first tensors are the caller's.
    """

    replayed = True

    def __init__(self, device: torch.device, given: Sequence):
        super().__init__()
        self.device, self.given = device, len(given)
        self.steps: list[tuple] = []
        self.tensors = list(given)  # keeps all storages alive, so that no address is reused
        self.numbers = {storage(x): number for number, x in enumerate(given) if x is not None}
        self.values: dict[int, float] = {}  # {number of a new tensor: the value that fills it}

    def __enter__(self):
        self.enter_context(launch.surroundings(self.device))
        if self.replayed:
            self.enter_context(_LaunchesAlone())
        self.callback(delattr, launch.recording, "recorder")
        launch.recording.recorder = self
        return self

    def make(self, tensor: Tensor, value: float | None = None) -> Tensor:
        """Register and return a tensor that each replay must allocate and, unless None, fill with a value."""
        if value is not None:
            self.values[len(self.tensors)] = value
        self.numbers[storage(tensor)] = len(self.tensors)
        self.tensors.append(tensor)
        return tensor

    def position(self) -> tuple[int, int]:
        return len(self.steps), len(self.tensors)

    def back(self, position: tuple[int, int]) -> None:
        """Forget the launches and tensors recorded since `position`."""
        steps, tensors = position
        for tensor in self.tensors[tensors:]:
            self.values.pop(self.numbers.pop(storage(tensor)), None)
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
        places = [self.number(value.base) for value in described]
        encoders = launcher.encoders(compiled, described, places, self.device) if described and compiled else None
        rebased = [functools.partial(launcher.rebased, *each) for each in zip(described, places, strict=True)]
        encoding = iter(rebased if encoders is None else encoders)
        for value in ordered:
            index = len(values)
            if isinstance(value, View):
                views.append((index, self.number(value.base), value.strides))
                values.append(None)
            elif launcher.is_descriptor(value):
                values += [None] if encoders is None else [None, *value.shape, *value.strides]
                others.append((index, next(encoding)))
            else:
                place = self._place(value)
                values.append(value if place is None else None)
                others += [] if place is None else [(index, place)]
        if compiled is None:
            run = _interpreted(kernel, options, views)
        else:
            run = launcher.launched(compiled, encodes=encoders is None)
        self.steps.append((run, programs, values, tuple(views), tuple(others)))

    def _place(self, value) -> Callable[[Sequence], Any] | None:
        """Return a function that makes a kernel argument from a replay's tensors; None if the argument is constant."""
        if isinstance(value, Tensor):
            number = self.number(value)
            if self.tensors[number].dtype == value.dtype or not launch.interpreting():
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
        new = list(enumerate(self.tensors))[self.given :]
        made = tuple(((tuple(x.shape), x.stride(), x.dtype), self.values.get(number)) for number, x in new)
        return Recording(self.device, self.device.type, launch.interpreting(), made, tuple(self.steps))
