"""A GPU that is not there: Triton compiles for it."""

import contextlib
from unittest import mock

from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from fusedattn import launch


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
