"""Emulates global memory: the storages of tensors, at their own addresses, and errors of accesses to them.

An access must lie in the storage of a tensor that was passed to the kernel; all lanes of an instruction access one
storage. Accesses to bytes between the elements of a tensor are reported. Every lane sees a store at once, so fences of
global memory do nothing. Blocks run in grid order, a few at a time. Loads and stores where another block stored are
reported; a store where another block has loaded is not. Atomics add in the order of lanes, and do not count as stores.
"""

import ctypes
import mmap
from typing import NamedTuple

import numpy as np
import torch

from .lanes import Lanes, disagree
from .ops import S64, U8
from .report import Fault

POISON = 0xFF  # every uninitialised byte: NaN in every floating dtype
LARGE = 1 << 26  # bytes; a larger storage may be sparse, so not every byte of it is checked
MAP_NORESERVE = 0x4000  # a flag of Linux: memory is allocated when it is first touched


def sparse(count, dtype):
    """Return an array of zeros whose memory is allocated when it is first touched."""
    size = count * np.dtype(dtype).itemsize
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    return np.zeros(count, dtype) if size <= LARGE else np.frombuffer(mmap.mmap(-1, size, flags=flags), dtype)


class TensorMap(NamedTuple):
    """A TMA tensor descriptor: the driver's arguments; sizes and strides count elements."""

    base: int
    swizzle: int
    itemsize: int
    kind: int
    block: tuple
    shape: tuple
    strides: tuple
    padding: int

    def elements(self):
        """Return (shape, strides) of the tensor. Those of a ragged descriptor have two more dimensions."""
        if self.strides[0] + self.strides[1] != 2**34:
            return self.shape, self.strides
        _, total, heads, _, columns = self.shape
        return (heads, total - 1, columns), self.strides[2:]


class Allocation:
    """Storage of one or more tensors, and the state of its bytes.

    written: mask of the bytes that were written; None if all are initialised. between: mask of the bytes outside all
    elements of the passed tensors; None if no byte is.
    """

    def __init__(self, base, size, name, written=None, between=None):
        self.base, self.size, self.name, self.written, self.between = base, size, name, written, between
        self.bytes = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(base)) if size else np.zeros(0, U8)
        self.owner = None  # for each pair of bytes: 1 + the block that stored there in this launch

    def view(self, dtype):
        """Return the bytes of the storage as elements of a dtype."""
        size = np.dtype(dtype).itemsize
        return self.bytes[: self.size // size * size].view(dtype)

    def unwritten(self, at, size):
        """Return a mask of the ranges [at, at + size) that contain a byte which was never written."""
        if self.written is None:
            return np.zeros(at.shape, bool)
        return ~self.written[at + np.arange(size)[:, None]].all(0)

    def astray(self, at, size):
        """Return a mask of the ranges that contain a byte outside every tensor element."""
        if self.between is None:
            return np.zeros(at.shape, bool)
        return self.between[at + np.arange(size)[:, None]].any(0)

    def foreign(self, at, size, blocks):
        """Return a mask of the ranges, of two or more bytes, that another block stored to."""
        if self.owner is None or size == 1:
            return np.zeros(at.shape, bool)
        owner = self.owner[at // 2 + np.arange(size // 2)[:, None]]
        return ((owner != 0) & (owner != blocks + 1)).any(0)

    def claim(self, at, size, blocks):
        """Record stores of blocks. Return a mask of the ranges that another block also stored to."""
        if self.owner is None:
            self.owner = sparse(self.size // 2 + 1, np.int32)
        before = self.foreign(at, size, blocks)
        self.owner[at // 2 + np.arange(max(1, size // 2))[:, None]] = blocks + 1
        if self.written is not None:
            self.written[at + np.arange(size)[:, None]] = True
        return before | self.foreign(at, size, blocks)


NOTHING = Allocation(0, 0, "nothing")  # allocation of an access by no lane


def _between(size, strided):
    """Return a mask of the bytes outside all tensors, given as (first byte, shape, strides in bytes, itemsize)."""
    none = np.ones(size if size <= LARGE else 0, bool)
    for first, shape, steps, itemsize in strided:
        if none.size and 0 not in shape:
            place = np.lib.stride_tricks.as_strided(none[first:], (*shape, itemsize), (*steps, 1))
            place[...] = False
    return none if none.any() else None


class Memory:
    """The storages that a launch may access, and the uninitialised bytes of each tensor."""

    def __init__(self):
        self.allocations, self.fresh, self.kept = [], {}, []

    def is_fresh(self, tensor):
        """Fill a new, uninitialised tensor with NaN bytes, mark them as unwritten, and return the tensor."""
        storage = tensor.untyped_storage()
        if type(tensor) is torch.Tensor and tensor.device.type == "cpu" and storage.nbytes():  # fake tensors have none
            Allocation(storage.data_ptr(), storage.nbytes(), "").bytes[:] = POISON
            self.fresh[storage.data_ptr()] = np.zeros(storage.nbytes(), bool)
            self.kept.append(storage)  # keeps the memory, so that no other tensor gets its address
        return tensor

    def begin(self, tensors, described):
        """Begin a launch that may access tensors and descriptors, each as {parameter name: value}.

        Two bytes of a fresh tensor that are not both poison were written by torch. If torch wrote poison, they count as
        uninitialised.
        """
        ranges, strided = {}, {}
        for name, tensor in tensors.items():
            storage = tensor.untyped_storage()
            ranges.setdefault(storage.data_ptr(), (storage.nbytes(), []))[1].append(name)
            first, size = tensor.storage_offset() * tensor.itemsize, tensor.itemsize
            steps = [step * size for step in tensor.stride()]
            strided.setdefault(storage.data_ptr(), []).append((first, tensor.shape, steps, size))
        for name, descriptor in described.items():
            of = TensorMap(*descriptor.what)
            shape, strides = of.elements()
            length = (sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) + 1) * of.itemsize
            for first, (size, names) in ranges.items():
                if first <= of.base and of.base + length <= first + size:
                    names.append(name)
                    break
            else:
                first = of.base
                ranges[of.base] = (self.fresh[of.base].size if of.base in self.fresh else length), [name]
            steps = [step * of.itemsize for step in strides]
            strided.setdefault(first, []).append((of.base - first, shape, steps, of.itemsize))
        self.allocations = []
        for base, (size, names) in sorted(ranges.items()):
            allocation, written = Allocation(base, size, " ".join(names)), self.fresh.get(base)
            allocation.between = _between(size, strided[base])
            if written is not None and written.size == size:
                other = allocation.bytes != POISON
                written |= other if size % 2 else other.reshape(-1, 2).any(1).repeat(2)
                allocation.written = None if written.all() else written
            self.allocations.append(allocation)

    def find(self, low, high, line):
        for each in self.allocations:
            if each.base <= low and high <= each.base + each.size:
                return each
        near = ", ".join(f"{each.name} [{each.base:#x}, {each.base + each.size:#x})" for each in self.allocations)
        raise Fault(f"line {line}: global access [{low:#x}, {high:#x}) is in no tensor: {near}")


class GlobalMemory(Lanes):
    """Instructions on global memory; each lane (thread) accesses n neighbouring elements."""

    def global_at(self, m, pointer, offset, size, line):
        """Return (Allocation, byte offset of each active lane) for an access of `size` bytes per lane."""
        address = (pointer.view(S64) + offset)[self.lanes(m)]
        if not address.size:
            return NOTHING, address
        if (address & (size - 1)).any():
            wrong = int(address[address & (size - 1) != 0][0])
            raise Fault(f"line {line}: misaligned global access of {size} bytes at {wrong:#x}")
        allocation = self.memory.find(int(address.min()), int(address.max()) + size, line)
        return allocation, address - allocation.base

    def complain(self, kind, bad, allocation, at, what, line):
        if bad.any():
            self.report.add(kind, line, f"{allocation.name} at byte {int(at[bad][0])} {what}", bad.sum())

    def complain_of_bytes(self, allocation, at, size, line):
        """Report reads of bytes that were never written, or that lie outside all tensor elements."""
        self.complain("uninitialised", allocation.unwritten(at, size), allocation, at, "was written by nobody", line)
        self.complain("astray", allocation.astray(at, size), allocation, at, "is of no element", line)

    def reads_global(self, allocation, at, size, blocks, line):
        """Report loads of bytes that were never written, or that another block stored to."""
        self.complain_of_bytes(allocation, at, size, line)
        foreign = allocation.foreign(at, size, blocks)
        self.complain("race between CTAs", foreign, allocation, at, "was stored by another CTA", line)

    def writes_global(self, allocation, at, size, blocks, line):
        """Record stores, and report stores to bytes that another block stored to."""
        foreign = allocation.claim(at, size, blocks)
        self.complain("astray", allocation.astray(at, size), allocation, at, "is of no element", line)
        self.complain("race between CTAs", foreign, allocation, at, "is stored by two CTAs", line)

    def load_global(self, m, pointer, offset, dtype, n, line):
        """Return the (n, lanes) elements that a load reads (ld.global)."""
        size = np.dtype(dtype).itemsize
        allocation, at = self.global_at(m, pointer, offset, n * size, line)
        self.reads_global(allocation, at, n * size, self.number[self.lanes(m)], line)
        return self.spread(m, allocation.view(dtype)[at // size + np.arange(n)[:, None]])

    def store_global(self, m, pointer, offset, dtype, values, line):
        lanes, n, size = self.lanes(m), len(values), np.dtype(dtype).itemsize
        allocation, at = self.global_at(m, pointer, offset, n * size, line)
        self.writes_global(allocation, at, n * size, self.number[lanes], line)
        given, place, target = np.stack(values)[:, lanes], at // size + np.arange(n)[:, None], allocation.view(dtype)
        target[place] = given
        bad = disagree(target[place], given).any(0)
        self.complain("lanes differ", bad, allocation, at, "is stored with different values", line)

    def add_global(self, m, pointer, offset, dtype, values, line):
        """Add to global memory without returning the old values (atom.global.add, red.global.add)."""
        lanes, n, size = self.lanes(m), len(values), np.dtype(dtype).itemsize
        allocation, at = self.global_at(m, pointer, offset, n * size, line)
        self.complain_of_bytes(allocation, at, n * size, line)
        np.add.at(allocation.view(dtype), at // size + np.arange(n)[:, None], np.stack(values)[:, lanes])

    def take_global(self, m, pointer, offset, value, line):
        """Add to one u32 in each active lane, and return the previous values (atom.global.add)."""
        allocation, at = self.global_at(m, pointer, offset, 4, line)
        self.complain_of_bytes(allocation, at, 4, line)
        there, found = allocation.view(np.uint32), []
        for place, more in zip(at // 4, self.full(value)[self.lanes(m)], strict=True):
            found.append(there[place])
            there[place] += more
        return self.spread(m, np.array([found], np.uint32))[0]
