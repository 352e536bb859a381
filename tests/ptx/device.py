"""A GPU that is not there, and computes: what the package launches on it is executed, on the tensors themselves."""

import contextlib
import pathlib
import struct
import time
from typing import NamedTuple
from unittest import mock

import numpy as np
import torch
from triton.backends.nvidia import driver

from fusedattn.call import private
from fusedattn.launch import hopper

from ..offline import absent
from .machine import Machine
from .memory import Memory
from .parse import parse
from .program import Program
from .report import Report

CACHE = pathlib.Path(__file__).parents[2] / ".ptx_cache"  # compiled kernels, kept by their sources
LANES = 2048  # how many threads are executed at once, at least those of one block
_PACKED = dict(i1="?", u1="?", i8="b", i16="h", i32="i", i64="q", u8="B", u16="H", u32="I", u64="Q")
_PACKED |= dict(fp32="f", f32="f", fp64="d", fp16="e")
_programs: dict[str, Program] = {}


class Launch(NamedTuple):
    """A launch that was executed: a compiled kernel, its grid, how long it took, and what was wrong with it."""

    kernel: object
    grid: tuple
    seconds: float
    report: Report

    @property
    def name(self):
        """The kernel's, as its source has it."""
        return self.kernel.name

    @property
    def tile(self):
        """Return the compile options as text: 64x32 w4 s2."""
        names, constants = self.kernel.src.fn.arg_names, self.kernel.src.constants
        sizes = [constants.get((names.index(x),)) for x in ("BLOCK_M", "BLOCK_N") if x in names]
        meta = self.kernel.metadata
        return "x".join(map(str, filter(None, sizes))) + f" w{meta.num_warps} s{meta.num_stages}"


def program(ptx):
    """The Program of PTX, translated once."""
    if ptx not in _programs:
        _programs[ptx] = Program(parse(ptx))
    return _programs[ptx]


def _encoded(descriptor, meta):
    """Return a descriptor as the launcher passes it. Triton 3.9 passes one more argument, which is ignored."""
    take = driver.make_tensordesc_arg
    return take(*(descriptor, meta, None)[: take.__code__.co_argcount])


def _expanded(signature):
    """A signature with what the launcher makes of each descriptor: itself, its shape and its strides."""
    for kind in signature:
        if isinstance(kind, str) and kind.startswith("tensordesc"):
            rank = kind.split("[")[1].split("]")[0].count(",") + 1
            yield from ("nvTmaDesc", *["i32"] * rank, *["i64"] * rank)
        else:
            yield kind


def _flattened(names, signature, values):
    """(name, type, value) of each argument that a kernel has: no constants, tuples element by element."""
    for name, kind, value in zip(names, signature, values, strict=True):
        if isinstance(kind, tuple):
            yield from _flattened([f"{name}.{i}" for i in range(len(kind))], kind, value)
        elif kind != "constexpr":
            yield name, kind, value


def _packed(kind, value):
    """The bytes of an argument as the launcher gives it."""
    if kind[0] == "*":
        return struct.pack("Q", 0 if value is None else value if isinstance(value, int) else value.data_ptr())
    return struct.pack(_PACKED[kind], value)


class Device:
    """An emulated GPU that kernels are launched on.

    Args:
        races: whether accesses to shared memory are held to what barriers put in order. max_lanes: how many threads
            are executed at once. tensor_core: the TensorCore that sums up products; by default sums are rounded.
            order: None, or the seed of another order in which the programs of a launch run.
    """

    def __init__(self, races=True, max_lanes=LANES, tensor_core=None, order=None):
        self.memory, self.launches, self.races, self.max_lanes = Memory(), [], races, max_lanes
        self.tensor_core = tensor_core
        self.order = None if order is None else np.random.default_rng(order)
        self.edit = None  # of (name of a kernel, its PTX): what is executed instead
        self.steps, self.most_steps = 0, 1 << 20  # of what was executed last, and when it is taken to go on for ever

    def load(self, kernel):
        """Have the launcher of a compiled kernel execute it."""
        kernel.module = kernel.function = 0
        kernel._run = absent.Run(lambda *given: self.launch(kernel, given[:3], given[9:]))

    def launch(self, kernel, grid, values):
        """Execute a kernel with what Triton's launcher was given."""
        began = time.monotonic()
        ptx = kernel.asm["ptx"]
        code = program(ptx if self.edit is None else self.edit(kernel.name, ptx))
        params = self._arguments(code, kernel, values)
        report = self.execute(code, params, grid, kernel.metadata.shared)
        self.launches.append(Launch(kernel, grid, time.monotonic() - began, report))

    def execute(self, code, params, grid, shared):
        """The Report of a Program that ran on the tensors that memory has."""
        report, total = Report(), grid[0] * grid[1] * grid[2]
        blocks = np.stack(np.unravel_index(np.arange(total), grid[::-1])[::-1], 1)
        if self.order is not None:
            blocks = self.order.permutation(blocks)
        together, self.steps = max(1, self.max_lanes // code.kernel.threads), 0
        for first in range(0, total, together):
            some = blocks[first : first + together]
            machine = Machine(code, self.memory, params, some, grid, shared, report, self.races, self.tensor_core)
            machine.most_steps = self.most_steps
            self.steps = max(self.steps, machine.run())
        return report

    def _arguments(self, code, kernel, values):
        """{parameter: its bytes, or a descriptor} of a launch, whose tensors memory then has."""
        meta = getattr(kernel.metadata, "tensordesc_meta", None) or ()
        kinds = list(kernel.src.signature.values())
        given, descriptors, rest = [], iter(meta), iter(values)
        for kind in kinds:
            value = next(rest)
            if not isinstance(kind, str) or not kind.startswith("tensordesc"):
                given.append(value)
            elif hopper.is_descriptor(value):
                given.extend(_encoded(value, next(descriptors, None)))
            else:  # a repeated call keeps what it has encoded
                given += [value, *(next(rest) for _ in range(2 * len(value.what[5])))]
        if next(rest, rest) is not rest:
            raise ValueError(f"{kernel.name} was given more than its signature has")
        kinds = list(_expanded(kinds))
        arguments = list(_flattened(_names(kernel), kinds, given))
        if len(code.params) != len(arguments) + 2:  # two for scratch memory, which no kernel here has
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


def _names(kernel):
    """The name of each argument of a kernel's source, with those that the launcher makes of a descriptor."""
    for name, kind in kernel.src.signature.items():
        yield name
        if isinstance(kind, str) and kind.startswith("tensordesc"):
            rank = kind.split("[")[1].split("]")[0].count(",") + 1
            yield from (f"{name}.{what}[{i}]" for what in ("shape", "strides") for i in range(rank))


@contextlib.contextmanager
def _poisoned(memory):
    """Tensors that torch does not initialise are known as such."""

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
    """In Triton's hook for the stages of a compilation: no machine code, which would take half of the time."""
    if stages is None:  # what it adds to the key by which Triton keeps kernels
        return "only ptx", "only ptx"
    stages |= dict(cubin=lambda module, metadata: b"none")


@contextlib.contextmanager
def gpu(capability, races=True, **options):
    """`absent.gpu` that computes; gives the Device."""
    device = Device(races, **options)
    with absent.gpu(capability, device.load, _only_ptx, str(CACHE)), _poisoned(device.memory):
        yield device
