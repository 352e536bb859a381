"""Recorded kernel launches of operators, repeated on tensors that differ only in address and content.

dispatch/replay.py repeats plain calls, and their backwards once this module has recorded them. This module repeats the
other backwards and forwards: operators in compiled graphs, calls under autocast, packed sequences, and caches.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, float32

from ..call.checks import in_memory
from ..call.options import TENSORS, Call, tensors as tensors_of, with_tensors
from ..call.private import can_replay
from ..launch.failures import KernelUnavailable, Unrecordable

MAX_KEPT = 1024  # kinds of calls to keep; then a new kind replaces the oldest
RECORD_AFTER = 2  # record a kind's second call: recording takes as long as a first launch, and many kinds never recur


class Learned(dict[Any, Any]):
    """Table {kind of call: number of calls so far, or what `learn` made} of the last MAX_KEPT kinds."""

    def keep(self, kind: Hashable, value: Any) -> None:
        self.pop(kind, None)
        if len(self) >= MAX_KEPT:
            for oldest in list(self)[: len(self) + 1 - MAX_KEPT]:
                self.pop(oldest, None)  # another thread may have removed it
        self[kind] = value

    def learn(self, kind: Hashable, make: Callable[[], Any]) -> Any:
        """Count calls of a kind, and call make() in the RECORD_AFTER-th. Return None before it, then the result."""
        # make() returns None if this kind cannot be recorded, and 0 to count from the start again.
        known = self.get(kind, 0)
        if type(known) is int:
            known = known + 1 if known + 1 < RECORD_AFTER else make()
        self.keep(kind, known)
        return None if type(known) is int else known


_known = Learned()  # {kind and properties of the tensors: result of `record`}


def forget() -> None:
    _known.clear()


def aligned(tensors: Sequence[Tensor]) -> bool:
    """Return whether all addresses are multiples of 16 and not null, as recorded launches need."""
    for x in tensors:
        address = x.data_ptr()
        if address == 0 or address % 16:
            return False
    return True


def precision(tensor: Tensor) -> str | None:
    """Return torch's setting for float32 matrix products on GPUs, such as "tf32"; None for other dtypes."""
    return torch.backends.cuda.matmul.fp32_precision if tensor.dtype is float32 else None


def _key(kind: Hashable, call: Call, tensors: Sequence[Tensor | None]) -> tuple | None:
    """Return a key that all calls with the same launches share; None if the launches cannot be repeated."""
    there = [x for x in tensors if x is not None]
    if not can_replay or not in_memory(there) or not aligned(there):
        return None
    numbers = [tuple(x) if isinstance(x, list) else x for x in call[len(TENSORS) :]]
    properties = [None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in tensors]
    return kind, precision(call.query), *numbers, *map(type, numbers), *properties


def repeat(kind: Hashable, call: Call, more: Sequence[Tensor | None], launch: Callable[..., Any]) -> list | None:
    """Repeat an earlier call's launches on these tensors, and return the results; None if none are recorded.

    The RECORD_AFTER-th call is recorded. kind: what selects launches besides the Call and the tensors `more`. launch:
    as for `record`.
    """
    tensors = *tensors_of(call), *more
    if (key := _key(kind, call, tensors)) is None:
        return None
    if (known := _known.learn(key, lambda: record(call, more, launch))) is None:
        return None
    recording, places = known
    found = recording.run([x for x in tensors if x is not None])
    return [None if place is None else found[place] for place in places]


def recorded(kind: Hashable, call: Call, more: Sequence[Tensor | None]) -> Any:
    """Return what `record` returned for a call of this kind, (Recording, places of its results), or None."""
    known = _known.get(_key(kind, call, (*tensors_of(call), *more)))
    return None if type(known) is int else known


def record(call: Call, more: Sequence[Tensor | None], launch: Callable[..., Any]) -> Any:
    """Return (Recording, places of its results), None if none is possible, or 0 if a later call may be recorded.

    places: indices in what Recording.run returns. launch(recorder, the Call on meta tensors, *more on meta) launches
    kernels, and returns results.
    """
    from ..launch import recording, run

    if run.current_recorder() is not None:
        return 0
    tensors = *tensors_of(call), *more
    bare = [x if x is None else torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") for x in tensors]
    there = [x for x in bare if x is not None]
    try:
        with recording.Recorder(call.query.device, there) as recorder:
            results = launch(recorder, with_tensors(call, bare[: len(TENSORS)]), *bare[len(TENSORS) :])
            return recorder.recording(), [recorder.number(x) for x in results]
    except Unrecordable:
        return None
    except KernelUnavailable:
        return 0  # the launch that follows warns if the failure is new, and takes another way
