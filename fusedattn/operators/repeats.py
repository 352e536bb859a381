"""Repeats the kernel launches of an operator for other tensors of the same kind, without preparing them again.

dispatch/replay.py does so for a plain call as a whole. This serves the others: operators in compiled graphs, calls
under autocast, packed sequences, and caches.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, float32

from ..call.options import TENSORS, Call
from ..call.private import can_replay
from ..call.rules import in_memory
from ..launch.failures import KernelUnavailable, Unrecordable

MAX_KEPT = 1024  # limit on kept kinds of launches; then that of the longest ago is forgotten
RECORD_AFTER = 2  # record the second launch of a kind: recording takes as long as a first launch, and many never recur

# {kind and properties of the tensors: how often they were met, or (Recording, places of its results), or None if
# launches alone do not compute such a call}
_known: dict[tuple, Any] = {}


def forget() -> None:
    _known.clear()


def aligned(tensors: Sequence[Tensor]) -> bool:
    """Return whether all tensors have addresses that are multiples of 16, as recorded launches need."""
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


def without_data(tensors: Sequence[Tensor | None]) -> list[Any]:
    return [x if x is None else torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") for x in tensors]


def repeat(kind: Hashable, tensors: Sequence[Tensor | None], record: Callable[..., Any]) -> list[Tensor | None] | None:
    """Repeat the launches of an earlier call of a kind with other tensors, and return its results, or None.

    kind: what selects the launches besides shapes, strides and dtypes. record(recorder, tensors without data): launches
    kernels inside the Recorder, and returns the results.
    """
    there = [x for x in tensors if x is not None]
    if not can_replay or not in_memory(there) or not aligned(there):
        return None
    key = kind, *[None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in tensors]
    known = _known.pop(key, 0)
    if type(known) is int:
        known += 1
        known = known if known < RECORD_AFTER else _record(tensors, record)
        for oldest in list(_known)[: max(0, len(_known) + 1 - MAX_KEPT)]:
            _known.pop(oldest, None)  # another thread may have removed it
    _known[key] = known  # the last of the dictionary
    if known is None or type(known) is int:
        return None
    recording, places = known
    found = recording.run(there)
    return [None if place is None else found[place] for place in places]


def _record(tensors, record):
    """Return (Recording, places of its results), None if there is none, or 0 if another time there may be one."""
    from ..launch import recording, run

    if run.current_recorder() is not None:
        return 0
    bare = without_data(tensors)
    there = [x for x in bare if x is not None]
    device = next(x.device for x in tensors if x is not None)
    try:
        with recording.Recorder(device, there) as recorder:
            results = record(recorder, bare)
            return recorder.recording(), [recorder.number(x) for x in results]
    except Unrecordable:
        return None
    except KernelUnavailable:
        return 0  # an unrecorded launch warns, and takes another way
