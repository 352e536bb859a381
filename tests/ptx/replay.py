"""A launch that can be executed again by other code: by what it was given, and what it left, in storages of their own."""

from typing import NamedTuple

import torch

from . import device
from .calls import HARMLESS
from .report import Fault

STEPS = 3000  # blocks of instructions, after which a mutant is taken to go on for ever
# What LLVM counts as an error of the caller, not of a call: a mutant may come to it.
SEEN = Fault, NotImplementedError, IndexError, RecursionError


class Replay(NamedTuple):
    """A launch that can be executed again: with what, and the storages it may access, before and after it."""

    device: device.Device
    kernel: object
    grid: tuple
    values: list
    storages: list

    def again(self, ptx):
        """What is wrong with it by other PTX, or None."""
        there = self.device
        for each in self.storages:
            each.restore(there.memory)
        there.edit, there.most_steps = lambda name, original: ptx, STEPS
        there.launches.clear()
        try:
            there.launch(self.kernel, self.grid, self.values)
        except SEEN as error:
            return f"{type(error).__name__}: {str(error)[:80]}"
        found = sorted(kind for kind in there.launches[0].report.found if kind not in HARMLESS)
        if found:
            return "reported: " + ", ".join(found)
        return next(filter(None, (each.differs() for each in self.storages)), None)


class Storage:
    """One that a launch may access: its bytes, and which of them were written, before the launch; its bytes after."""

    def __init__(self, allocation, memory, dtype):
        self.base, self.bytes, self.dtype = allocation.base, allocation.bytes, dtype
        self.exact = allocation.name == "Stats"  # bits of the output are among its numbers
        self.before, written = self.bytes.copy(), memory.fresh.get(self.base)
        self.written = None if written is None else written.copy()

    def finish(self):
        self.after = self.bytes.copy()

    def restore(self, memory):
        self.bytes[:] = self.before
        if self.written is not None:
            memory.fresh[self.base][:] = self.written

    def differs(self):
        """In words, if it holds something else than after the launch, by more than rounding; or None."""
        if (self.bytes == self.after).all():
            return None
        if self.exact:
            return "differs in bits"
        whole = self.bytes.size // self.dtype.itemsize * self.dtype.itemsize
        x, y = (torch.from_numpy(each[:whole].copy()).view(self.dtype).float() for each in (self.bytes, self.after))
        same = torch.isclose(x, y, rtol=2e-2, atol=2e-3, equal_nan=True)
        return None if same.all() else f"differs by {(x - y).abs()[~same].max().item():.2g}"


def _tensors(values):
    for x in values:
        if isinstance(x, tuple):
            yield from _tensors(x)
        elif isinstance(x, torch.Tensor):
            yield x


def recorded(call, capability, name):
    """A Replay of each launch of a kernel in a call."""
    found = []
    with device.gpu(capability, max_lanes=4096) as there:
        launch = there.launch

        def keep(kernel, grid, values):
            if kernel.name != name:
                return launch(kernel, grid, values)
            there.arguments(device.program(kernel.asm["ptx"]), kernel, values)
            dtypes = {x.untyped_storage().data_ptr(): x.dtype for x in _tensors(values)}
            storages = [
                Storage(each, there.memory, dtypes.get(each.base, torch.bfloat16))  # a descriptor does not say
                for each in there.memory.allocations
            ]
            launch(kernel, grid, values)
            for each in storages:
                each.finish()
            found.append(Replay(there, kernel, grid, values, storages))

        there.launch = keep
        call()
    there.launch = launch
    return found
