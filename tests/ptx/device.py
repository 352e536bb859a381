"""An emulated GPU, which executes the package's kernel launches on CPU tensors in place."""

import contextlib
import pathlib
import struct
from typing import NamedTuple
from unittest import mock

import numpy as np
import torch
from triton.backends.nvidia import driver
from triton.runtime.errors import OutOfResources

from fusedattn.call import private
from fusedattn.launch import launcher

from ..offline import absent
from .machine import Machine
from .memory import Memory
from .parse import parse
from .program import Program
from .report import Report

CACHE = pathlib.Path(__file__).parents[2] / ".ptx_cache"  # compiled kernels, by a hash of their sources
LANES = 2048  # maximum number of threads executed at once, but at least one block
_PACKED = dict(i1="?", u1="?", i8="b", i16="h", i32="i", i64="q", u8="B", u16="H", u32="I", u64="Q")
_PACKED |= dict(fp32="f", f32="f", fp64="d", fp16="e")
_programs: dict[str, Program] = {}


class Launch(NamedTuple):
    """One executed launch: the compiled kernel, its grid, and the errors found."""

    kernel: object
    grid: tuple
    report: Report

    @property
    def name(self):
        return self.kernel.name


def program(ptx):
    """Return the Program of a PTX text; each text is translated once."""
    if ptx not in _programs:
        _programs[ptx] = Program(parse(ptx))
    return _programs[ptx]


def _encoded(descriptor, meta):
    """Return a TMA descriptor as the launcher passes it. Triton 3.9 takes one more argument, which is ignored."""
    take = driver.make_tensordesc_arg
    return take(*(descriptor, meta, None)[: take.__code__.co_argcount])


def _is_descriptor(kind):
    return isinstance(kind, str) and kind.startswith("tensordesc")


def _parameters(signature):
    """Yield (name, type) of each kernel parameter. The launcher passes shape and strides after a descriptor."""
    for name, kind in signature.items():
        if _is_descriptor(kind):
            rank = kind.split("[")[1].split("]")[0].count(",") + 1
            yield name, "nvTmaDesc"
            yield from ((f"{name}.{what}[{i}]", x) for what, x in _OF_DESCRIPTOR.items() for i in range(rank))
        else:
            yield name, kind


_OF_DESCRIPTOR = dict(shape="i32", strides="i64")


def _flattened(names, signature, values):
    """Yield (name, type, value) of each argument of a kernel, without constants and with tuples flattened."""
    for name, kind, value in zip(names, signature, values, strict=True):
        if isinstance(kind, tuple):
            yield from _flattened([f"{name}.{i}" for i in range(len(kind))], kind, value)
        elif kind != "constexpr":
            yield name, kind, value


def _packed(kind, value):
    """Return the bytes of a kernel argument, as Triton's launcher passes it."""
    if kind[0] == "*":
        return struct.pack("Q", 0 if value is None else value if isinstance(value, int) else value.data_ptr())
    return struct.pack(_PACKED[kind], value)


# Bytes of shared memory that a program may use. Source: CUDA C++ Programming Guide, technical specifications.
MOST_SHARED = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}


class Device:
    """An emulated GPU, on which kernels are launched.

    Args:
        max_lanes: threads executed at once. tensor_core: the TensorCore that adds products; by default sums are
            rounded. order: None, or the seed of another order in which the programs of a launch run, and their warps.
    """

    def __init__(self, max_lanes=LANES, tensor_core=None, order=None):
        self.memory, self.launches, self.max_lanes = Memory(), [], max_lanes
        self.tensor_core = tensor_core
        self.order = None if order is None else np.random.default_rng(order)

    def load(self, kernel):
        """Replace the launcher of a compiled kernel, so that its launches run on this Device."""
        needed, limit = kernel.metadata.shared, MOST_SHARED.get(kernel.metadata.target.arch, 0)
        if needed > limit:
            raise OutOfResources(needed, limit, "shared memory")
        kernel.module = kernel.function = 0
        kernel._run = absent.Run(lambda *given: self.launch(kernel, given[:3], given[9:]))

    def launch(self, kernel, grid, values):
        code = program(kernel.asm["ptx"])
        params = self._arguments(code, kernel, values)
        report = self.execute(code, params, grid, kernel.metadata.shared)
        self.launches.append(Launch(kernel, grid, report))

    def execute(self, code, params, grid, shared):
        """Run a Program on the tensors of `memory`, and return the Report of its errors."""
        report, total = Report(), grid[0] * grid[1] * grid[2]
        blocks = np.stack(np.unravel_index(np.arange(total), grid[::-1])[::-1], 1)
        if self.order is not None:
            blocks = self.order.permutation(blocks)
        together = max(1, self.max_lanes // code.kernel.threads)
        for first in range(0, total, together):
            some = blocks[first : first + together]
            Machine(code, self.memory, params, some, grid, shared, report, self.tensor_core, order=self.order).run()
        return report

    def _arguments(self, code, kernel, values):
        """Return {parameter: bytes or descriptor} of a launch, and register its tensors with `memory`."""
        meta = getattr(kernel.metadata, "tensordesc_meta", None) or ()
        given, descriptors, rest = [], iter(meta), iter(values)
        for kind in kernel.src.signature.values():
            value = next(rest)
            if not _is_descriptor(kind):
                given.append(value)
            elif launcher.is_descriptor(value):
                given.extend(_encoded(value, next(descriptors, None)))
            else:  # a replayed call passes an encoded descriptor
                given += [value, *(next(rest) for _ in range(2 * len(value.what[5])))]
        if next(rest, rest) is not rest:
            raise ValueError(f"{kernel.name} got more arguments than its signature has")
        arguments = list(_flattened(*zip(*_parameters(kernel.src.signature), strict=True), given))
        if len(code.params) != len(arguments) + 2:  # two more are for scratch memory, which our kernels do not use
            raise NotImplementedError(f"{len(code.params)} parameters, of {len(arguments)} arguments")
        params, tensors, described = {}, {}, {}
        for param, (name, kind, value) in zip(code.params, arguments, strict=False):
            params[param] = value if kind == "nvTmaDesc" else _packed(kind, value)
            if kind == "nvTmaDesc":
                described[name] = value
            elif isinstance(value, torch.Tensor):
                tensors[name] = value
        params |= {param: struct.pack("Q", 0) for param in list(code.params)[-2:]}
        self.memory.begin(tensors, described)
        return params


@contextlib.contextmanager
def _poisoned(memory):
    """Fill tensors that torch does not initialise with NaN bytes, and mark them as unwritten."""

    def fresh(make):
        return lambda *args, **kwargs: memory.is_fresh(make(*args, **kwargs))

    with contextlib.ExitStack() as stack:
        for owner, names in ((torch.Tensor, ("new_empty", "new_empty_strided")), (torch, _EMPTY)):
            for name in names:
                stack.enter_context(mock.patch.object(owner, name, fresh(getattr(owner, name))))
        stack.enter_context(mock.patch.dict(private.EMPTY, {k: fresh(make) for k, make in private.EMPTY.items()}))
        yield


_EMPTY = "empty", "empty_like", "empty_strided"


def _only_ptx(backend=None, stages=None, options=None, language=None, capability=None):
    """Skip compilation to machine code, which takes half of the time: Triton's hook for the stages of a compilation."""
    if stages is None:  # a part of Triton's cache key
        return "only ptx", "only ptx"
    stages |= dict(cubin=lambda module, metadata: b"none")


@contextlib.contextmanager
def gpu(capability, **options):
    """Emulate a GPU as in `absent.gpu`, and execute the launches on it; yield the Device."""
    device = Device(**options)
    with absent.gpu(capability, device.load, _only_ptx, str(CACHE)), _poisoned(device.memory):
        yield device
