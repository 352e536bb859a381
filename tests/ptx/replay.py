"""Launches that can be executed again, by other code: with what, and the storages they access, before and after."""

from typing import NamedTuple
from unittest import mock

import torch

from fusedattn.launch import hopper, launcher

from . import device
from .calls import HARMLESS
from .report import Fault

# What LLVM counts as an error of the caller, not of a call: a mutant may come to it.
SEEN = Fault, NotImplementedError, IndexError, RecursionError


class Storage:
    """What a launch may access: an Allocation, what it held before the launch, and after it."""

    def __init__(self, allocation, dtype):
        self.allocation, self.dtype = allocation, dtype
        self.exact = allocation.name == "Stats"  # bits of the output are among its numbers
        self.before, self.written = allocation.bytes.copy(), allocation.written
        self.written = None if self.written is None else self.written.copy()

    def finish(self):
        """Keep what the launch left."""
        self.after = self.allocation.bytes.copy()

    def restore(self):
        """Have it hold what it held before the launch."""
        self.allocation.bytes[:], self.allocation.owner = self.before, None
        self.allocation.written = None if self.written is None else self.written.copy()

    def differs(self):
        """In words, if it holds something else than after the launch, by more than rounding; or None."""
        got = self.allocation.bytes
        if (got == self.after).all():
            return None
        if self.exact:
            return "differs in bits"
        whole = got.size // self.dtype.itemsize * self.dtype.itemsize
        x, y = (torch.from_numpy(each[:whole].copy()).view(self.dtype).float() for each in (got, self.after))
        same = torch.isclose(x, y, rtol=2e-2, atol=2e-3, equal_nan=True)
        return None if same.all() else f"differs by {(x - y).abs()[~same].max().item():.2g}"


class Replay(NamedTuple):
    """A launch that can be executed again: on which Device, its code, in how many steps, and its storages.

    values keep what the storages are of.
    """

    device: device.Device
    ptx: str
    steps: int
    params: dict
    grid: tuple
    shared: int
    storages: list
    values: list

    def again(self, ptx):
        """What is wrong with it by other PTX, or None."""
        self.device.memory.allocations = [each.allocation for each in self.storages]
        self.device.most_steps = 2 * self.steps + 1000  # a mutant that takes more goes on for ever
        for each in self.storages:
            each.restore()
        try:
            report = self.device.execute(device.program(ptx), self.params, self.grid, self.shared)
        except SEEN as error:
            return f"{type(error).__name__}: {str(error)[:80]}"
        found = sorted(kind for kind in report.found if kind not in HARMLESS)
        if found:
            return "reported: " + ", ".join(found)
        return next(filter(None, (each.differs() for each in self.storages)), None)


def _tensors(values):
    for x in values:
        if isinstance(x, tuple):
            yield from _tensors(x)
        elif isinstance(x, torch.Tensor):
            yield x
        elif hopper.is_descriptor(x):
            yield x.base


def recorded(call, capability, name):
    """A Replay of each launch of a kernel in a call."""
    found = []
    with device.gpu(capability, max_lanes=4096) as there:
        launch, execute = there.launch, there.execute

        def keep(kernel, grid, values):
            def executed(code, params, grid, shared):
                dtypes = {x.untyped_storage().data_ptr(): x.dtype for x in _tensors(values)}
                storages = [Storage(each, dtypes[each.base]) for each in there.memory.allocations]
                report = execute(code, params, grid, shared)
                for each in storages:
                    each.finish()
                found.append(Replay(there, kernel.asm["ptx"], there.steps, params, grid, shared, storages, values))
                return report

            there.execute = executed if kernel.name == name else execute
            launch(kernel, grid, values)

        there.launch = keep
        # A repeated call that encodes descriptors itself would name their tensors by address only.
        with mock.patch.object(launcher, "encoders", return_value=None):
            call()
    there.execute = execute
    return found
