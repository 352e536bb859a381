"""Repeats the kernel launches of an operator for other tensors of the same kind, without preparing them again.

dispatch/replay.py repeats forwards of plain calls. This module repeats all backwards, and the forwards of other calls:
operators in compiled graphs, calls under autocast, packed sequences, and caches.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, float32

from ..call.options import TENSORS, Call
from ..call.private import can_replay
from ..call.rules import in_memory
from ..launch.failures import KernelUnavailable, Unrecordable

MAX_KEPT = 1024  # limit on kept kinds of calls; then a new one replaces the oldest
RECORD_AFTER = 2  # record the second launch of a kind: recording takes as long as a first launch, and many never recur


class Learned(dict[Any, Any]):
    """{kind of call: number of calls so far, or what `learn` made}. It has the MAX_KEPT kinds that `keep` got last."""

    def keep(self, kind: Hashable, value: Any) -> None:
        self.pop(kind, None)
        if len(self) >= MAX_KEPT:
            for oldest in list(self)[: len(self) + 1 - MAX_KEPT]:
                self.pop(oldest, None)  # another thread may have removed it
        self[kind] = value

    def learn(self, kind: Hashable, make: Callable[[], Any]) -> Any:
        """Count calls of a kind. Return what make() made in the RECORD_AFTER-th of them, or None before that."""
        # make() returns None if this kind cannot be recorded, and 0 to count from the start again.
        known = self.get(kind, 0)
        if type(known) is int:
            known = known + 1 if known + 1 < RECORD_AFTER else make()
        self.keep(kind, known)
        return None if type(known) is int else known


_known = Learned()  # {kind and properties of the tensors: (Recording, places of its results)}


def forget() -> None:
    _known.clear()


def aligned(tensors: Sequence[Tensor]) -> bool:
    """Return whether all tensors have memory, at multiples of 16 bytes, as recorded launches need."""
    for x in tensors:
        address = x.data_ptr()
        if address == 0 or address % 16:
            return False
    return True


def precision(tensor: Tensor) -> str | None:
    """Return how matrix products of a tensor's dtype may round, by torch's settings."""
    return torch.backends.cuda.matmul.fp32_precision if tensor.dtype is float32 else None


def facts(call: Call) -> tuple:
    """Return what selects the launches of a call, apart from its tensors."""
    others = [tuple(x) if isinstance(x, list) else x for x in call[len(TENSORS) :]]
    return precision(call.query), *others, *map(type, others)


def _key(kind: Hashable, tensors: Sequence[Tensor | None]) -> tuple | None:
    """Return a key of all calls with the same launches, None for a call whose launches cannot be repeated."""
    there = [x for x in tensors if x is not None]
    if not can_replay or not in_memory(there) or not aligned(there):
        return None
    return kind, *[None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in tensors]


def repeat(kind: Hashable, tensors: Sequence[Tensor | None], launch: Callable[..., Any]) -> list[Tensor | None] | None:
    """Repeat the launches of an earlier call of a kind with other tensors, and return its results, or None.

    kind: what selects the launches besides shapes, strides and dtypes. launch: as for `record`.
    """
    if (key := _key(kind, tensors)) is None:
        return None
    if (known := _known.learn(key, lambda: record(tensors, launch))) is None:
        return None
    recording, places = known
    found = recording.run([x for x in tensors if x is not None])
    return [None if place is None else found[place] for place in places]


def recorded(kind: Hashable, tensors: Sequence[Tensor | None]) -> Any:
    """Return (Recording, places of its results) of the calls that `repeat` repeats, or None."""
    known = _known.get(_key(kind, tensors))
    return None if type(known) is int else known


def record(tensors: Sequence[Tensor | None], launch: Callable[..., Any]) -> Any:
    """Return (Recording, places of its results), None if there can be none, or 0 if a later call may be recorded.

    launch(recorder, tensors without data): launches kernels inside the Recorder, and returns the results.
    """
    from ..launch import recording, run

    if run.current_recorder() is not None:
        return 0
    bare = [x if x is None else torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") for x in tensors]
    there = [x for x in bare if x is not None]
    device = next(x.device for x in tensors if x is not None)
    try:
        with recording.Recorder(device, there) as recorder:
            results = launch(recorder, bare)
            return recorder.recording(), [recorder.number(x) for x in results]
    except Unrecordable:
        return None
    except KernelUnavailable:
        return 0  # the launch that follows warns if the failure is new, and takes another way
