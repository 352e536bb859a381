"""Gluon kernels on the CPU, which Triton's interpreter does not run: as a GPU would at its most awkward.

A kernel's own functions run as Python, on the interpreter's tensors; what Gluon adds to the language is here.
Partitions of warps take turns in an order that a seed chooses. What is asynchronous happens as late as it may, or at
some moment before: a copy leaves NaN in its tile until it arrives, a product reads its operands when it is waited for,
a store when its tile is asked back. So what is used too early or given back too soon is wrong, and where all wait for
each other that is an error. It knows nothing of layouts, and all threads of a partition do the same.
"""

import math
import random
import types

import numpy
import torch
import triton.language as tl
from triton.experimental import gluon
from triton.runtime import interpreter as upstream

from fusedattn.launch import interpreter

from .partitions import Machine, local


def values(tensor):
    """A tensor of the interpreter as float32 or integers."""
    return interpreter._wide(tensor.handle).data


def tensor(data, dtype):
    """Numbers as a tensor of the interpreter; 16-bit ones are already rounded."""
    handle = upstream.TensorHandle(numpy.ascontiguousarray(data, numpy.float32), tl.float32)
    full = tl.core.tensor(handle, tl.block_type(tl.float32, list(data.shape)))
    return full if dtype == tl.float32 else full.to(dtype)


tl.block_type.layout = None  # a kernel may ask for it, to make another of it


class Memory:
    """A shared memory descriptor: a view of an array, of numbers of a dtype, or of Barriers."""

    def __init__(self, array, dtype, machine=None):
        self.array, self.dtype, self.machine = array, dtype, machine

    @property
    def shape(self):
        return self.array.shape

    @property
    def type(self):
        return self

    def _view(self, array):
        return Memory(array, self.dtype, self.machine)

    def index(self, i):
        return self._view(self.array[int(i)])

    def reshape(self, shape):
        array = self.array.reshape([int(x) for x in shape])
        assert numpy.shares_memory(array, self.array)
        return self._view(array)

    def permute(self, order):
        return self._view(self.array.transpose([int(x) for x in order]))

    def slice(self, start, length, dim):
        places = [slice(None)] * self.array.ndim
        places[int(dim)] = slice(int(start), int(start) + int(length))
        return self._view(self.array[tuple(places)])

    def load(self, layout):
        return tensor(self.array.copy(), self.dtype)

    def store(self, value):
        assert value.dtype == self.dtype
        self.array[...] = values(value)
        self.machine().unfenced.append((local.number, self.array))


class Barrier:
    def __init__(self, count):
        self.count = self.pending = count
        self.bytes = self.phase = 0

    def _step(self):
        if self.pending == 0 and self.bytes == 0:
            self.phase, self.pending = self.phase + 1, self.count

    def arrive(self, count):
        assert self.pending >= count, "more arrivals at a barrier than it counts"
        self.pending -= count
        self._step()

    def receive(self, count):
        self.bytes -= count
        assert self.pending == 0 or self.bytes != 0, "bytes came before they were expected"
        self._step()


DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


class Descriptor:
    """What a kernel sees of a host's TensorDescriptor of rank 4."""

    def __init__(self, host):
        self.host, self.layout = host, host.layout
        self.dtype = DTYPES[host.base.dtype]
        size = host.base.element_size() * math.prod(host.block_shape)
        self.block_type = types.SimpleNamespace(shape=list(host.block_shape), nbytes=size)

    def _box(self, place):
        """(the tensor's part under a block, the same part of the block)"""
        tensor = self.host.base.detach().as_strided(self.host.shape, self.host.strides)
        outer, inner = [], []
        for start, size, length in zip(map(int, place), self.host.block_shape, tensor.shape, strict=True):
            assert start >= 0
            there = max(0, min(size, length - start))
            outer.append(slice(start, start + there))
            inner.append(slice(0, there))
        return tensor[tuple(outer)], tuple(inner)

    def read(self, place):
        part, inner = self._box(place)
        block = numpy.zeros(self.host.block_shape, numpy.float32)
        block[inner] = part.float().numpy()
        return block

    def write(self, place, block):
        part, inner = self._box(place)
        part.copy_(torch.from_numpy(numpy.ascontiguousarray(block[inner])))

    def add(self, place, block):
        part, inner = self._box(place)
        part.add_(torch.from_numpy(numpy.ascontiguousarray(block[inner])))


class Product:
    """What warpgroup_mma returns: a product that may not have been computed yet, and may then only be added to."""

    dtype = tl.float32

    def __init__(self, a, b, acc, use_acc):
        self.a, self.b, self.acc, self.use_acc, self.value = a, b, acc, use_acc, None
        self.began_with = self._read()

    def __getattr__(self, name):
        raise AssertionError("a product that was not waited for")

    def _is_used(self, other):
        raise AssertionError("a product that was not waited for")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _is_used

    def _read(self):
        return [x.array.copy() for x in (self.a, self.b) if isinstance(x, Memory)]

    def compute(self):
        for then, now in zip(self.began_with, self._read(), strict=True):
            assert numpy.array_equal(then, now, equal_nan=True), "a tile changed while it was read"
        a = self.a.array if isinstance(self.a, Memory) else values(self.a)
        product = a.astype(numpy.float64) @ self.b.array.astype(numpy.float64)
        if self.use_acc:
            product = product + values(self.acc.value if isinstance(self.acc, Product) else self.acc)
        self.value = tensor(product.astype(numpy.float32), tl.float32)


class Emulator:
    """A Gluon kernel of a module, and the modules of the same package that it uses, as `kernel[(programs,)](...)`."""

    def __init__(self, kernel, *modules, seed=0):
        self.arg_names, self.unfenced = kernel.arg_names, False
        self.random = random.Random(seed)
        made = {}
        for module in modules:
            names = {
                name: value.fn
                for name, value in vars(module).items()
                if isinstance(value, gluon._runtime.GluonJITFunction)
            }
            scope = dict(vars(module)) | self._language() | dict(tl=tl)
            scope |= {name: made[name] for name in scope if name in made}
            scope |= {name: value.value for name, value in scope.items() if isinstance(value, tl.constexpr)}
            for name, function in names.items():
                home = function.__module__.split(".")[-1]
                if home in made:
                    scope[name] = getattr(made[home], name)
                    continue
                scope[name] = upstream.InterpretedFunction(
                    types.FunctionType(function.__code__, scope, name, function.__defaults__)
                )
                scope[name].fn.__module__ = function.__module__
            made[module.__name__.split(".")[-1]] = types.SimpleNamespace(
                **{name: value for name, value in scope.items() if name in names or name in vars(module)}
            )
        self.kernel = scope[kernel.fn.__name__]
        self.kernel.rewrite().__annotations__ = dict.fromkeys(kernel.fn.__annotations__, "constexpr")

    def __getitem__(self, grid):
        def launch(**arguments):
            options = {"num_warps", "num_stages", "maxnreg"}
            arguments = {
                name: Descriptor(x) if hasattr(x, "block_shape") else x
                for name, x in arguments.items()
                if name not in options
            }
            with interpreter.quiet():
                self.kernel[grid](**arguments)

        return launch

    def _language(self):
        """What stands in a kernel's module for the language that Gluon adds."""

        def allocate_shared_memory(dtype, shape, layout, value=None):
            if value is not None:
                array = numpy.array(values(value), numpy.float32)
                self.unfenced = True
            elif dtype == tl.int64:  # barriers
                array = numpy.empty([int(x) for x in shape], object)
            else:
                array = numpy.full([int(x) for x in shape], numpy.nan, numpy.float32)
            return Memory(array, dtype, lambda: self.machine)

        def warp_specialize(partitions, warps, registers):
            assert len(partitions) == len(warps) + 1 == len(registers) + 1
            assert not self.unfenced, "memory got values, and they are read before a fence"
            self.machine = Machine(self.random)
            self.machine.run([lambda f=f, given=given: f(*given) for f, given in partitions])

        def init(barrier, count):
            barrier.array[0] = Barrier(count)

        def wait(barrier, phase, pred=True):
            self.machine.wait()
            if pred:
                barrier, phase = barrier.array[0], int(phase)
                self.machine.wait(lambda: barrier.phase & 1 != phase)

        def arrive(barrier, count=1, pred=True):
            if pred:
                barrier.array[0].arrive(count)
                self.machine.wait()

        def expect(barrier, size):
            barrier.array[0].bytes += size
            barrier.array[0].arrive(1)

        def load(desc, place, barrier, result):
            target, barrier, place = result.array, barrier.array[0], [int(x) for x in place]
            assert target.shape == tuple(desc.block_type.shape)
            target[...] = numpy.nan

            def end():
                target[...] = desc.read(place)
                barrier.receive(desc.block_type.nbytes)

            self.machine.under_way.append(end)
            self.machine.wait()

        def out(write, place, source):
            self.machine.check_seen(source.array)
            place, began_with = [int(x) for x in place], source.array.copy()

            def end():
                assert numpy.array_equal(began_with, source.array, equal_nan=True), "a tile changed while it was stored"
                local.writes.append(lambda: write(place, began_with))
                self.machine.under_way.append(local.writes[-1])

            local.stores.append(end)
            self.machine.wait()

        def inline_asm_elementwise(instructions, constraints, operands, dtype, is_pure, pack):
            """What was read is written now, where it waits for that; fences do nothing here."""
            while "wait_group 0" in instructions and local.writes:
                if (written := local.writes.pop()) in self.machine.under_way:
                    self.machine.under_way.remove(written)
                    written()
            return operands[0]

        def volatile(pointer, volatile):
            self.machine.poll()
            return tl.load(pointer)

        def store(desc, place, source):
            out(desc.write, place, source)

        def add(desc, place, source):
            out(desc.add, place, source)

        def store_wait(pendings):
            while len(local.stores) > pendings:
                self.machine.wait(late=True)
                local.stores.pop(0)()

        def fence():
            self.unfenced = False
            if hasattr(self, "machine"):
                self.machine.unfenced = [x for x in self.machine.unfenced if x[0] != local.number]

        def warpgroup_mma(a, b, acc, use_acc=True, is_async=False):
            assert is_async and a.dtype == b.dtype and acc.dtype == tl.float32
            for operand in (a, b):
                if isinstance(operand, Memory):
                    self.machine.check_seen(operand.array)
            local.products.append(Product(a, b, acc, use_acc))
            self.machine.wait()
            return local.products[-1]

        def warpgroup_mma_wait(num_outstanding, deps):
            self.machine.wait(late=True)
            while len(local.products) > num_outstanding:
                product = local.products.pop(0)
                # Others, keys that were read once or ones, are multiplied in each step, and given up after the loop.
                of_a_step = hasattr(product.a, "made")
                assert not of_a_step or any(x is product.a for x in deps), "registers given up too soon"
                product.compute()
            found = [x.value if isinstance(x, Product) and x.value is not None else x for x in deps]
            return found[0] if len(found) == 1 else tuple(found)

        def convert_layout(x, layout):
            x.made = True
            return x

        def without_layout(function):
            return lambda *arguments, layout=None: function(*arguments)

        gl = types.SimpleNamespace(
            constexpr=tl.constexpr,
            float32=tl.float32,
            bfloat16=tl.bfloat16,
            int32=tl.int32,
            uint32=tl.uint32,
            int64=tl.int64,
            static_range=range,
            static_assert=lambda *_: None,
            NVMMADistributedLayout=lambda *_: None,
            DotOperandLayout=lambda **_: None,
            SliceLayout=lambda *_: None,
            BlockedLayout=lambda *_: None,
            NVMMASharedLayout=types.SimpleNamespace(get_default_for=lambda *_: None),
            arange=without_layout(lambda *x: tl.arange(*x)),
            zeros=lambda shape, dtype, layout: tl.zeros(shape, dtype),
            full=lambda shape, value, dtype, layout: tl.full(shape, value, dtype),
            convert_layout=convert_layout,
            where=lambda *x: tl.where(*x),
            maximum=lambda *x: tl.maximum(*x),
            max=lambda x, axis: tl.max(x, axis),
            sum=lambda x, axis: tl.sum(x, axis),
            join=lambda *x: tl.join(*x),
            split=lambda x: tl.split(x),
            cdiv=lambda *x: tl.cdiv(*x),
            load=volatile,
            atomic_add=lambda pointer, value, **order: tl.atomic_add(pointer, value),
            minimum=lambda *x: tl.minimum(*x),
            inline_asm_elementwise=inline_asm_elementwise,
            program_id=lambda axis: tl.program_id(axis),
            num_programs=lambda axis: tl.num_programs(axis),
            allocate_shared_memory=allocate_shared_memory,
            warp_specialize=warp_specialize,
        )
        return dict(
            gl=gl,
            mbarrier=types.SimpleNamespace(
                init=init, wait=wait, arrive=arrive, expect=expect, MBarrierLayout=lambda: None
            ),
            async_load=load,
            async_store=store,
            async_add=add,
            store_wait=store_wait,
            fence_async_shared=fence,
            warpgroup_mma=warpgroup_mma,
            warpgroup_mma_wait=warpgroup_mma_wait,
        )
