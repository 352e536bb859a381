"""Runs whole calls of the package, forward and backward, on an emulated GPU, and checks results by our tolerance."""

import contextlib
import copy
import functools
import itertools
from typing import NamedTuple
from unittest import mock

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fusedattn as fa
from fusedattn.dispatch import replay
from fusedattn.launch import hopper, run, tile_table
from fusedattn.testing.compare import compare, with_gradients
from fusedattn.testing.tolerance import verdicts

from .. import caches, sequences, tangents
from ..caches import Cached
from ..offline import absent
from .device import Device, gpu
from .memory import sparse

# LLVM moves writes behind a `wgmma.fence`, and ptxas moves them back: see `unfenced` in `tests/offline/hazards.py`.
HARMLESS = ("unfenced",)


class Outcome(NamedTuple):
    """Result of an executed call: {result: Verdict}, the Device with its launches, and {result: tensor}."""

    verdicts: dict
    device: Device
    results: dict

    def wrong(self):
        """Return one text for each wrong result, and for each launch in which the emulator found errors."""
        found = [f"{name}: {verdict.why}" for name, verdict in self.verdicts.items() if not verdict.ok]
        for launch in self.device.launches:
            kinds = [kind for kind in launch.report.found if kind not in HARMLESS]
            if kinds:
                found.append(f"{launch.name} {launch.grid}\n{launch.report}")
        return found


def _far(tensor, axis, apart):
    """Return a copy whose heads (axis 1) or rows (axis 2) lie `apart` elements apart in a sparse buffer."""
    batch, heads, rows, columns = tensor.shape
    head, row = (apart, columns) if axis == 1 else (columns, apart)
    plane = tensor.shape[axis] * apart
    size = (batch * plane + heads * rows * columns) * tensor.itemsize
    whole = torch.from_numpy(sparse(size, np.uint8)).view(tensor.dtype)
    return whole.as_strided(tensor.shape, (plane, head, row, 1)).copy_(tensor)


class _Moved(torch.autograd.Function):
    """Differentiable `_far` of a packed (T, H, D) tensor: a copy whose heads or rows lie far apart in memory."""

    @staticmethod
    def forward(ctx, tensor, far):
        return _far(tensor.transpose(0, 1)[None], *far)[0].transpose(0, 1)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def _packed_far(far, backend):
    """Return `fa.attention_varlen` with query, key and value copied by `_far`."""

    def attend(*tensors, **options):
        moved = (_Moved.apply(x, far) for x in tensors[:3])
        return fa.attention_varlen(*moved, *tensors[3:], **options, backend=backend)

    return attend


@contextlib.contextmanager
def other_tiles(number):
    """Make kernels use the tile or pipeline at index `number` of their row in the tile table, or the row's last.

    A Hopper kernel whose first tiles do not fit beside a bias uses the first that does, or a later one.
    """
    candidates, form = run.candidates, run.form_on_hopper

    def others(name, call):
        found = candidates(name, call)
        return found[min(number, len(found) - 1) :]

    def other(name, call):
        if (own := form(name, call)) is None:
            return None
        row = tile_table.ON_HOPPER[name][hopper.row_width(call)]
        fitting = [x for x in row if hopper.fits(call, x)]
        return fitting[min(max(number, fitting.index(own)), len(fitting) - 1)]

    with mock.patch.object(run, "candidates", others), mock.patch.object(run, "form_on_hopper", other):
        yield


class _ByTf32(TorchDispatchMode):
    """Dispatch mode in which float32 matrix products ignore the last 13 bits of their operands, as tf32 does."""

    def __torch_dispatch__(self, operator, types, arguments=(), options=None):
        if operator in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default):
            arguments = [
                (x.view(torch.int32) & ~0x1FFF).view(x.dtype) if x.dtype is torch.float32 else x for x in arguments
            ]
        return operator(*arguments, **(options or {}))


def _attention(entry, device):
    """Call attention as an Entry says. Return its results, and a function that compares them and returns verdicts."""
    case, lengths = entry.case, entry.lengths
    tensors, given = case.draw()
    if entry.tf32:  # what all keys share must cancel in the gradient of the query
        tensors |= {name: tensors[name] + 3 for name in ("key", "value")}
    planned = dict(mask=fa.plan(given["mask"])) if entry.plan else {}
    attend = functools.partial(fa.attention, backend=entry.backend)
    if lengths is not None:
        attend = sequences.attention_varlen(*lengths, backend=entry.backend)
        for name, (b, n) in itertools.product(("query", "out", "lse"), enumerate(lengths[0])):
            tensors[name][b, :, n:] = 0
        if entry.far is not None:
            attend = sequences.packed(_packed_far(entry.far, entry.backend), *lengths)
    elif entry.far is not None:
        tensors = {name: _far(x, *entry.far) if x.dim() == 4 else x for name, x in tensors.items()}
    two_passes = mock.patch.object(torch, "are_deterministic_algorithms_enabled", lambda: entry.two_passes)
    multiprocessors = mock.patch.object(run, "multiprocessors", lambda device: entry.multiprocessors)
    with absent.rounding("tf32" if entry.tf32 else "ieee"), two_passes, multiprocessors:
        for _ in range(entry.times):
            device.launches.clear()
            got = with_gradients(attend, tensors, given | planned, case.grads)

    def judge():
        if lengths is None:
            with _ByTf32() if entry.tf32 else contextlib.nullcontext():
                return compare(got, tensors, given, case.grads)
        apply = functools.partial(sequences.by_sequence, rows=lengths[0], keys=lengths[1])
        return compare(got, tensors, given, case.grads, apply, lengths)

    return got, judge


def _decode(entry, device):
    """Call attention with a cache as an Entry says, and return the same pair as `_attention`."""
    arguments = entry.case.draw()
    untouched = copy.deepcopy(arguments)
    if entry.far is not None:
        floats = [name for name, x in arguments.items() if isinstance(x, torch.Tensor) and x.dim() == 4]
        arguments |= {name: _far(arguments[name], *entry.far) for name in floats}
    out, lse = fa.attention_decode(**arguments, return_lse=True, backend=entry.backend)
    names = "key_cache", "value_cache"
    got = dict(out=out, lse=lse) | {name: arguments[name] for name in names}
    if entry.far is not None:  # reading all of a sparse cache would allocate it
        arguments = arguments | {name: arguments[name].contiguous() for name in names}
        got |= {name: arguments[name] for name in names}

    def judge():
        eager, oracle, expected = caches.truths(untouched)
        caches.assert_written(arguments, {name: caches.bits(untouched[name]) for name in names}, expected)
        return verdicts(dict(out=out, lse=lse), *({name: x[name] for name in ("out", "lse")} for x in (eager, oracle)))

    return got, judge


def _tangents(entry, device):
    """Compute the tangents of an Entry in one direction of all inputs, and return the same pair as `_attention`."""
    tensors, given = entry.case.draw()
    moved = tangents.directions(tensors, given)
    attend = functools.partial(fa.attention, backend=entry.backend)
    got = tangents.with_tangents(attend, tensors, given, moved)
    return got, lambda: tangents.compare(got, tensors, given, moved)


def _call_of(entry):
    if isinstance(entry.case, Cached):
        return _decode
    return _tangents if entry.forward_mode else _attention


def execute(entry, capability, tile=0, **options):
    """Run an Entry on an emulated GPU of a compute capability, and return its Outcome.

    Args:
        tile: index of the tile or pipeline of each kernel. options: arguments of `Device`.
    """
    with other_tiles(tile), gpu(capability, **options) as device:
        got, judge = _call_of(entry)(entry, device)
    return Outcome(judge(), device, got)


class Taken(NamedTuple):
    """A tile or pipeline, and the calls that use it: kernel, bytes of an element, columns of the widest tile."""

    kernel: str
    itemsize: int
    width: int
    tile: tile_table.Tile | tile_table.Pipeline | tile_table.Backward


def taken(entry, capability, tile=0):
    """Return each tile that an Entry would use, as a set of Taken, without compiling or executing."""
    found = set()

    def note(name, call, tile):
        if tile is not None:
            on_hopper = name in tile_table.ON_HOPPER
            width = hopper.row_width(call) if on_hopper else tile_table.row_width(run.widest(call))
            found.add(Taken(name, call.query.dtype.itemsize, width, tile))
        return tile

    with other_tiles(tile), gpu(capability) as device:
        candidates, form = run.candidates, run.form_on_hopper
        with (
            mock.patch.object(run, "candidates", lambda name, call: [note(name, call, candidates(name, call)[0])]),
            mock.patch.object(run, "form_on_hopper", lambda name, call: note(name, call, form(name, call))),
            mock.patch.object(run, "run_kernel", lambda *given, **options: None),
            mock.patch.object(replay, "learn", lambda *call: None),  # there are no launches to record
        ):
            _call_of(entry)(entry, device)
    return found
