"""Would anybody see it, if compiled code were wrong?    python -m tests.ptx.mutants [80 90] [--each 3] [--kind barrier]

Breaks the PTX of a kernel in one place at a time, and executes calls of it until one shows it: by an access out of
bounds, a race or hazard that is reported, or a result that differs by more than rounding. The calls have the edges at
which a comparison that is off by one differs: rows and keys at 0 and 1, and around a tile, and windows that end there.
"""

import argparse
import functools
import random
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

import fusedattn as fa

from . import device
from .calls import HARMLESS
from .mutations import mutants
from .report import Fault

STEPS = 3000  # blocks of instructions, after which a mutant is taken to go on for ever
# What LLVM counts as an error of the caller, not of a call: a mutant may come to it.
SEEN = Fault, NotImplementedError, IndexError, RecursionError


def _dense(rows, keys, backend="triton", two_passes=False, **options):
    torch.manual_seed(0)
    sizes = (2, rows), (1, keys), (1, keys)
    query, key, value = (torch.randn(1, h, n, 64).bfloat16().requires_grad_() for h, n in sizes)
    torch.use_deterministic_algorithms(two_passes)
    try:
        out, lse = fa.attention(query, key, value, backend=backend, return_lse=True, **options)
        return [out, lse, *torch.autograd.grad(out, (query, key, value), torch.randn_like(out))]
    finally:
        torch.use_deterministic_algorithms(False)


def _decoded(lengths, capacity, rows=1, page=None, **options):
    torch.manual_seed(0)
    batch, lengths = len(lengths), torch.tensor(lengths, dtype=torch.int32)
    query = torch.randn(batch, 4, rows, 64).bfloat16()
    pages = batch if page is None else batch * (capacity // page)
    caches = [torch.randn(pages, 1, page or capacity, 64).bfloat16() for _ in range(2)]
    if page is not None:
        options["block_table"] = torch.randperm(pages).view(batch, -1).int()
    out, lse = fa.attention_decode(query, *caches, cache_seqlens=lengths, return_lse=True, backend="triton", **options)
    return [out, lse]


# All take the same compiled kernel. Tiles have 64 or 128 rows and keys.
_EDGES = [
    dict(rows=rows, keys=keys, window=window)
    for rows, keys, window in (
        (200, 300, (130, 90)),
        (128, 128, (127, 127)),
        (129, 127, (128, 0)),
        (127, 129, (64, 63)),
        (257, 193, (63, 64)),
        (64, 64, (0, 0)),
        (1, 65, (64, 1)),
        (65, 1, (1, 64)),
        (192, 256, (127, 128)),
        (63, 320, (300, 300)),
    )
]
_LENGTHS = (17, 260, 0, 1), (64, 128, 127, 129), (63, 65, 320, 319), (2, 256, 192, 191)
CALLS: dict[str, list[Callable]] = {
    "forward": [functools.partial(_dense, **edge) for edge in _EDGES],
    "dkdv": [functools.partial(_dense, **edge) for edge in _EDGES],
    "dq": [functools.partial(_dense, two_passes=True, **edge) for edge in _EDGES],
    "decode": [
        functools.partial(_decoded, lengths, 320, rows=2, window=(left, 0))
        for lengths in _LENGTHS
        for left in (63, 300)
    ],
    "hopper": [functools.partial(_dense, backend="hopper", **edge) for edge in _EDGES],
}


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


class Judge:
    """Says of a mutant of a kernel which call shows it: what is right is computed once."""

    def __init__(self, kernel, capability):
        self.kernel, self.capability = kernel, capability
        self.replays = {}

    def original(self):
        """The PTX of the kernel, as the first call has it."""
        return self._replays(0)[0].kernel.asm["ptx"]

    def _replays(self, number):
        if number not in self.replays:
            name = "forward" if self.kernel == "hopper" else self.kernel
            self.replays[number] = recorded(CALLS[self.kernel][number], self.capability, name)
        return self.replays[number]

    def seen(self, mutant):
        """Why a mutant is seen, or None."""
        original = self.original()
        try:
            for number in range(len(CALLS[self.kernel])):
                for replay in self._replays(number):
                    if replay.kernel.asm["ptx"] == original and (why := replay.again(mutant.ptx)) is not None:
                        return f"call {number}: {why}"
            return None
        finally:
            device.forget(mutant.ptx)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("capabilities", type=int, nargs="*", default=[80])
    parser.add_argument("--each", type=int, default=3, help="mutants of a kernel by each mutation")
    parser.add_argument("--kind", default="", help="part of the name of a mutation or of its kind")
    parser.add_argument("--kernels", nargs="+", default=list(CALLS), choices=CALLS)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    survivors, tally = [], {}
    for capability in chosen.capabilities:
        for kernel in chosen.kernels:
            if kernel == "hopper" and capability != 90:
                continue
            judge = Judge(kernel, capability)
            original = judge.original()
            for mutant in mutants(original, chosen.each, random.Random(0), chosen.kind):
                began = time.monotonic()
                why = judge.seen(mutant)
                kinds = tally.setdefault(mutant.mutation.kind, [])
                kinds.append(why is not None)
                where = (
                    f"sm_{capability} {kernel:8} {mutant.mutation.name:26} line {mutant.line:5} {mutant.text[:44]:44}"
                )
                where += f" {mutant.source[:70]:70}"
                print(f"{where} {why or 'SURVIVED'} ({time.monotonic() - began:.1f} s)", flush=True)
                if why is None:
                    survivors.append(where)
    for kind, seen in tally.items():
        print(f"{kind}: {sum(seen)} of {len(seen)} seen")
    return len(survivors)


if __name__ == "__main__":
    sys.exit(main() > 0)
