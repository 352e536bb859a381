"""A GPU that is not there: Triton compiles for it, and what is launched on it does nothing."""

import atexit
import contextlib
import functools
import re
import shutil
import tempfile
from typing import NamedTuple
from unittest import mock

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime.driver import driver

from fusedattn.dispatch import backends, replay
from fusedattn.launch import run

MULTIPROCESSORS = 132


class Encoded(NamedTuple):
    """A tensor descriptor as the driver would encode it: the tensor's address and the other arguments."""

    what: tuple


class _Utils:
    """Stand-in for the driver's functions that encode descriptors, under both names."""

    def fill_tma_descriptor(self, *what):
        return Encoded(what)

    fill_tma_descriptor_tiled = fill_tma_descriptor


class Run:
    """The launcher of a compiled kernel, which gives what it would launch to a function."""

    def __init__(self, launched=lambda *grid_and_all: None):
        self.launch = self._wrap(launched)

    def _wrap(self, launcher):
        return lambda *grid_and_all: launcher(*grid_and_all)  # where descriptors are encoded, in Triton's

    def __call__(self, gridX, gridY, gridZ, stream, function, *rest):
        self.launch(gridX, gridY, gridZ, stream, function, *rest)


class Driver:
    """Enough of one for Triton to choose a target."""

    def __init__(self, capability):
        self.capability, self.utils = capability, _Utils()

    def get_current_device(self):
        return self.capability  # kernels are kept by device

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", self.capability, 32)


@contextlib.contextmanager
def target(capability):
    """Triton compiles for a compute capability, 90 for sm_90."""
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


# What no launch of nothing needs of a kernel that was compiled to machine code.
_UNUSED = dict(shared=0, tmem_size=0, global_scratch_size=0, global_scratch_align=1)
_UNUSED |= dict(profile_scratch_size=0, profile_scratch_align=1)


def _no_machine_code(backend=None, stages=None, options=None, language=None, capability=None):
    """In Triton's hook for the stages of a compilation: those after its own languages make nothing, in no time."""
    if stages is None:  # what it adds to the key by which Triton keeps kernels
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


def _load(kernel):
    kernel._run, kernel.function = Run(), 0  # no module: Triton would unload it


@contextlib.contextmanager
def gpu(capability=90, load=_load, stages=_no_machine_code, folder=None):
    """`fusedattn.attention` of CPU tensors with backend="triton" does all that the host does, and computes nothing.

    load: what is done with a compiled kernel before its first launch. stages: Triton's hook for those of a compilation.
    folder: where Triton keeps what they make; by default it is gone with this process.
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
            knobs.cache.scope(),
            knobs.runtime.scope(),
        ):
            knobs.cache.dir = folder or _cache()  # a kernel that has no machine code is for nobody else
            knobs.runtime.add_stages_inspection_hook = stages
            yield
    finally:
        _forget()


def _forget():
    replay.forget()
    for kernel in run.KERNELS.values():
        kernel.device_caches.clear()
