"""A GPU that is not there: Triton compiles for it, and what is launched on it does nothing."""

import contextlib
from unittest import mock

from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime.driver import driver

from fusedattn import backends, launch, repeat


class Driver:
    """Enough of one for Triton to choose a target."""

    def __init__(self, capability):
        self.capability = capability

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
        with mock.patch.object(launch, "capability", lambda device: capability):
            yield
    finally:
        driver._active = previous


def _load(kernel):
    kernel._run, kernel.module, kernel.function = (lambda *arguments: None), 0, 0


@contextlib.contextmanager
def gpu(capability=90, load=_load):
    """`fusedattn.attention` of CPU tensors with backend="triton" does all that the host does, and computes nothing.

    load: what is done with a compiled kernel before its first launch.
    """

    def load_once(kernel):
        if kernel.module is None:
            load(kernel)

    _forget()
    try:
        with (
            target(capability),
            mock.patch.object(backends, "machine_reasons", lambda device: ()),
            mock.patch.object(CompiledKernel, "_init_handles", load_once),
        ):
            yield
    finally:
        _forget()


def _forget():
    repeat.forget()
    for kernel in launch.KERNELS.values():
        kernel.device_caches.clear()
