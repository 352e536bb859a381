"""Fences between copies to shared memory and wgmma, which some versions of Triton leave out."""

import triton
import triton.language as tl
from triton import knobs
from triton.language.target_info import cuda_capability_geq

# Triton 3.6.0 puts its fence before the wait for a copy, where it orders nothing. Triton 3.7.1 puts it after the wait,
# as `fence` does: triton-lang/triton#9610, #10537.
_MAJOR, _MINOR, _PATCH = triton.__version__.split(".")[:3]
VERSION = int(_MAJOR), int(_MINOR), int(_PATCH[0])
UNFENCED = tl.constexpr(VERSION < (3, 7, 1) and not knobs.runtime.interpret)
LATER_UNFENCED = tl.constexpr(VERSION < (3, 9, 0) and not knobs.runtime.interpret)  # see `fence_later`


@triton.jit
def _fence():
    asm: tl.constexpr = "fence.proxy.async.shared::cta; mov.b32 $0, 0;"
    tl.inline_asm_elementwise(asm, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def fence():
    """Make earlier loads visible to wgmma, which reads shared memory through the async proxy."""
    # PTX ISA, "Async proxy": https://docs.nvidia.com/cuda/parallel-thread-execution/#async-proxy
    if UNFENCED and cuda_capability_geq(9, 0):
        _fence()


@triton.jit
def fence_later(BY_THREADS: tl.constexpr):
    """Make the preceding load visible to a later wgmma, if BY_THREADS (see `rules.Spec`)."""
    # With BY_THREADS, Triton before 3.9 waits for the tile's copies only here, after its own fence.
    if BY_THREADS and LATER_UNFENCED and cuda_capability_geq(9, 0):
        _fence()
