"""Simulates a GPU that is absent: Triton compiles for it, and launches do nothing."""

import atexit
import contextlib
import functools
import re
import shutil
import tempfile
from typing import NamedTuple
from unittest import mock

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.experimental.gluon.nvidia import hopper
from triton.runtime.driver import driver
from triton.tools import tensor_descriptor

from fusedattn.dispatch import backends, replay
from fusedattn.launch import run

MULTIPROCESSORS = 132


class Encoded(NamedTuple):
    """A TMA descriptor: the arguments with which the driver would encode it."""

    what: tuple


class _Utils:
    """Substitute for the driver's functions that encode TMA descriptors, under their two names."""

    def fill_tma_descriptor(self, *what):
        return Encoded(what)

    fill_tma_descriptor_tiled = fill_tma_descriptor


class Run:
    """Launcher of a compiled kernel that passes its arguments to a function instead."""

    def __init__(self, launched=lambda *grid_and_all: None):
        self.launch = self._wrap(launched)

    def _wrap(self, launcher):
        return lambda *grid_and_all: launcher(*grid_and_all)  # Triton's wrapper encodes descriptors here

    def __call__(self, gridX, gridY, gridZ, stream, function, *rest):
        self.launch(gridX, gridY, gridZ, stream, function, *rest)


class Driver:
    """Substitute for Triton's driver, with what Triton needs to choose a target."""

    def __init__(self, capability):
        self.capability, self.utils = capability, _Utils()

    def get_current_device(self):
        return self.capability  # Triton caches kernels by device

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", self.capability, 32)


@contextlib.contextmanager
def target(capability):
    """Make Triton compile for a compute capability, such as 90 for sm_90, within a context."""
    previous = driver._active
    driver.set_active(Driver(capability))
    try:
        with (
            mock.patch.object(run, "capability", lambda device: capability),
            mock.patch.object(run, "multiprocessors", lambda device: MULTIPROCESSORS),
        ):
            yield
    finally:
        driver._active = previous


@contextlib.contextmanager
def rounding(precision):
    """Make kernels multiply float32 matrices in a precision, "ieee" or "tf32", within a context."""
    settings = torch.backends.cuda.matmul
    before, settings.fp32_precision = settings.fp32_precision, precision
    try:
        yield
    finally:
        settings.fp32_precision = before


# Metadata that Triton sets when it makes machine code, with values for a kernel that is never launched.
_UNUSED = dict(shared=0, tmem_size=0, global_scratch_size=0, global_scratch_align=1)
_UNUSED |= dict(profile_scratch_size=0, profile_scratch_align=1)


def _no_machine_code(backend=None, stages=None, options=None, language=None, capability=None):
    """Skip the compilation stages after TTGIR: Triton's hook for the stages of a compilation."""
    if stages is None:  # Triton asks for a part of its cache key
        return "no machine code", "no machine code"

    def finish(module, metadata):
        (name,) = re.findall(r"tt\.func public @(\w+)", str(module))
        metadata |= dict(_UNUSED, name=name)
        return ""

    stages |= dict(llir=finish, ptx=lambda module, metadata: "", cubin=lambda module, metadata: b"")


@functools.cache
def _cache():
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _as_the_driver(kind):
    """Make a class of TMA descriptors refuse what CUDA's driver refuses, beside what Triton does, within a context."""
    # Source: CUDA Driver API, cuTensorMapEncodeTiled. A stride of 0 is allowed there, but additions would be wrong.
    check = kind.__post_init__

    def checked(self):
        check(self)
        steps = [step * self.base.element_size() for step in self.strides[:-1]]
        is_null = self.base.device.type != "meta" and self.base.data_ptr() == 0
        if is_null or max(self.shape) > 2**32 or not all(0 < step < 2**40 for step in steps):
            raise ValueError(f"the driver refuses this descriptor: {self.shape}, {self.strides}")

    return mock.patch.object(kind, "__post_init__", checked)


def _load(kernel):
    kernel._run, kernel.function = Run(), 0  # not a loaded module, which Triton would unload


@contextlib.contextmanager
def gpu(capability=90, load=_load, stages=_no_machine_code, folder=None):
    """Make calls of CPU tensors with backend="triton" do all work of the host, but compute nothing.

    Args:
        load: function of a compiled kernel, called before its first launch.
        stages: Triton's hook for the stages of a compilation.
        folder: Triton's cache; by default one that is deleted with this process.
    """

    def load_once(kernel):
        if kernel._run is None:
            load(kernel)

    _forget()
    try:
        with (
            target(capability),
            mock.patch.object(backends, "machine_reasons", lambda device: ()),
            mock.patch.object(CompiledKernel, "_init_handles", load_once),
            _as_the_driver(hopper.TensorDescriptor),
            _as_the_driver(tensor_descriptor.TensorDescriptor),
            knobs.cache.scope(),
            knobs.runtime.scope(),
        ):
            knobs.cache.dir = folder or _cache()  # kernels without machine code must not reach the usual cache
            knobs.runtime.add_stages_inspection_hook = stages
            yield
    finally:
        _forget()


def _forget():
    replay.forget()
    for kernel in run.KERNELS.values():
        kernel.device_caches.clear()
